"""Random numbers of blocks whose parts are on several ranks.

Ranks that hold the same tensor must drop the same of it, and ranks that hold different parts of one must not,
or every part would be dropped alike. All ranks come with equal generators; what draws for a part draws from a
stream of that part's and leaves the generators behind as if every rank had drawn one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

_NO_OTHER = nullcontext()
# Odd, and far apart in the low 32 bits, which are all that the CPU's generator takes of a seed.
_APART = 0x9E3779B97F4A7C15


class Division(NamedTuple):
    """Which part of its tensors a block has on this rank; None where it has all of them.

    Args:
        inside: of heads and hidden units, between the block's first matrices and its last
        between: of what goes from block to block
    """

    inside: int | None = None
    between: int | None = None


WHOLE = Division()


def draws_of(shard: int | None, like: Tensor) -> AbstractContextManager[None]:
    """Within it, draws on the device of `like` come from the stream of part `shard`; None changes nothing."""
    return _NO_OTHER if shard is None else _stream(shard, like)


@contextmanager
def _stream(shard: int, like: Tensor) -> Iterator[None]:
    common = int(torch.randint(1 << 62, (), device="cpu"))  # the same on every rank
    generator = _generator(like.device)
    state = generator.get_state()
    generator.manual_seed((common + (shard + 1) * _APART) % (1 << 63))
    try:
        yield
    finally:
        generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator

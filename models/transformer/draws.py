"""Random numbers for blocks that tensor parallelism divides over ranks.

Ranks that hold the same tensor must drop the same elements; ranks with different parts of one must draw
differently, or every part would have the same mask. All ranks have equal generators. Draws for a part come
from a stream of this part, and advance the generators on every rank by one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

_NO_OTHER = nullcontext()
# Odd, and far apart in the low 32 bits: a CPU generator uses no more of a seed.
_APART = 0x9E3779B97F4A7C15


class Division(NamedTuple):
    """This rank's part of a block's tensors; None if it has all of them.

    Args:
        inside: index of its part of heads and hidden units, between the block's first and last matrices
        between: index of its part of the tensors between blocks
    """

    inside: int | None = None
    between: int | None = None


WHOLE = Division()


def draws_of(shard: int | None, like: Tensor) -> AbstractContextManager[None]:
    """Within it, draws on `like`'s device come from the stream of part `shard`; None changes nothing."""
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

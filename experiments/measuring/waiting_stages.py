"""Stages that wait instead of computing: what is left of a step is the schedule and the engine.

On two cores four workers cannot compute side by side, but they can wait side by side. So every action of a
stage takes a fixed time from its beginning, in which its tiny layers are computed and the rest is slept. A
step should then take what the replay of the same slots says; what it takes more is the engine's, be it ours
or torch's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from gpipe_bench.pipeline.plan.replay import SLOTS
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.stage.stage import Stage

# A sleep ends up to so much later than asked for; the last bit is waited for awake.
_LATE_S = 0.3e-3


@contextmanager
def waiting_stages(slot_s: float) -> Iterator[None]:
    """Within it, each action of our stages and of torch's takes `slot_s` for each of its slots."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    def of(kind: Kind) -> Callable[..., Kind]:
        return lambda *_, **__: kind

    def torchs_backward(*_: Any, full_backward: bool = True, **__: Any) -> Kind:
        return Kind.B if full_backward else Kind.I

    methods: list[tuple[type, str, Callable[..., Kind]]] = [
        (Stage, "forward", of(Kind.F)),
        (Stage, "recompute", of(Kind.R)),
        (Stage, "backward", of(Kind.B)),
        (Stage, "backward_inputs", of(Kind.I)),
        (Stage, "backward_weights", of(Kind.W)),
        (_PipelineStageBase, "forward_one_chunk", of(Kind.F)),
        (_PipelineStageBase, "backward_one_chunk", torchs_backward),
        (_PipelineStageBase, "backward_weight_one_chunk", of(Kind.W)),
    ]
    with ExitStack() as stack:
        for owner, name, kind_of in methods:
            slow = _slow(getattr(owner, name), kind_of, slot_s)
            stack.enter_context(mock.patch.object(owner, name, slow))
        yield


def _slow(method: Callable[..., Any], kind_of: Callable[..., Kind], slot_s: float) -> Callable[..., Any]:
    def take(self: Any, *arguments: Any, **options: Any) -> Any:
        end_s = time.perf_counter() + SLOTS[kind_of(*arguments, **options)] * slot_s
        result = method(self, *arguments, **options)
        wait_until(end_s)
        return result

    return take


def wait_until(end_s: float) -> None:
    """Returns when `time.perf_counter` is there."""
    left_s = end_s - time.perf_counter()
    if left_s > _LATE_S:
        time.sleep(left_s - _LATE_S)
    while time.perf_counter() < end_s:
        pass

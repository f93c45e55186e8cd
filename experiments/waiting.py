"""Stages and layers that wait instead of computing: what is left of a step is the schedule and the engine.

On two cores four workers cannot compute side by side, but they can wait side by side. So every action of a
stage takes a fixed time from its beginning, in which its tiny layers are computed and the rest is slept. A
step should then take what the replay of the same slots says; what it takes more is the engine's. A waiting
layer takes a fixed time forward and back, each gradient is there when its layer's time is over, and a sum
over replicas ends when a link that carries one after the other would have carried it: so the replay says,
too, what a step takes with and without an overlap of the sums with the backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Timer
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.mesh.collectives import Collectives
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.simulate import SLOTS
from gpipe_bench.pipeline.ranks.wire import Transit
from gpipe_bench.pipeline.stage.stage import Stage

# A sleep ends up to so much later than asked for; the last bit is waited for awake.
_LATE_S = 0.3e-3
_METHODS = {
    "forward": Kind.F, "recompute": Kind.R, "backward": Kind.B, "backward_inputs": Kind.I,
    "backward_weights": Kind.W,
}  # fmt: skip
"""Of a stage: what takes an action."""


@contextmanager
def waiting_stages(slot_s: float) -> Iterator[None]:
    """Within it, each action of a stage takes `slot_s` for each of its slots."""
    with ExitStack() as stack:
        for name, kind in _METHODS.items():
            slow = _slow(getattr(Stage, name), SLOTS[kind] * slot_s)
            stack.enter_context(mock.patch.object(Stage, name, slow))
        yield


def _slow(method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def take(self: Any, *arguments: Any, **options: Any) -> Any:
        end_s = time.perf_counter() + seconds
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


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        end_s = time.perf_counter() + forward_s
        ctx.save_for_backward(x, weight)
        ctx.backward_s = backward_s
        scaled = x * weight[0]
        wait_until(end_s)
        return scaled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        end_s = time.perf_counter() + ctx.backward_s
        x, weight = ctx.saved_tensors
        of_weight = torch.zeros_like(weight)
        of_weight[0] = (gradient * x).sum()
        wait_until(end_s)
        return gradient * weight[0], of_weight, None, None


class Waiting(nn.Module):
    """Takes `forward_s` and `backward_s` and has one parameter of `numel` float32 numbers."""

    def __init__(self, numel: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Scaled.apply(x, self.weight, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return found


class _Late:
    """A sum that is not over before the link has carried it."""

    def __init__(self, work: Any, end_s: float) -> None:
        self._work, self._end_s = work, end_s

    def wait(self) -> object:
        self._work.wait()
        wait_until(self._end_s)
        return True

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        Timer(max(0.0, self._end_s - time.perf_counter()), partial(future.set_result, None)).start()
        return future


@contextmanager
def slow_sums(seconds: Callable[[int], float]) -> Iterator[None]:
    """Within it, a sum over replicas takes `seconds` of its bytes on a link that carries one at a time."""
    free_s = 0.0
    at_once = Collectives.sum

    def late(self: Collectives, numbers: Tensor) -> Transit:
        nonlocal free_s
        free_s = max(free_s, time.perf_counter()) + seconds(numbers.nbytes)
        return _Late(at_once(self, numbers), free_s)

    with mock.patch.object(Collectives, "sum", late):
        yield

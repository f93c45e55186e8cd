"""Layers that wait instead of computing, and a link between replicas that takes its time.

On two cores neither four workers nor their sums run side by side, but all of them can wait side by side. So a
layer takes a fixed time forward and back, each gradient is there when its layer's time is over, and a sum
over replicas ends when a link that carries one after the other would have carried it. What a step should take
is then known from the replay, with and without an overlap of the sums with the backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Timer
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gpipe_bench.experiments.measuring.waiting_stages import wait_until
from gpipe_bench.pipeline.ranks.mesh.collectives import OverBackend
from gpipe_bench.pipeline.ranks.messages.connection import Work


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
    at_once = OverBackend.sum

    def late(self: OverBackend, numbers: Tensor) -> Work:
        nonlocal free_s
        free_s = max(free_s, time.perf_counter()) + seconds(numbers.nbytes)
        return _Late(at_once(self, numbers), free_s)

    with mock.patch.object(OverBackend, "sum", late):
        yield

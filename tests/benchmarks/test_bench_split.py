"""What it costs to split a backward: I and W against B, in processor time, and torch's own split beside it.

Both ways take turns within a round, there and back, so that what slows the machine down slows down both. The
ratios are in the benchmark's extra information; the time is that of a whole round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as torch_split

from gpipe_bench.pipeline.ranks.launch import keep_freed_memory
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.pipeline.stage.trees import Message

ROUNDS = 20


def convolutions(channels: int, kernel: int) -> nn.Sequential:
    block = partial(nn.Conv2d, channels, channels, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(
        *(nn.Sequential(block(), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)) for _ in range(4))
    )


def encoder(width: int, depth: int) -> nn.Sequential:
    layer = partial(nn.TransformerEncoderLayer, width, width // 64, 4 * width, 0.0, batch_first=True)
    return nn.Sequential(*(layer() for _ in range(depth)))


KINDS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "transformer, width 128": (lambda: encoder(128, 4), (4, 64, 128)),
    "transformer, width 512": (lambda: encoder(512, 1), (2, 128, 512)),
    "linear": (lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), (256, 512)),
    "convolution 3x3": (lambda: convolutions(64, 3), (8, 64, 28, 28)),
    "convolution 1x1": (lambda: convolutions(128, 1), (8, 128, 28, 28)),
    "convolution 3x3, small": (lambda: convolutions(32, 3), (4, 32, 16, 16)),
}


class Ways:
    """A layer's backward of the same micro-batch, in four ways; each returns its processor seconds."""

    def __init__(self, build: Callable[[], nn.Sequential], shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.layer, self.batch = build(), torch.randn(shape)
        self.stage = Stage(1, [self.layer], 1, device=torch.device("cpu"), is_last=False)
        self.stage.begin(0, 1, training=True)
        self.gradient = torch.randn_like(self.layer(self.batch))

    def _forward(self) -> None:
        self.stage.forward(0, Message((self.batch.clone(),), None, (True,)), graph=True)

    def _plain_forward(self) -> tuple[Tensor, Tensor]:
        batch = self.batch.clone().requires_grad_()
        return batch, self.layer(batch)

    def whole(self) -> float:
        self._forward()
        start_s = time.thread_time()
        self.stage.backward(0, (self.gradient,))
        return time.thread_time() - start_s

    def halves(self) -> float:
        self._forward()
        start_s = time.thread_time()
        self.stage.backward_inputs(0, (self.gradient,))
        self.stage.backward_weights(0)
        return time.thread_time() - start_s

    def torch_whole(self) -> float:
        batch, output = self._plain_forward()
        start_s = time.thread_time()
        torch_split.stage_backward([output], [self.gradient], [batch])
        return time.thread_time() - start_s

    def torch_halves(self) -> float:
        batch, output = self._plain_forward()
        start_s = time.thread_time()
        _, groups = torch_split.stage_backward_input(
            [output], [self.gradient], [batch], self.layer.parameters()
        )
        torch_split.stage_backward_weight(self.layer.parameters(), groups)
        return time.thread_time() - start_s


def there_and_back(first: Callable[[], float], second: Callable[[], float]) -> float:
    """The logarithm of how much longer `second` takes."""
    a, b = first(), second()
    b += second()
    return math.log(b / (a + first()))


@pytest.mark.parametrize("kind", KINDS)
def test_halves_against_the_whole(benchmark: Any, kind: str) -> None:
    if not benchmark.disabled:
        torch.set_num_threads(1)
        keep_freed_memory()  # as in a process of a pipeline: gradients that wait would come on new pages
    ways = Ways(*KINDS[kind])
    ratios: dict[str, list[float]] = {"ours": [], "torch": []}

    def take_turns() -> None:
        ratios["ours"].append(there_and_back(ways.whole, ways.halves))
        ratios["torch"].append(there_and_back(ways.torch_whole, ways.torch_halves))

    benchmark.pedantic(take_turns, rounds=ROUNDS, warmup_rounds=2)
    for name, found in ratios.items():
        benchmark.extra_info[name] = math.exp(median(found))

    ways.layer.zero_grad()
    ways.whole()
    wanted = [p.grad.clone() for p in ways.layer.parameters()]
    ways.layer.zero_grad()
    ways.halves()
    assert all(torch.equal(p.grad, a) for p, a in zip(ways.layer.parameters(), wanted, strict=True))

"""Peak bytes of two processes that share a weight, counted in real steps for `test_tied_memory`."""

from __future__ import annotations

import gc
from typing import Any

import torch
from grid_memory_cases import PresentBytes
from ranks import Ranks
from real_steps import OPTIMIZERS
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline

WORDS, WIDTH, EXAMPLES = 997, 16, 8


class Bytes(PresentBytes):
    """Without tensors that have none, by which a message says its form."""

    def _register(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            super()._register(tensor)


def model() -> nn.Sequential:
    """Nearly all bytes are those of the weight that the first and the last layer share."""
    torch.manual_seed(0)
    embedding, output = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    output.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), output)


def data() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (EXAMPLES,)), torch.randint(WORDS, (EXAMPLES,))


def counted(case: dict[str, Any]) -> int:
    """Bytes at the fullest moment of the third step of this process, the optimizer's included."""
    layers, watch = model(), Bytes()
    ranks = Ranks()
    own = ranks.own(*data())
    with watch:
        watch.watch(layers.parameters())
        pipeline = Pipeline(
            layers, num_stages=2, num_microbatches=case["microbatches"], schedule=case["schedule"],
            remat=case["remat"], cost=[1] * len(layers), group=ranks.group,
        )  # fmt: skip
        del layers
        optimizer = OPTIMIZERS[case["optimizer"]]([*pipeline.parameters()])
        for step in range(3):
            if step == 2:
                gc.collect()
                watch.peak = 0
            pipeline.step(*own, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    pipeline.close()
    return watch.peak


def count_all(cases: list[dict[str, Any]]) -> list[int]:
    return [counted(case) for case in cases]

"""What the guard times: training steps of the engine, with micro-batches and recomputation.

The worker loads this file beside the packages of the revision under test, so it imports nothing but the
standard library, torch and, from that revision, the public `pipeline.Pipeline` and `models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SEED = 1811


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `subject(batch_size)` makes layers, inputs, target and loss function.

    `forwards` is how often a step runs each layer forward, recomputations included; the worker counts it.
    """

    describe: str
    subject: Callable[[int], tuple[Any, Any, Any, Any]]
    num_stages: int
    num_microbatches: int
    microbatch_size: int
    forwards: int
    remat: str = "always"
    num_processes: int = 1  # 1: all stages in one process; else one process per stage

    @property
    def batch_size(self) -> int:
        return self.num_microbatches * self.microbatch_size


def _transformer(batch_size: int) -> tuple[Any, Any, Any, Any]:
    from gpipe_bench.models import MODELS, example_batch, loss_fn

    options: dict[str, Any] = {
        "num_layers": 4, "vocab_size": 256, "d_model": 64, "ffn_dim": 256, "num_heads": 4, "seq_len": 32,
    }  # fmt: skip
    layers = MODELS["transformer-lm"](**options)
    inputs, target = example_batch("transformer-lm", batch_size, **options)
    return layers, inputs, target, loss_fn("transformer-lm", **options)


def _tiny_layers(batch_size: int) -> tuple[Any, Any, Any, Any]:
    import torch
    from torch import nn

    width = 16
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    batch, target = torch.randn(2, batch_size, width)
    return layers, batch, target, nn.functional.mse_loss


BENCHMARKS: dict[str, Benchmark] = {
    "transformer": Benchmark(
        "a small Transformer, 2 stages in one process: mostly kernels", _transformer, 2, 4, 2, 8
    ),
    "tiny-layers": Benchmark(
        "linear layers of 16 units, 4 stages in one process: mostly the engine itself",
        _tiny_layers, 4, 8, 1, 15, remat="except_last",
    ),
    "two-processes": Benchmark(
        "a small Transformer, 2 stages in 2 processes: transport and waiting too",
        _transformer, 2, 4, 2, 8, num_processes=2,
    ),
}  # fmt: skip

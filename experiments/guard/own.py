"""What is timed of this project: training steps, with micro-batches and recomputation.

Loaded by the guard's processes as anybody's file of benchmarks is (docs/guard.md). What they build comes from
the revision under test, which need not know of any guard: its `pipeline.Pipeline` and `models`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

SEED = 1811

Step = Callable[[], Any]


def build_transformer() -> Step:
    """a small Transformer, 2 stages in one process: mostly kernels"""
    return _training(*_transformer(8), num_stages=2, num_microbatches=4, forwards=8)


def build_tiny_layers() -> Step:
    """linear layers of 16 units, 4 stages in one process: mostly the engine itself"""
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    batch = [*torch.randn(2, 8, 16), nn.functional.mse_loss]
    return _training(layers, batch, num_stages=4, num_microbatches=8, forwards=15, remat="except_last")


def build_two_processes() -> Step:
    """a small Transformer, 2 stages in 2 processes: transport and waiting too"""
    folder = tempfile.mkdtemp()
    other = subprocess.Popen(  # leaves with this process: its input ends
        [sys.executable, "-P", __file__, folder], stdin=subprocess.PIPE, stdout=sys.stderr, bufsize=0
    )
    assert other.stdin is not None
    told = other.stdin
    told.write(b"step\n")  # while the first is counted
    step = _one_of_two(folder, 0)

    def both() -> Any:
        told.write(b"step\n")
        return step()

    return both


BENCHMARKS = {
    "transformer": build_transformer,
    "tiny-layers": build_tiny_layers,
    "two-processes": build_two_processes,
}


def _transformer(batch_size: int) -> tuple[Any, list[Any]]:
    import torch

    from gpipe_bench.models import MODELS, example_batch, loss_fn

    torch.manual_seed(SEED)
    options: dict[str, Any] = {
        "num_layers": 4, "vocab_size": 256, "d_model": 64, "ffn_dim": 256, "num_heads": 4, "seq_len": 32,
    }  # fmt: skip
    layers = MODELS["transformer-lm"](**options)
    batch = example_batch("transformer-lm", batch_size, **options)
    return layers, [*batch, loss_fn("transformer-lm", **options)]


def _one_of_two(folder: str, rank: int) -> Step:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    given = _transformer(8)
    return _training(*given, num_stages=2, num_microbatches=4, forwards=8, group=dist.group.WORLD)


def _training(layers: Any, batch: list[Any], *, forwards: int, remat: str = "always", **options: Any) -> Step:
    """A training step, in the first of which each layer must run forward so often, recomputations included:
    one that forgets micro-batches or recomputations is not timed.
    """
    from gpipe_bench.pipeline import Pipeline

    engine = Pipeline(layers, remat=remat, **options)
    parts = list(engine.children())
    counts = [0] * len(parts)

    def count(index: int, *_: Any) -> None:
        counts[index] += 1

    def step() -> Any:
        engine.zero_grad(set_to_none=True)
        return engine.step(*batch)

    hooks = [part.register_forward_hook(partial(count, index)) for index, part in enumerate(parts)]
    step()
    for hook in hooks:
        hook.remove()
    if set(counts) != {forwards}:
        raise RuntimeError(
            f"a step runs its layers {sorted(set(counts))} times forward, not {forwards} times: "
            f"{options} and remat = {remat!r} are not what is measured"
        )
    return step


def _second_process(folder: str) -> None:
    """Takes a step for each line that comes, on another core than the first process if there is one."""
    if hasattr(os, "sched_setaffinity"):
        first = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0) - first, default=min(first))})
    sys.stdin.readline()
    step = _one_of_two(folder, 1)
    for _ in sys.stdin:
        step()


if __name__ == "__main__":
    _second_process(*sys.argv[1:])

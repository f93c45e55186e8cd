"""Replicas of ours and torch's, in turns in the same processes: DistributedDataParallel, or FSDP2.

    python -m gpipe_bench.experiments.grid.side_by_side --rounds 20
    python -m gpipe_bench.experiments.grid.side_by_side --rounds 20 --zero 2 3
    python -m gpipe_bench.experiments.grid.side_by_side --rounds 20 --replicas 4 --device cuda

Both train a copy each of one Transformer on the same shares of a batch, a step without its optimizer:
forward, backward and the sum of the gradients over the replicas. With several micro-batches torch's adds up
gradients without a sum (`no_sync`) but for the last. With `zero` the parameters are divided among the
replicas, layer by layer, and torch's is `fully_shard` with the calls that make it ZeRO-2 or ZeRO-3 where
there are several micro-batches. Gradients are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gpipe_bench.experiments.side_by_side import Found, measured, take_turns
from gpipe_bench.experiments.timed.steps import run_processes
from gpipe_bench.harness.record import from_samples
from gpipe_bench.harness.rounds import against_itself, ratios, slowest
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline, devices

OURS, TORCHS = "pipeline", "torch"
MODEL = "transformer-lm"
SIZES = {
    "num_layers": 6, "d_model": 256, "ffn_dim": 1024, "num_heads": 4, "vocab_size": 1000, "seq_len": 64,
    "dropout": 0.0,
}  # fmt: skip
_MOST_DIFFERENT = 1e-4  # of the largest gradient, in float32
_STEPS_BEFORE = 3


class Job(NamedTuple):
    """One run as its processes see it. `examples` is the share of each replica."""

    replicas: int = 2
    examples: int = 8
    num_microbatches: int = 1
    num_rounds: int = 20
    seed: int = 0
    bucket_bytes: int | None = None
    zero: int | None = None
    sizes: dict[str, Any] = SIZES
    device: str = "cpu"


def work(job: Job) -> Found:
    """What each process does. `RuntimeError` where the two do not compute the same."""
    torch.manual_seed(job.seed)
    device = devices.current(job.device)
    model = MODELS[MODEL](**job.sizes).to(device)
    twin = copy.deepcopy(model)
    size = job.replicas * job.examples
    generator = torch.Generator().manual_seed(1)
    batch, target = (each.to(device) for each in example_batch(MODEL, size, generator=generator, **job.sizes))
    rank = dist.get_rank()
    own = slice(rank * job.examples, (rank + 1) * job.examples)
    steps = {
        OURS: _ours(job, model, batch[own], target[own]),
        TORCHS: _torchs(job, twin, batch[own], target[own]),
    }
    for _ in range(_STEPS_BEFORE):  # connections are made, and both know in which order gradients come
        for step in steps.values():
            step()
    difference = _difference(model, twin)
    if not difference < _MOST_DIFFERENT:
        raise RuntimeError(
            f"the gradients of the two differ by {difference:.1e} of the largest; nothing was timed"
        )
    found = take_turns(steps, [model, twin], job.num_rounds, job.seed, device)
    return found._replace(details={"difference": difference})


def _ours(job: Job, model: nn.Sequential, batch: Tensor, target: Tensor) -> Callable[[], object]:
    names = ("dp" if job.zero is None else "fsdp", "pp")
    mesh = init_device_mesh(job.device, (job.replicas, 1), mesh_dim_names=names)
    pipeline = Pipeline(
        model, mesh=mesh, num_microbatches=job.num_microbatches, schedule="1f1b", remat="never",
        bucket_bytes=job.bucket_bytes, zero=job.zero,
    )  # fmt: skip
    loss = loss_fn(MODEL, **job.sizes)

    def step() -> None:
        pipeline.zero_grad()
        pipeline.step(batch, target, loss)

    return step


def _torchs(job: Job, model: nn.Sequential, batch: Tensor, target: Tensor) -> Callable[[], object]:
    parallel: DistributedDataParallel | nn.Sequential = model
    divided: list[FSDPModule] = []
    keeps = job.zero == 2  # what was gathered, from the first forward of a step to its last backward
    if job.zero is None:
        parallel = DistributedDataParallel(model)
    else:
        layers = [layer for layer in model if any(True for _ in layer.parameters())]
        mesh = init_device_mesh(job.device, (job.replicas,))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps)
        divided = [layer for layer in layers if isinstance(layer, FSDPModule)]
    loss: Callable[..., Tensor] = loss_fn(MODEL, **job.sizes)
    parts = list(zip(batch.chunk(job.num_microbatches), target.chunk(job.num_microbatches), strict=True))

    def step() -> None:
        parallel.zero_grad()
        for m, (inputs, wanted) in enumerate(parts):
            last = m == len(parts) - 1
            for layer in divided:
                # With ZeRO-3 every micro-batch scatters its gradients, as ours do: kept whole until the last
                # one they would take the memory that the level saves.
                layer.set_is_last_backward(last or not keeps)
                layer.set_requires_gradient_sync(last or not keeps)
                layer.set_reshard_after_backward(last or not keeps)
            with ExitStack() as stack:
                if isinstance(parallel, DistributedDataParallel) and not last:
                    stack.enter_context(parallel.no_sync())
                torch.autograd.backward(loss(parallel(inputs), wanted) / len(parts))

    return step


def _difference(model: nn.Module, twin: nn.Module) -> float:
    pairs = [
        (_own(a.grad), _own(b.grad)) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
        if a.grad is not None and b.grad is not None
    ]  # fmt: skip
    if len(pairs) < len(list(model.parameters())):
        return float("inf")
    pairs = [(ours, theirs) for ours, theirs in pairs if theirs.numel()]
    largest = max(float(theirs.abs().max()) for _, theirs in pairs)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs) / largest


def _own(gradient: Tensor) -> Tensor:
    """This process's part of it."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def lines(job: Job, found: Sequence[Found]) -> list[str]:
    """What the processes found, as text: the slowest's steps, ours over torch's and ours over itself by
    round, and the largest difference of any gradient, relative to the largest gradient.
    """
    times = slowest([each.times for each in found])
    theirs = "DistributedDataParallel" if job.zero is None else f"fully_shard, ZeRO-{job.zero}"
    ratio, control = (
        measured(from_samples("", samples, "ratio"))
        for samples in (ratios(times, OURS, TORCHS), against_itself(times, OURS))
    )
    difference = max(each.details["difference"] for each in found)
    return [
        f"{job.replicas} replicas x {job.examples} examples, M = {job.num_microbatches}, torch: {theirs}",
        *(f"{name:24} {1e3 * median(samples):8.2f} ms" for name, samples in times.items()),
        f"ours / torch's {ratio}, control {control}, gradients {difference:.0e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--examples", type=int, default=8, help="of each replica")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--zero", type=int, nargs="+", choices=(2, 3), help="beside FSDP2 instead of DDP")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each")
    parser.add_argument("--bucket-mib", type=float, help="of ours; torch's have its default")
    options = parser.parse_args()
    for zero, num_microbatches in product(options.zero or [None], options.microbatches):
        bucket_bytes = None if options.bucket_mib is None else int(options.bucket_mib * 2**20)
        job = Job(
            options.replicas, options.examples, num_microbatches, options.rounds, bucket_bytes=bucket_bytes,
            zero=zero, device=options.device,
        )  # fmt: skip
        print("\n".join(lines(job, run_processes(work, job.replicas, job, device=job.device))), flush=True)


if __name__ == "__main__":
    main()

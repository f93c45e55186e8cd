"""What the engine computes, line by line: run it before and after a change of structure, and compare.

    python tests/support/engine_digests.py             peaks
    python tests/support/engine_digests.py --weights   digests of weights too

Peaks are bytes of every worker, modelled: the same on every machine. Weights, which depend on the machine,
are those after three steps, for every named schedule, number of workers and re-materialization, in one
process and in two, with a mask that is drawn, averages of batch normalization, a weight that two stages share
and micro-batches that are uneven.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from itertools import product

import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.pipeline import (
    NAMED,
    Boundary,
    Pipeline,
    Profiler,
    launch,
    named,
    partition,
    pipeline_memory,
)
from gpipe_bench.pipeline.memory.workers import shared_weights

REMATS = ("never", "except_last", "always")
WORKERS = (1, 2, 4)
MICROBATCHES = (3, 8)
NUM_LAYERS = 16


def model() -> nn.Sequential:
    """Sixteen layers, so that every schedule of four workers has a layer for each of its stages."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS // 4):
        layers += [nn.Linear(12, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.3)]
    tied = nn.Linear(12, 12, bias=False)
    layers[3], layers[-1] = tied, nn.Linear(12, 12, bias=False)
    layers[-1].weight = tied.weight
    return nn.Sequential(*layers)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def peaks() -> Iterator[str]:
    """A line for each schedule, workers, micro-batches and re-materialization that there is."""
    inputs, target = torch.empty(3, 12, device="meta"), torch.empty(3, 12, device="meta")
    profiler = Profiler(split_backward=True, ties_apart=True)
    layers = model()
    profile = profiler.model(layers, nn.functional.mse_loss, Boundary.of(inputs), Boundary.of(target))
    ties = shared_weights(list(layers))
    for name, workers, count, remat in product(NAMED, WORKERS, MICROBATCHES, REMATS):
        try:
            schedule = named(name, workers, count, remat=remat)
        except ValueError as error:
            yield f"{name} {workers} {count} {remat}: {error}"
            continue
        cut = partition([1.0] * NUM_LAYERS, schedule.num_stages)
        for optimizer, ahead in (("sgd", 0), ("adam", 1)):
            found = pipeline_memory(
                *profile, cut, schedule, optimizer=optimizer, receive_ahead=ahead, ties=ties
            )
            yield f"{name} {workers} {count} {remat} {optimizer} {ahead}: {[each.peak for each in found]}"


def trained(name: str, workers: int, remat: str, group: dist.ProcessGroup | None = None) -> str:
    """The digest of this process's weights and buffers after three steps, and of what they returned."""
    layers = model()
    pipeline = Pipeline(
        layers, num_workers=workers, num_microbatches=5, schedule=name, remat=remat, cost=[1.0] * len(layers),
        seed=3, group=group,
    )  # fmt: skip
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    state: dict[str, torch.Tensor] = {}
    for step in range(3):
        inputs, target = torch.randn(2, 13, 12, generator=generator)
        loss = pipeline.step(inputs, target, nn.functional.mse_loss)
        state[f"loss {step}"] = torch.as_tensor(loss)
        optimizer.step()
        optimizer.zero_grad()
    return digest(state | pipeline.state_dict())


def weights(group: dist.ProcessGroup | None = None) -> list[str]:
    """A line for each schedule, workers and re-materialization; over the ranks of a group if there is one."""
    lines = []
    for name, workers, remat in product(NAMED, WORKERS if group is None else (2,), REMATS):
        try:
            found = trained(name, workers, remat, group)
        except ValueError as error:
            found = str(error)
        lines.append(f"{name} {workers} {remat}: {found}")
    return lines


def over_processes() -> list[str]:
    return weights(dist.group.WORLD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", action="store_true")
    given = parser.parse_args()
    print(*peaks(), sep="\n")
    if given.weights:
        print(*weights(), sep="\n")
        for rank, mine in enumerate(launch(over_processes, 2, device="cpu")):
            print(*(f"rank {rank} {line}" for line in mine), sep="\n")


if __name__ == "__main__":
    main()

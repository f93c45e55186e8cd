"""What a process holds does not grow: neither from pipeline to pipeline nor from step to step.

    PYTHONPATH=. python tests/support/growth_cases.py --cycles 200 --steps 1000

builds, steps and closes that many pipelines, and takes that many steps of ever other shapes with one; in one
process and over two. It prints what has grown between the first quarter and the end.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gpipe_bench.pipeline import Pipeline, launch
from gpipe_bench.pipeline.ranks import ends

NUM_PROCESSES = 2
WIDTH = 64
SCHEDULES = (("gpipe", "always"), ("1f1b", "never"), ("zb-h1", "always"), ("interleaved", "except_last"))
# Kinds of steps that the ranks remember; with one more they begin anew.
MOST_AGREEMENTS = 8
# What may come and go: what is known of these kinds, and resident memory as the allocator likes.
SLACK = {"objects": 600, "tensors": 40, "resident bytes": 2**23}


def held() -> dict[str, int]:
    """Numbers of what this process holds, and bytes."""
    gc.collect()
    maps = re.findall(r"(\w+)-(\w+) .* /memfd:", Path("/proc/self/maps").read_text(encoding="ascii"))
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
        "shared bytes": sum(int(end, 16) - int(start, 16) for start, end in maps),
        "resident bytes": 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1]),
    }


Where = dist.ProcessGroup | DeviceMesh | None
"""A pipeline of all processes, replicas of one in each, or a pipeline in this process alone."""


def pipeline_of(schedule: str, remat: str, where: Where) -> Pipeline:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)]
    if isinstance(where, DeviceMesh):
        return Pipeline(layers, mesh=where, num_microbatches=2, remat=remat, timeout_s=60.0)
    return Pipeline(
        layers, num_stages=4 if schedule == "interleaved" else 2, num_microbatches=2, schedule=schedule,
        remat=remat, group=where, cost=[1] * 8, timeout_s=60.0,
    )  # fmt: skip


def step(pipeline: Pipeline, batch: torch.Tensor) -> None:
    pipeline.step(batch, batch, nn.functional.mse_loss)
    pipeline.zero_grad()


def cycles(number: int, where: Where) -> Callable[[int], None]:
    """One pipeline after the other."""

    def cycle(index: int) -> None:
        with pipeline_of(*SCHEDULES[index % len(SCHEDULES)], where) as pipeline:
            step(pipeline, torch.zeros(4, WIDTH))

    return cycle


def steps(number: int, where: Where) -> Callable[[int], None]:
    """One step after the other, of ever shorter sequences, so that the largest messages come first."""
    pipeline = pipeline_of("1f1b", "always", where)

    def one(index: int) -> None:
        batch = torch.zeros(2 + index % 3, 1 + (number - index) // 3, WIDTH)
        step(pipeline, batch)
        if index % 5 == 0:
            pipeline.eval()(batch)
            pipeline.train()

    return one


def growth(one: Callable[[int], None], number: int) -> list[str]:
    """What has grown in this process, between a quarter of the `number` and the end."""
    for index in range(number // 4):
        one(index)
    before = held()
    for index in range(number // 4, number):
        one(index)
    after = held()
    # Memory that processes share is bounded by what is in flight, whatever sizes the messages have had.
    allowed = {**SLACK, "shared bytes": before["shared bytes"]}
    return [
        f"{name} grew from {before[name]} to {after[name]}"
        for name in before
        if after[name] - before[name] > allowed.get(name, 0)
    ]


def run(num_cycles: int, num_steps: int) -> list[str]:
    """What has grown in this process, alone and as one of all."""
    found = []
    with mock.patch.object(ends, "MOST_AGREEMENTS", MOST_AGREEMENTS):
        mesh = init_device_mesh("cpu", (NUM_PROCESSES, 1), mesh_dim_names=("dp", "pp"))
        places: tuple[tuple[str, Where], ...]
        places = ("alone", None), ("of several", dist.group.WORLD), ("on a grid", mesh)
        for place, where in places:
            for what, make, number in (("cycles", cycles, num_cycles), ("steps", steps, num_steps)):
                found += [f"{place}, {what}: {text}" for text in growth(make(number, where), number)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    outcomes = launch(run, NUM_PROCESSES, arguments.cycles, arguments.steps, pin=False, device="cpu")
    found = [f"rank {rank}, {text}" for rank, texts in enumerate(outcomes) for text in texts]
    print("\n".join(found) or "nothing has grown")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

"""Training as people do it, ended and begun anew: groups of parameters with options of their own, a scheduler
of the learning rate, a checkpoint after each step, replicas with unequal numbers of steps.
"""

from __future__ import annotations

import os
from pathlib import Path

import growth_cases
import pytest
import torch
from case_runner import watched
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import OneCycleLR

from gpipe_bench.pipeline import ActionError, Pipeline, checkpoint

STEPS = 6


def built(num_stages: int, group: torch.distributed.ProcessGroup | None = None) -> tuple:
    """A pipeline, an optimizer that decays weights and no biases, and its scheduler."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)))
    pipeline = Pipeline(
        layers, num_stages=num_stages, num_microbatches=2, schedule="1f1b", cost=[1] * 4, group=group,
        timeout_s=30.0,
    )  # fmt: skip
    named = list(pipeline.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0, "lr": 0.05},
    ]
    optimizer = torch.optim.AdamW(groups)
    return pipeline, optimizer, OneCycleLR(optimizer, [0.02, 0.05], total_steps=STEPS + 1)


def step(folder: Path, pipeline: Pipeline, optimizer: torch.optim.Optimizer, scheduler: OneCycleLR) -> None:
    """One step of training, and the checkpoint; the scheduler's state is a file beside it, as the same on
    every rank.
    """
    generator = torch.Generator().manual_seed(pipeline.num_steps)
    batch = torch.randn(4, 6, generator=generator)
    pipeline.step(batch, batch.roll(1, dims=1), nn.functional.mse_loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    checkpoint.save(folder / "run", pipeline, optimizer)
    torch.save(scheduler.state_dict(), folder / f"scheduler {pipeline.num_steps} {os.getpid()}")
    os.replace(
        folder / f"scheduler {pipeline.num_steps} {os.getpid()}", folder / f"scheduler {pipeline.num_steps}"
    )


def went_on(
    folder: Path, pipeline: Pipeline, optimizer: torch.optim.Optimizer, scheduler: OneCycleLR
) -> None:
    """Loads what is there; the state of the scheduler is that of as many steps."""
    if (folder / "run").exists():
        checkpoint.load(folder / "run", pipeline, optimizer)
        scheduler.load_state_dict(torch.load(folder / f"scheduler {pipeline.num_steps}", weights_only=True))


def weights_without_an_end(folder: Path, num_stages: int) -> dict[str, Tensor]:
    folder.mkdir()
    pipeline, optimizer, scheduler = built(num_stages)
    for _ in range(STEPS):
        step(folder, pipeline, optimizer, scheduler)
    return pipeline.state_dict()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_groups_and_a_scheduler_go_on_over_a_checkpoint(tmp_path: Path, before: int, after: int) -> None:
    """With another number of stages, to the bit."""
    run = built(before)
    for _ in range(3):
        step(tmp_path, *run)
    rates = [group["lr"] for group in run[1].param_groups]
    again = built(after)
    went_on(tmp_path, *again)
    assert [group["lr"] for group in again[1].param_groups] == rates
    assert [group["weight_decay"] for group in again[1].param_groups] == [0.1, 0.0]
    assert rates[0] != rates[1]
    for _ in range(3):
        step(tmp_path, *again)
    wanted, found = weights_without_an_end(tmp_path / "whole", 1), again[0].state_dict()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def train_until_one_stops() -> str:
    """Of two replicas, of two stages each, the second takes a step less than the first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
    pipeline = Pipeline(layers, mesh=mesh, num_microbatches=2, cost=[1, 1], timeout_s=600.0)
    try:
        for _ in range(3 - dist.get_rank() // 2):
            pipeline.step(torch.ones(4, 6), torch.ones(4, 6), nn.functional.mse_loss)
        pipeline.close()
    except ActionError as error:
        return str(error)
    return "trained"


@pytest.mark.processes
def test_a_replica_that_takes_fewer_steps_ends_the_others() -> None:
    """Long before the pipeline's timeout."""
    said = watched(train_until_one_stops, 4)
    assert said[2:] == ["trained"] * 2
    assert said[0] == said[1]
    assert said[0].endswith("where no replica has failed, give all of them equally many mini-batches")


# The programs of `growth_cases`, in small


@pytest.mark.processes
def test_what_a_process_holds_does_not_grow() -> None:
    outcomes = watched(growth_cases.run, growth_cases.NUM_PROCESSES, 16, 64)
    assert not [text for of_rank in outcomes for text in of_rank]

"""What the processes of the tests do; a module of its own, so that they can import it."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from counting import counting, counts
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.experiments.paper import steps
from gpipe_bench.pipeline import ActionError, Pipeline, devices

TIMEOUT_S = 10.0  # that a rank waits for another one


def steady_step(schedule: str, remat: str) -> tuple[dict[str, int], int]:
    """What a step over NCCL asks for when two have been taken; and the queues of the device."""
    device, size = torch.device("cuda", distributed.get_rank()), distributed.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1)) for _ in range(2 * size)]
    data = torch.randn(64, 64)
    with Pipeline(
        layers, num_stages=size, num_microbatches=8, schedule=schedule, remat=remat, devices=device,
        group=distributed.group.WORLD,
    ) as pipeline:  # fmt: skip
        for _ in range(3):
            pipeline.step(data, data.to(device), nn.functional.mse_loss)
        data_there = data.to(device)
        with counting() as found:
            pipeline.step(data, data_there, nn.functional.mse_loss)
        return found, counts()["connections"]


class Waits(nn.Module):
    """Lets the fourth forward from now on pass when rank 1 says so."""

    calls = -100

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4:
            distributed.distributed_c10d._get_default_store().wait(["go on"])
        return x * 1


def behind_a_message() -> tuple[int, bool]:
    """The process's current device; and whether rank 1's device had gone through its part of a step before
    rank 0 sent the last message of it.
    """
    rank, chosen = distributed.get_rank(), torch.cuda.current_device()
    device = torch.device("cuda", rank)
    layers = [nn.Sequential(nn.Linear(8, 8), Waits()), nn.Linear(8, 8)]
    data = torch.randn(64, 8, device=device)
    with Pipeline(
        layers, num_stages=2, num_microbatches=4, cost=[1, 1], devices=device, group=distributed.group.WORLD
    ) as pipeline:
        for _ in range(2):
            pipeline.step(data, data, nn.functional.mse_loss)
        torch.cuda.synchronize(device)
        distributed.barrier()
        layers[0][1].calls = 0
        pipeline.step(data, data, nn.functional.mse_loss)
        went_on = devices.mark(device).query()
        if rank == 1:
            distributed.distributed_c10d._get_default_store().set("go on", "")
        torch.cuda.synchronize(device)
        return chosen, went_on


def link_of() -> tuple[str, set[int]]:
    """The measured link, and the thread blocks of the communicators that its messages took."""
    device, took, give = torch.device("cuda", distributed.get_rank()), set[int](), steps._one_way_s

    def noted(rank: int, num_bytes: int, device: torch.device, group: Any) -> float:
        took.add(group._get_backend(device).options.config.max_ctas)
        return give(rank, num_bytes, device, group)

    with mock.patch.object(steps, "_one_way_s", noted):
        return steps.measured_link(device).source, took


class Stops(nn.Linear):
    """Stands still when it is due, for longer than the others wait."""

    is_due = False

    def forward(self, input: Tensor) -> Tensor:
        if self.is_due:
            self.is_due = False
            time.sleep(2 * TIMEOUT_S)
        return super().forward(input)


def beside_one_that_stops(how: str) -> tuple[float, str]:
    """After how many seconds a rank raises what, when rank 1 stops in the third step. `how` the others wait:
    "item": for the loss, "ahead": the host gives the device step after step, "sum": replicas wait in a sum.
    """
    rank, size, device = distributed.get_rank(), distributed.get_world_size(), devices.exact("cuda")
    torch.manual_seed(0)
    layers = [Stops(64, 64) for _ in range(size)]
    mesh = init_device_mesh("cuda", (size, 1) if how == "sum" else (1, size), mesh_dim_names=("dp", "pp"))
    pipeline = Pipeline(
        layers, num_stages=mesh.size(1), num_microbatches=4, cost=[1] * size, mesh=mesh, devices=device,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    data = torch.randn(64, 64, device=device)
    for _ in range(2):
        pipeline.step(data, data, nn.functional.mse_loss).item()
    distributed.barrier()
    layers[-1 if how == "sum" else 1].is_due = rank == 1
    begun_s = time.monotonic()
    try:
        while time.monotonic() < begun_s + 6 * TIMEOUT_S:
            loss = pipeline.step(data, data, nn.functional.mse_loss)
            if how == "item":
                loss.item()
    except ActionError as error:
        return time.monotonic() - begun_s, str(error)
    return 0.0, "nothing"

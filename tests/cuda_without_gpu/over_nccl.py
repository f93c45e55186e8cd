"""What the processes of the tests do; a module of its own, so that they can import it."""

from __future__ import annotations

import torch
from counting import counting, counts
from torch import distributed, nn

from gpipe_bench.pipeline import Pipeline


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

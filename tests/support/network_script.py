"""Trains a small model for 50 steps over processes without shared memory, as on two hosts."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.pipeline import Pipeline, start_process

with start_process() as device:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.05)) for _ in range(8)]
    with Pipeline(
        layers, num_microbatches=4, devices=device, group=dist.group.WORLD, share_memory=False
    ) as pipeline:
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=3e-3)
        for step in range(50):
            inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)).cumsum(dim=1).tanh()
            loss = pipeline.step(inputs, inputs.roll(1, dims=1), nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and step % 10 == 9:
                print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)

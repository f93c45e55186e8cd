"""Trains a small model with one pipeline stage per process; `docs/running.md` starts it in every way there
is.

Every process builds the same layers, keeps its stage, and takes the same steps. Only the first rank's inputs
and the last rank's targets are used, so each process may read just what it needs.
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.pipeline import Pipeline, start_process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--network", action="store_true", help="do not share memory with processes of the same host"
    )
    options = parser.parse_args()

    with start_process() as device:
        torch.manual_seed(0)  # the same weights on every rank
        layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.05)) for _ in range(7)]
        layers.append(nn.Linear(32, 32))
        pipeline = Pipeline(
            layers,
            num_stages=dist.get_world_size(),
            num_microbatches=4,
            remat="except_last",
            devices=device,
            group=dist.group.WORLD,
            share_memory=not options.network,
        )
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=3e-3)
        data = torch.Generator().manual_seed(1)
        for step in range(options.steps):
            inputs = torch.randn(64, 32, generator=data).cumsum(dim=1).tanh().to(device)
            loss = pipeline.step(inputs, inputs.roll(1, dims=1), nn.functional.mse_loss)
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and step % 10 == 9:
                print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)
        pipeline.close()


if __name__ == "__main__":
    main()

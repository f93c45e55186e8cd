"""What the ranks of a pipeline over NCCL do when one stops in the middle of a step; under torchrun.

Arguments: how the others wait ("item": for the loss, "ahead": the host gives the device step after step,
"sum": replicas wait in a sum), and the pipeline's `timeout_s`. Rank 1 stops in its third step; each other
rank prints after how many seconds it raised what.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.pipeline import Pipeline, start_process


class Stops(nn.Module):
    """Lets two steps pass; then its rank computes no more, for as long as anybody may wait."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_due = nn.Linear(64, 64), False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.is_due:
            time.sleep(3600)
        return self.linear(inputs)


def main(how: str, timeout_s: float) -> None:
    with start_process() as device:
        rank, size = distributed.get_rank(), distributed.get_world_size()
        torch.manual_seed(0)
        layers = [Stops() for _ in range(size)]
        options = {"num_microbatches": 4, "devices": device, "timeout_s": timeout_s}
        if how == "sum":
            mesh = init_device_mesh("cuda", (size, 1), mesh_dim_names=("dp", "pp"))
            pipeline = Pipeline(layers, num_stages=1, mesh=mesh, **options)
        else:
            options["group"] = distributed.group.WORLD
            pipeline = Pipeline(layers, num_stages=size, cost=[1] * size, **options)
        data = torch.randn(64, 64, device=device)
        for _ in range(2):
            pipeline.step(data, data, nn.functional.mse_loss).item()
        distributed.barrier()
        layers[-1 if how == "sum" else 1].is_due = rank == 1
        begun_s = time.monotonic()
        try:
            while True:
                loss = pipeline.step(data, data, nn.functional.mse_loss)
                if how == "item":
                    loss.item()
        except Exception as error:
            found = {
                "rank": rank,
                "seconds": time.monotonic() - begun_s,
                "error": f"{type(error).__name__}: {error}",
            }
            print(json.dumps(found), flush=True)
            raise


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

"""Peak bytes of two processes that hold the same stage, counted in real steps for `test_grid_memory`."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import torch
from real_steps import OPTIMIZERS
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.memory.tracker import StorageWatch

WIDTHS = (16, 96, 64, 160, 24, 8)


def model() -> nn.Sequential:
    """Layers of different sizes, some without parameters; most bytes are parameters'."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    return nn.Sequential(*layers)


def data(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, WIDTHS[0]), torch.randn(examples, WIDTHS[-1])


class PresentBytes(StorageWatch):
    """Bytes of all watched storages after every operation, as large as each is then: FSDP2 makes storages
    small and large again instead of making new ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def look(self) -> None:
        alive = [reference() for reference in self._references.values()]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.look()
        return result


def counted(case: dict[str, Any]) -> int:
    """Bytes at the fullest moment of the third step of this process, the optimizer's included."""
    name = case["dimension"]
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=(name, "pp"))
    options = {"zero": case["level"]} if name == "fsdp" else {"bucket_bytes": case["bucket_bytes"]}
    layers = model()
    watch = PresentBytes()
    with watch:
        watch.watch(layers.parameters())
        pipeline = Pipeline(
            layers, num_stages=1, mesh=mesh, num_microbatches=case["microbatches"],
            schedule=case["schedule"], remat=case["remat"], cost=[1] * len(layers), **options,
        )  # fmt: skip
        batch, target = data(case["examples"] * case["microbatches"])
        del layers
        optimizer = OPTIMIZERS[case["optimizer"]]([*pipeline.parameters()])
        for step in range(3):
            if step == 2:
                gc.collect()
                watch.peak = 0
            pipeline.step(batch, target, nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
    pipeline.close()
    return watch.peak


def count_all(cases: list[dict[str, Any]]) -> list[int]:
    return [counted(case) for case in cases]

"""Peak bytes of two processes that hold the same stage, or share a weight, counted in real steps for
`test_grid_memory`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from ranks import Ranks
from real_steps import OPTIMIZERS
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.memory.tracker import StorageWatch

WIDTHS = (16, 96, 64, 160, 24, 8)
WORDS, WIDTH, EXAMPLES = 997, 16, 8
mse_loss = nn.functional.mse_loss


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

    def _register(self, tensor: Tensor) -> None:
        """Of a tensor that is divided over processes, the part that is here; none of tensors without bytes,
        by which a message says its form.
        """
        if not tensor.is_meta:
            super()._register(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def look(self) -> None:
        alive = [reference() for reference in self._references.values()]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.look()
        return result

    def fullest(self, pipeline: Pipeline, optimizer: str, step: Callable[[], object]) -> None:
        """Makes `peak` that of the third step of this process, the optimizer's included."""
        made = OPTIMIZERS[optimizer]([*pipeline.parameters()])
        for number in range(3):
            if number == 2:
                gc.collect()
                self.peak = 0
            step()
            made.step()
            made.zero_grad()


class Settled:
    """A collective of FSDP2's that has let go of its tensors when it is through; a thread of gloo's does so
    some time later, and what is counted would hang on when.
    """

    def __init__(self, collective: Callable[..., Any]) -> None:
        self.collective = collective

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *_: Any, **options: Any
    ) -> None:
        options.pop("async_op", None)
        with _disable_current_modes():
            output = torch.empty_like(output_tensor)
            self.collective(output, input_tensor.clone(), group=group, **options)
            output_tensor.copy_(output)


def tied_model() -> nn.Sequential:
    """Nearly all bytes are those of the weight that the first and the last layer share."""
    torch.manual_seed(0)
    embedding, output = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    output.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), output)


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (EXAMPLES,)), torch.randint(WORDS, (EXAMPLES,))


def of_a_stage(case: dict[str, Any]) -> int:
    """Of a stage that both processes have."""
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
        for layer in pipeline.stages[0].layers:
            if isinstance(layer, FSDPModule):
                layer.set_custom_all_gather(Settled(dist.all_gather_into_tensor))
                layer.set_custom_reduce_scatter(Settled(dist.reduce_scatter_tensor))
        batch, target = data(case["examples"] * case["microbatches"])
        del layers
        watch.fullest(pipeline, case["optimizer"], lambda: pipeline.step(batch, target, mse_loss))
    pipeline.close()
    return watch.peak


def of_a_shared_weight(case: dict[str, Any]) -> int:
    """Of two stages, of which each process has one."""
    layers, watch, ranks = tied_model(), PresentBytes(), Ranks()
    own = ranks.own(*words())
    with watch:
        watch.watch(layers.parameters())
        pipeline = Pipeline(
            layers, num_stages=2, num_microbatches=case["microbatches"], schedule=case["schedule"],
            remat=case["remat"], cost=[1] * len(layers), group=ranks.group,
        )  # fmt: skip
        del layers
        watch.fullest(pipeline, case["optimizer"], lambda: pipeline.step(*own, nn.functional.cross_entropy))
    pipeline.close()
    return watch.peak


def count_all(cases: list[dict[str, Any]]) -> list[int]:
    return [of_a_stage(case) if "dimension" in case else of_a_shared_weight(case) for case in cases]

"""Steps on meshes that divide parameters among processes, held to those of the plain model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mesh_grids import CLOSE, Part, joint_step, own_part
from ranks import TIMEOUT_S
from tiny_models import Plain, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from gpipe_bench.models.transformer.lm import transformer_lm
from gpipe_bench.pipeline import Pipeline

UNEVEN = (7, 4)
M = 3
TRANSFORMER = {
    "num_layers": 4, "d_model": 8, "ffn_dim": 16, "num_heads": 4, "vocab_size": 11, "seq_len": 6,
}  # fmt: skip
_MESHES: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


def grid(**sizes: int) -> DeviceMesh:
    """A mesh of all ranks with these dimensions; what is left over are copies that do the same."""
    key = tuple(sizes.items())
    if key not in _MESHES:
        count = 1
        for size in sizes.values():
            count *= size
        shape = (dist.get_world_size() // count, *sizes.values())
        _MESHES[key] = init_device_mesh("cpu", shape, mesh_dim_names=("copies", *sizes))[tuple(sizes)]
    return _MESHES[key]


def on(mesh: DeviceMesh, layers: nn.Sequential, num_microbatches: int = M, **options: Any) -> Pipeline:
    options = {"cost": [1] * len(layers), "timeout_s": TIMEOUT_S, "bucket_bytes": 300, **options}
    return Pipeline(layers, mesh=mesh, num_microbatches=num_microbatches, **options)


def words(batch_size: int, seed: int = 0, tokens: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(11, (batch_size, tokens), generator=generator) for _ in range(2))  # type: ignore[return-value]


def transformer(**options: Any) -> nn.Sequential:
    """With biases and norms that are no zeros and ones, which hide what is lost."""
    model = transformer_lm(**{**TRANSFORMER, **options})
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_of(tensor: Tensor) -> Tensor:
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def assert_gradients(pipeline: Pipeline, wanted: Plain, rtol: float = 1e-13) -> None:
    """Every gradient of this rank, within `rtol` of the model's largest: some are nothing but rounding."""
    largest = max(float(g.abs().max()) for g in wanted.gradients.values() if g is not None)
    for name, parameter in pipeline.named_parameters():
        expected = wanted.gradients[name]
        if expected is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        error = float((whole(parameter.grad) - expected).abs().max())
        assert error <= rtol * largest, f"{name}: {error / largest:.3g} of the largest gradient"


def assert_steps(
    mesh: DeviceMesh,
    build: Callable[[], nn.Sequential],
    parts: Sequence[Part],
    loss_fn: Callable[..., Tensor],
    hows: Sequence[tuple[str, str, int | None]],
    *,
    prepare: Callable[[nn.Sequential], Any] = lambda model: model,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-13,
    num_microbatches: int = M,
) -> None:
    """Two steps that accumulate, with an evaluation between them, equal the plain model's."""
    plain = seeded(build, dtype)
    wanted = []
    for step in range(2):
        found = joint_step(plain, parts, loss_fn, num_microbatches, step=step)
        found.gradients = {name: None if g is None else g.clone() for name, g in found.gradients.items()}
        wanted.append(found)
    for schedule, remat, zero in hows:
        layers = seeded(build, dtype)
        prepare(layers)
        pipeline = on(mesh, layers, num_microbatches, schedule=schedule, remat=remat, zero=zero)
        for step in range(2):
            what = f"{schedule} {remat} zero={zero} step {step}"
            try:
                batch, target = own_part(pipeline, parts)
                loss = pipeline.step(batch, target, loss_fn)
                tolerance = CLOSE if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
                torch.testing.assert_close(loss.double(), wanted[step].loss, **tolerance)
                assert_gradients(pipeline, wanted[step], rtol)
                pipeline(batch)
                assert_gradients(pipeline, wanted[step], rtol)
            except Exception as error:
                raise AssertionError(what) from error
        pipeline.close()

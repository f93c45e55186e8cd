"""What the cases on grids of processes share: meshes, and steps on them that are held to the plain model's on
the joint batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ranks import TIMEOUT_S
from tiny_models import Plain, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from gpipe_bench.models.transformer.lm import transformer_lm
from gpipe_bench.pipeline import Pipeline, run_plain
from gpipe_bench.pipeline.stage.layers import Generators, stream_key
from gpipe_bench.pipeline.stage.trees import Tree, num_examples, sizes, split

PATIENCE_S = 900.0
"""A time-out that nothing here reaches, however slow the machine."""
CLOSE = {"rtol": 1e-11, "atol": 1e-14}
UNEVEN = (7, 4, 5, 6)
M = 3
TRANSFORMER = {
    "num_layers": 4, "d_model": 8, "ffn_dim": 16, "num_heads": 4, "vocab_size": 11, "seq_len": 6,
}  # fmt: skip
Part = tuple[Tree, Tensor]
_MESHES: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


def grid(**sizes: int) -> DeviceMesh:
    """A mesh of all ranks with these dimensions; what is left over are copies that do the same."""
    key = tuple(sizes.items())
    if key not in _MESHES:
        shape = (dist.get_world_size() // math.prod(sizes.values()), *sizes.values())
        _MESHES[key] = init_device_mesh("cpu", shape, mesh_dim_names=("copies", *sizes))[tuple(sizes)]
    return _MESHES[key]


def on(
    mesh: DeviceMesh, layers: nn.Sequential | Sequence[nn.Module], num_microbatches: int = M, **options: Any
) -> Pipeline:
    """A pipeline on such a mesh, with buckets so small that each stage has several."""
    options = {"cost": [1] * len(layers), "timeout_s": TIMEOUT_S, "bucket_bytes": 300, **options}
    return Pipeline(layers, mesh=mesh, num_microbatches=num_microbatches, **options)


def on_grid(
    dp: int, pp: int, layers: nn.Sequential | Sequence[nn.Module], num_microbatches: int, **options: Any
) -> Pipeline:
    return on(grid(dp=dp, pp=pp), layers, num_microbatches, **{"timeout_s": PATIENCE_S, **options})


def own_part(pipeline: Pipeline, parts: Sequence[Part]) -> tuple[Tree | None, Tensor | None]:
    """This replica's share, where it counts: the batch with the first stage, the target with the last."""
    assert pipeline.grid is not None
    batch, target = parts[pipeline.grid.replica]
    indices = {stage.index for stage in pipeline.stages}
    last = pipeline.schedule.num_stages - 1
    return batch if 0 in indices else None, target if last in indices else None


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


def joint_step(
    model: nn.Sequential,
    parts: Sequence[Part],
    loss_fn: Callable[..., Tensor],
    num_microbatches: int,
    *,
    step: int = 0,
) -> Plain:
    """The plain model on the batches of all replicas together, micro-batch by micro-batch; gradients are
    added to those that it has.
    """
    examples = sum(num_examples(batch) for batch, _ in parts)
    generators = Generators(torch.device("cpu"))
    result = Plain(torch.zeros((), dtype=torch.float64))
    for replica, (batch, target) in enumerate(parts):
        count = min(num_microbatches, num_examples(batch))
        lengths = sizes(num_examples(batch), count)
        pairs = zip(split(batch, count), split(target, count), strict=True)
        for m, (inputs, wanted) in enumerate(pairs):
            number = replica * num_microbatches + m
            output = run_plain(model, inputs, seed=0, step=step, microbatch=number)
            states = generators.save()
            generators.seed(stream_key(0, step, len(model), number))
            loss = loss_fn(output, wanted) * (lengths[m] / examples)
            generators.restore(states)
            loss.backward()
            result.loss = result.loss + loss.detach()
    result.gradients = {name: p.grad for name, p in model.named_parameters()}
    return result


def assert_gradients(pipeline: Pipeline, wanted: Plain, rtol: float = 1e-13) -> None:
    """Every gradient of this rank, within `rtol` of the model's largest: some are nothing but rounding."""
    largest = max(float(g.abs().max()) for g in wanted.gradients.values() if g is not None)
    for name, parameter in pipeline.named_parameters():
        found, expected = parameter.grad, wanted.gradients[name]
        if expected is None:
            assert found is None, name
            continue
        assert found is not None, name
        error = float((whole(found) - expected).abs().max()) if found.numel() else 0.0
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
    **options: Any,
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
        pipeline = on(mesh, layers, num_microbatches, schedule=schedule, remat=remat, zero=zero, **options)
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

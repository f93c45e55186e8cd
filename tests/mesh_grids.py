"""What the cases on grids of processes share: meshes over four ranks, the plain step on the joint batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tiny_models import Plain
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gpipe_bench.pipeline import Pipeline, run_plain
from gpipe_bench.pipeline.stage.rng import Generators, stream_key
from gpipe_bench.pipeline.stage.trees import Tree, num_examples, sizes, split

PATIENCE_S = 900.0
"""A time-out that nothing here reaches, however slow the machine."""
CLOSE = {"rtol": 1e-11, "atol": 1e-14}
Part = tuple[Tree, Tensor]
_MESHES: dict[tuple[int, int], DeviceMesh] = {}


def mesh_of(dp: int, pp: int) -> DeviceMesh:
    """A mesh with this rank; where it needs less than all ranks, each of its copies does the same."""
    if (dp, pp) not in _MESHES:
        copies = dist.get_world_size() // (dp * pp)
        whole = init_device_mesh("cpu", (copies, dp, pp), mesh_dim_names=("copies", "dp", "pp"))
        _MESHES[dp, pp] = whole["dp", "pp"]
    return _MESHES[dp, pp]


def on_grid(
    dp: int, pp: int, layers: nn.Sequential | Sequence[nn.Module], num_microbatches: int, **options: object
) -> Pipeline:
    """A pipeline on such a mesh, with buckets so small that each stage has several."""
    options = {"cost": [1] * len(layers), "timeout_s": PATIENCE_S, "bucket_bytes": 300, **options}
    return Pipeline(layers, mesh=mesh_of(dp, pp), num_microbatches=num_microbatches, **options)


def own_part(pipeline: Pipeline, parts: Sequence[Part]) -> tuple[Tree | None, Tensor | None]:
    """This replica's share, where it counts: the batch with the first stage, the target with the last."""
    assert pipeline.grid is not None
    batch, target = parts[pipeline.grid.replica]
    indices = {stage.index for stage in pipeline.stages}
    last = pipeline.schedule.num_stages - 1
    return batch if 0 in indices else None, target if last in indices else None


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


def assert_gradients(pipeline: Pipeline, wanted: Plain, *, rtol: float = 1e-13) -> None:
    """Every gradient of this rank, within `rtol` of the model's largest: some are nothing but rounding."""
    largest = max(float(g.abs().max()) for g in wanted.gradients.values() if g is not None)
    for name, parameter in pipeline.named_parameters():
        found, expected = parameter.grad, wanted.gradients[name]
        if expected is None:
            assert found is None, name
            continue
        assert found is not None, name
        error = float((found - expected).abs().max()) if found.numel() else 0.0
        assert error <= rtol * largest, f"{name}: {error / largest:.3g} of the largest gradient"

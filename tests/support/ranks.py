"""Shared by cases over several processes: a process's place in a group, grids, data, and comparisons of steps
with the plain model on the joint batch.
"""

from __future__ import annotations

import math
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import Plain
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from gpipe_bench.models.transformer.lm import transformer_lm
from gpipe_bench.pipeline import Pipeline, run_plain
from gpipe_bench.pipeline.stage.layers import Generators, stream_key
from gpipe_bench.pipeline.stage.trees import Tree, num_examples, sizes, split

TIMEOUT_S = 40.0  # for processes that share cores with other tests
PATIENCE_S = 900.0
"""A time-out that is never reached, however slow the machine."""
UNEVEN = (7, 4, 5, 6)
"""Examples of the mini-batches of four replicas."""
Part = tuple[Tree, Tensor]


class Ranks:
    """A process group that runs one pipeline, and this process's place in it."""

    def __init__(self, group: dist.ProcessGroup | None = None, **options: object) -> None:
        self.group, self.options = group or dist.group.WORLD, options
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.is_first, self.is_last = self.rank == 0, self.rank == self.size - 1

    def pipeline(
        self, layers: nn.Sequential | list[nn.Module], num_microbatches: int = 4, **options: Any
    ) -> Pipeline:
        """A pipeline with a stage for each rank, or with `num_stages`."""
        own = {"cost": [1] * len(layers), "timeout_s": TIMEOUT_S, "num_stages": self.size, **self.options}
        return Pipeline(layers, num_microbatches=num_microbatches, group=self.group, **{**own, **options})

    def own(self, batch: object, target: Tensor) -> tuple[object, Tensor]:
        """The batch on the first rank, the target on the last; elsewhere data that must not be used."""
        wrong = (torch.full((1, 1), float("nan")), torch.zeros(1))
        return batch if self.is_first else wrong, target if self.is_last else torch.full((1,), float("nan"))


def halves(**options: object) -> Ranks:
    """Two pipelines: ranks 0 and 1, ranks 2 and 3."""
    first = dist.get_rank() // 2 * 2
    return Ranks(dist.new_group([first, first + 1], use_local_synchronization=True), **options)


_MESHES: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


def grid(**sizes: int) -> DeviceMesh:
    """A mesh of all ranks with these dimensions; remaining ranks form copies of it."""
    key = tuple(sizes.items())
    if key not in _MESHES:
        shape = (dist.get_world_size() // math.prod(sizes.values()), *sizes.values())
        _MESHES[key] = init_device_mesh("cpu", shape, mesh_dim_names=("copies", *sizes))[tuple(sizes)]
    return _MESHES[key]


def on(
    mesh: DeviceMesh, layers: nn.Sequential | Sequence[nn.Module], num_microbatches: int = 3, **options: Any
) -> Pipeline:
    """A pipeline on a mesh, with buckets so small that each stage has several."""
    options = {"cost": [1] * len(layers), "timeout_s": TIMEOUT_S, "bucket_bytes": 300, **options}
    return Pipeline(layers, mesh=mesh, num_microbatches=num_microbatches, **options)


def own_part(pipeline: Pipeline, parts: Sequence[Part]) -> tuple[Tree | None, Tensor | None]:
    """This replica's batch if it has the first stage, and its target if it has the last."""
    batch, target = parts[pipeline.grid.replica if pipeline.grid is not None else 0]
    indices = {stage.index for stage in pipeline.stages}
    return batch if 0 in indices else None, target if pipeline.schedule.num_stages - 1 in indices else None


def words(batch_size: int, seed: int = 0, tokens: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(11, (batch_size, tokens), generator=generator) for _ in range(2))  # type: ignore[return-value]


def transformer(**options: Any) -> nn.Sequential:
    """A Transformer whose biases and norms are not zeros and ones, which would hide errors; two processes
    cannot divide its vocabulary evenly.
    """
    sizes = {"num_layers": 4, "d_model": 8, "ffn_dim": 16, "num_heads": 4, "vocab_size": 11, "seq_len": 6}
    model = transformer_lm(**{**sizes, **options})
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def joint_step(
    model: nn.Module, parts: Sequence[Part], loss_fn: Callable[..., Tensor], num_microbatches: int | None,
    *, step: int = 0,
) -> Plain:  # fmt: skip
    """The plain model's step on all replicas' batches, micro-batch by micro-batch; gradients are added to
    existing ones. Without micro-batches the model must draw nothing and may be no sequence.
    """
    examples = sum(num_examples(batch) for batch, _ in parts)
    generators = Generators(torch.device("cpu"))
    result = Plain(torch.zeros((), dtype=torch.float64))
    for replica, (batch, target) in enumerate(parts):
        count = min(num_microbatches or 1, num_examples(batch))
        lengths = sizes(num_examples(batch), count)
        pairs = zip(split(batch, count), split(target, count), strict=True)
        for m, (inputs, wanted) in enumerate(pairs):
            number = replica * (num_microbatches or 1) + m
            if num_microbatches:
                output = run_plain(model, inputs, seed=0, step=step, microbatch=number)
            else:
                output = model(inputs)
            states = generators.save()
            generators.seed(stream_key(0, step, len(list(model.children())), number))
            loss = loss_fn(output, wanted) * (lengths[m] / examples)
            generators.restore(states)
            loss.backward()
            result.loss = result.loss + loss.detach()
    result.gradients = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return result


def assert_loss(found: Tensor, wanted: Plain, rtol: float = 1e-11) -> None:
    torch.testing.assert_close(found.double(), wanted.loss.double(), rtol=rtol, atol=max(1e-14, rtol / 10))


def assert_gradients(pipeline: Pipeline, wanted: Plain, rtol: float = 1e-12) -> None:
    """Asserts every gradient of this rank, within `rtol` of the model's largest: some are only rounding."""
    largest = max(float(g.abs().max()) for g in wanted.gradients.values() if g is not None)
    for name, parameter in pipeline.named_parameters():
        found, expected = parameter.grad, wanted.gradients[name]
        if expected is None:
            assert found is None, name
            continue
        assert found is not None, name
        error = float((whole(found) - expected).abs().max()) if found.numel() else 0.0
        assert error <= rtol * largest, f"{name}: {error / largest:.3g} of the largest gradient"


def assert_same_weights(pipeline: nn.Module, wanted: dict[str, Tensor]) -> None:
    """Asserts this rank's weights, bit by bit."""
    for name, value in pipeline.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def shared_folder() -> Path:
    """An empty folder that all ranks know."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def on_first_rank(check: Callable[[], None]) -> None:
    """Checks on the first rank; if the check fails, it fails on every rank."""
    found: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            check()
        except Exception:
            found = [traceback.format_exc()]
    dist.broadcast_object_list(found)
    assert found[0] is None, found[0]


class raises:  # noqa: N801
    """Expects an error with a text in it, like `pytest.raises`, which a spawned process need not import."""

    def __init__(self, kind: type[Exception] | tuple[type[Exception], ...], text: str) -> None:
        self.kind, self.text = kind, text

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        assert error is not None, f"nothing was raised, not {self.kind}"
        if not isinstance(error, self.kind):
            return False
        assert self.text in str(error), f"{self.text!r} is not in {error}"
        self.found = str(error)
        return True

"""What processes do that divide parameters among them, along `fsdp` and along `tp`; `test_sharding` starts
four of them once, and eight of them for the whole grid, and reports each case as a test.
"""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mesh_grids import CLOSE, Part, joint_step, own_part
from ranks import TIMEOUT_S, raises
from tiny_models import Plain, everything, everything_batch, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_bench.models.transformer.lm import transformer_lm
from gpipe_bench.models.parallel import Gathered, tensor_parallel
from gpipe_bench.pipeline import Pipeline

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss
UNEVEN = (7, 4)
M = 3
TRANSFORMER = {
    "num_layers": 4, "d_model": 8, "ffn_dim": 16, "num_heads": 4, "vocab_size": 11, "seq_len": 6,
}  # fmt: skip
AMOEBANET = {
    "num_layers": 3, "num_filters": 8, "num_classes": 10, "image_size": 67, "aux_head": True, "dropout": 0.2,
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


def word_loss(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.transpose(1, 2), target)


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


def assert_gradients(pipeline: Pipeline, wanted: Plain, rtol: float = 1e-13) -> None:
    """Every gradient of this rank, within `rtol` of the model's largest one: some are nothing but rounding."""
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


FSDP_HOWS = (
    ("gpipe", "always", 2), ("gpipe", "never", 3), ("1f1b", "always", 3), ("1f1b", "never", 2),
    ("zb-h1", "never", 2), ("zb-h1", "always", 2), ("interleaved", "never", 2), ("zb-v", "always", 2),
    ("gpipe", "always", 3), ("interleaved", "always", 3),
)  # fmt: skip


def gradients_of_shards() -> None:
    """Everything a layer may pass, with dropout and batch normalization, over uneven replicas."""
    parts = [everything_batch(n, seed=r) for r, n in enumerate(UNEVEN)]
    assert_steps(grid(fsdp=2, pp=2), everything, parts, cross_entropy, FSDP_HOWS)


def gradients_of_shards_in_float32() -> None:
    """gloo knows no mean and no product before the sum, which float64 never asks of it."""
    parts = [words(n, seed=r) for r, n in enumerate(UNEVEN)]
    hows = (("gpipe", "always", 2), ("zb-h1", "never", 2), ("1f1b", "always", 3))
    build = lambda: transformer(dropout=0.2)  # noqa: E731
    assert_steps(grid(fsdp=2, pp=2), build, parts, word_loss, hows, dtype=torch.float32, rtol=1e-5)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        gradients_of_shards,
        gradients_of_shards_in_float32,
    )
}


def run_all(names: list[str]) -> dict[str, tuple[str | None, float]]:
    """Runs cases one after the other; gives each one's traceback, or None, and its seconds."""
    outcomes: dict[str, tuple[str | None, float]] = {}
    for name in names:
        start = time.monotonic()
        try:
            CASES[name]()
            trace = None
        except Exception:
            trace = traceback.format_exc()
        outcomes[name] = (trace, time.monotonic() - start)
        dist.barrier()
    return outcomes

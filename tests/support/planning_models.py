"""Small models with made-up costs, for tests of plans: nothing is timed."""

from __future__ import annotations

import itertools
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from gpipe_bench.planner import Costs, Model, model_of
from gpipe_bench.planner.costs import SizeCosts

WIDTH = 16


class Tied(nn.Module):
    """An output layer with the embedding's matrix."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tied(blocks: int = 6) -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    """Embedding, blocks, and an output layer with the embedding's weights."""
    embedding = nn.Embedding(40, WIDTH)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)]
    tokens = torch.empty(16, 8, dtype=torch.int64)
    return [embedding, *middle, Tied(embedding)], tokens, tokens, loss_of


def bare() -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    """Only embedding and output layer."""
    return tied(0)


def frozen() -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    """The model `tied` with frozen embedding weights."""
    layers, *rest = tied()
    next(layers[0].parameters()).requires_grad_(False)
    return layers, *rest


def plain() -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    return layers, torch.empty(16, WIDTH), torch.empty(16, WIDTH), nn.functional.mse_loss


def normed() -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    """The model `plain` with batch norm over rows, which needs two examples or more."""
    layers, *rest = plain()
    layers.insert(3, nn.BatchNorm1d(WIDTH))
    return layers, *rest


class Asking(nn.Linear):
    """A layer that reads its input's device."""

    def forward(self, x: Tensor) -> Tensor:
        assert all(x.device == self.weight.device for _ in range(9))
        return super().forward(x)


def square(rows: int = 4096) -> tuple[list[nn.Module], Tensor, Tensor, Any]:
    """A model whose weights have the shape of its inputs."""
    first, second, last = (kind(rows, rows, bias=False) for kind in (nn.Linear, Asking, nn.Linear))
    layers: list[nn.Module] = [first, second, nn.Tanh(), last]
    return layers, torch.empty(rows, rows), torch.empty(rows, rows), nn.functional.mse_loss


def divided() -> tuple[Any, ...]:
    """The model `plain` with its own tensor-parallel plan."""
    return *plain(), divide


def divide(layers: nn.Sequential, mesh: DeviceMesh) -> None:
    """Divides each layer by columns of its weight and gathers its output."""
    for layer in layers:
        parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))


def indivisible() -> tuple[Any, ...]:
    return *plain(), 2


# No models: for error messages.


def none() -> int:
    return 5


def apart() -> tuple[Any, ...]:
    return [nn.Linear(2, 2)], (torch.empty(2, 2), torch.empty(3, 2))


def broken() -> None:
    raise RuntimeError("no such thing")


def no_layers() -> tuple[Any, ...]:
    return [1], torch.empty(2, 2)


def costs_of(model: Model, sizes: tuple[int, ...] = (1, 2, 4, 8, 16)) -> Costs:
    """Costs whose seconds grow with the micro-batch and differ between layers; profiles are real."""
    number = len(model.layers)
    base = [0.01 * (1 + layer % 3) for layer in range(number)]

    def at(size: int) -> SizeCosts:
        forward = [each * (size + 0.5) for each in base]
        kinds = {
            "F": forward, "G": forward, "R": forward, "B": [2 * each for each in forward],
            "I": [1.25 * each for each in forward], "W": list(forward),
        }  # fmt: skip
        sent = [64.0 * size] * (number - 1)
        costs = SizeCosts(layers_s=kinds, action_s={"F": 0.001}, activation_bytes=sent, gradient_bytes=sent)
        return costs.with_blocks(model.blocks)

    return Costs(
        sizes={size: at(size) for size in sizes},
        update_s=[0.001] * number,
        parameter_bytes=[[p.numel() * p.itemsize for p in layer.parameters()] for layer in model.layers],
        low=0.9,
        high=1.2,
        provenance={"layers": "made up"},
        profiles=partial(model.profile_of, precision="float32"),
    )


def planned(name: str, batch_size: int = 16) -> Model:
    return model_of(f"planning_models:{name}", batch_size)


def weights_after(scripts: list[tuple[str, str]]) -> list[dict[str, Tensor]]:
    """Runs on each rank that `launch` started: this rank's weights, by layer and name, after each of these
    scripts, given with the file beside it; in float64, on batches that are not zeros.
    """
    found = []
    torch.set_default_dtype(torch.float64)
    group = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    for text, rows in scripts:
        with tempfile.TemporaryDirectory() as folder, group:  # the ranks have a group already
            path = Path(folder) / "train.py"
            path.with_suffix(".csv").write_text(rows)
            made: dict[str, Any] = {"__file__": str(path)}
            exec(compile(re.sub(r"torch\.zeros\((SHARE.*), dtype.*\)", RANDOM, text), path, "exec"), made)
        if "pipeline" in made:
            own = dict(made["pipeline"].named_parameters())
        else:  # a weight that two stages share counts once
            begins = list(itertools.accumulate(made["CUT"], initial=0))
            own = {
                f"{begins[stage.stage_index] + int(name.split('.')[1])}.{name.split('.', 2)[2]}": parameter
                for stage in made["stages"]
                for name, parameter in stage.submod.named_parameters()
            }
        own = {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in own.items()}
        own = {name: own[name] for name in {id(p): name for name, p in reversed(own.items())}.values()}
        found.append({name: _whole(parameter) for name, parameter in own.items()})
    return found


RANDOM = r"torch.rand(\1).mul(9).to(tensor.dtype)"
"""Replaces zeros by numbers or tokens."""


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()

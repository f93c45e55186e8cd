"""What a step holds at its fullest, of models whose layers copy, share weights, pass pytrees or have portals:
the memory model beside real steps, counted storage by storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from real_steps import Loss, Step, compare, count, profiles
from torch import Tensor, nn
from tree_models import tree_batch, tree_loss, tree_model

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import (
    Action,
    Boundary,
    Pop,
    PortalSequential,
    Profiler,
    Schedule,
    Stash,
    bytes_of_stages,
)
from gpipe_bench.pipeline.memory.trace import BufferRole
from gpipe_bench.pipeline.memory.workers import action_bytes, shared_weights
from gpipe_bench.pipeline.stage.trees import Tree

mse_loss = nn.functional.mse_loss
WIDTH, ROWS = 64, 128  # a boundary is 32 KiB
GPT2 = {"num_layers": 2, "d_model": 16, "num_heads": 2, "vocab_size": 97, "seq_len": 12, "dropout": 0.0}


# Layers that copy what re-materialization needs again: overwritten inputs, changing buffers


def in_place() -> nn.Sequential:
    """Each stage of two layers begins with one that overwrites its input, the second behind a view."""
    return nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH),
        nn.Flatten(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
        nn.ReLU(inplace=True), nn.Linear(WIDTH, 4),
    )  # fmt: skip


class Follow(nn.Module):
    """Follows its input in a buffer, in place or by another tensor, beside two that stay as they are."""

    def __init__(self, rows: int, *, replaced: bool) -> None:
        super().__init__()
        self.replaced = replaced
        self.register_buffer("average", torch.zeros(rows, WIDTH))
        self.register_buffer("scale", torch.ones(1000))
        self.register_buffer("table", torch.zeros(400, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.replaced:
                self.average = self.average * 0.9
            else:
                self.average.mul_(0.9)
            self.average[0] += x.mean(dim=0)
        return x + self.average[0].detach().clone()


class Still(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros(250, WIDTH))
        self.register_buffer("large", torch.zeros(400, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def follows(rows: int, *, replaced: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Follow(rows, replaced=replaced),
        Still(), nn.Linear(WIDTH, WIDTH), Follow(rows, replaced=replaced), nn.Linear(WIDTH, 4),
    )  # fmt: skip


def rows_of_numbers() -> tuple[Tensor, Tensor]:
    return torch.randn(4 * ROWS, WIDTH), torch.randn(4 * ROWS, 4)


# Layers that pass a dataclass


@dataclass
class Hidden:
    value: Tensor
    mask: Tensor
    scale: float = 0.5
    name: str | None = None


torch.export.register_dataclass(Hidden)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)

    def forward(self, batch: dict[str, Any]) -> Hidden:
        assert list(batch) == ["ids", "mask", "scale"]
        return Hidden(self.embedding(batch["ids"]), batch["mask"], batch["scale"], name="hidden")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Hidden) -> Hidden:
        assert (type(hidden), hidden.scale, hidden.name) == (Hidden, 0.25, "hidden")
        value = hidden.value + hidden.scale * self.linear(hidden.value).relu() * hidden.mask[:, None]
        return Hidden(value, hidden.mask, hidden.scale, hidden.name)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 10)

    def forward(self, hidden: Hidden) -> dict[str, Any]:
        return {"logits": self.linear(hidden.value), "list": [hidden.mask, None], "temperature": 0.5}


def weighted(output: dict[str, Any], target: dict[str, Any]) -> Tensor:
    logits = output["logits"] / output["temperature"] * output["list"][0][:, None]
    each = nn.functional.cross_entropy(logits, target["y"], reduction="none")
    return (each * target["weight"]).mean()


def with_weights() -> tuple[Tree, Tree]:
    batch = {"ids": torch.randint(100, (512,)), "mask": torch.rand(512), "scale": 0.25}
    return batch, {"y": torch.randint(10, (512,)), "weight": torch.rand(512)}


def of_one_worker() -> Schedule:
    """Both stages, which share a weight, on one worker."""
    row = [f"{stage}F{m}" for m in range(2) for stage in range(2)]
    row += [f"{stage}B{m}" for m in range(2) for stage in (1, 0)]
    return Schedule("own", 2, 2, "never", (tuple(map(Action.parse, row)),), (0, 0))


# Model, what it is given, its loss.
MODELLED: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], tuple[Tree, Tree]], Loss]] = {
    "overwriting": (in_place, rows_of_numbers, mse_loss),
    "buffers": (lambda: follows(500, replaced=False), rows_of_numbers, mse_loss),
    "buffers replaced": (lambda: follows(500, replaced=True), rows_of_numbers, mse_loss),
    "tied": (
        lambda: MODELS["gpt2"](**GPT2), lambda: example_batch("gpt2", 8, **GPT2), loss_fn("gpt2", **GPT2),
    ),
    "trees": (lambda: nn.Sequential(Embed(), *(Block() for _ in range(4)), Head()), with_weights, weighted),
}  # fmt: skip
WAYS = (("gpipe", "always"), ("1f1b", "always"), ("1f1b", "never"), ("gpipe", "never"))
CASES = [
    *(("overwriting", Step(k, 4, remat, name, "sgd")) for k in (1, 3) for name in ("gpipe", "1f1b")
      for remat in ("always", "except_last", "never")),
    *((f"buffers{how}", Step(3, 4, remat, "1f1b", "sgd"))
      for remat, how in (("always", ""), ("always", " replaced"), ("never", ""))),
    *(("tied", Step(1, 4, remat, name, optimizer)) for name, remat in (WAYS[0], WAYS[2])
      for optimizer in ("sgd", "adam")),
    *(("tied", Step(2, 2, "never", of_one_worker(), optimizer)) for optimizer in ("sgd", "adam")),
    *(("trees", Step(k, 4, remat, name, "sgd")) for k in (1, 3) for name, remat in WAYS),
]  # fmt: skip


def label(value: object) -> str:
    if not isinstance(value, Step):
        return str(value)
    name = value.schedule if isinstance(value.schedule, str) else value.schedule.name
    return f"{value.num_stages}-{name}-{value.remat}-{value.optimizer}"


@pytest.mark.parametrize(("name", "step"), CASES, ids=label)
def test_modelled_peaks_are_those_of_real_steps(name: str, step: Step) -> None:
    build, data, loss = MODELLED[name]
    torch.manual_seed(0)
    model, (batch, target) = build(), data()
    counted, modelled = compare(model, batch, target, loss, step)
    # Of a tied weight there is one gradient, and the model counts one for each use.
    more = sum((len(tie.layers) - 1) * tie.num_bytes for tie in shared_weights(list(model)))
    for peak, found in zip(counted.peaks, modelled, strict=True):
        assert 0.99 * peak <= found.peak <= 1.01 * peak + more


def test_a_copy_is_held_while_a_forward_runs() -> None:
    """A stage whose F is its fullest moment: it has no parameters, so that little is left for R and B."""
    wide = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten())
    batch, target = torch.randn(2 * ROWS, WIDTH), torch.randn(2 * ROWS, 4)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), wide, nn.Linear(WIDTH, 4))
    step = Step(3, 2, "always", "gpipe", "sgd")
    counted, pipeline = count(model, batch, target, mse_loss, step)
    layers, loss = profiles(model, batch, target, mse_loss, step)
    held = action_bytes(bytes_of_stages(layers, loss, pipeline.partition), pipeline.schedule, "sgd")
    for action in (Action.parse("1F0"), Action.parse("1F1")):
        assert held[action] == pytest.approx(counted.actions[action], rel=0.01)


def test_what_is_found_of_a_layer() -> None:
    batch, target = torch.randn(8, WIDTH), torch.randn(8, 4)
    model = nn.Sequential(*in_place(), Follow(4, replaced=True), nn.BatchNorm1d(4), Still())
    model[6].average = torch.zeros(1, 4)
    layers, _ = profiles(model, batch, target, mse_loss, Step())
    assert [layer.overwritten for layer in layers] == [
        {0}, set(), set(), {0}, {0}, set(), set(), set(), set()
    ]  # fmt: skip
    assert layers[6].buffer_roles == (BufferRole.REPLACED, BufferRole.STILL, BufferRole.STILL)
    assert set(layers[7].buffer_roles) == {BufferRole.STATISTICS}
    assert layers[8].buffer_roles == (BufferRole.STILL, BufferRole.STILL)


def test_which_weights_are_shared() -> None:
    (weight,) = shared_weights(list(MODELS["gpt2"](**GPT2)))
    assert (weight.num_bytes, weight.trained, weight.layers) == (97 * 16 * 4, True, (0, 3))
    assert shared_weights([nn.Linear(2, 2), nn.Linear(2, 2)]) == ()


def test_every_kind_of_tree_reaches_the_layers_as_it_was() -> None:
    """The layers look at what they get; a tensor that stands twice is one, and constants are part of it."""
    batch, target = tree_batch(8)
    profiler = Profiler()
    layers, found = profiler.model(tree_model().double(), tree_loss, Boundary.of(batch), Boundary.of(target))
    assert [len(layer.inputs.tensors) for layer in layers] == [3, 5, 4, 3]
    assert found.inputs.num_bytes == sum(
        spec.num_bytes for spec in (*layers[-1].outputs.tensors, *Boundary.of(target).tensors)
    )
    other, _ = tree_batch(8, scale=0.25)
    assert Boundary.of(batch) != Boundary.of(other)
    assert Boundary.of(batch) == Boundary.of(tree_batch(8, seed=1)[0])


def test_portals_beside_a_dict_are_refused() -> None:
    class Dict(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    class Undo(nn.Module):
        def forward(self, given: dict[str, Tensor]) -> Tensor:
            return given["x"]

    class Sum(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + pair[1]

    model = PortalSequential(Stash("a"), nn.Linear(4, 4), Dict(), Undo(), Pop("a", Sum()))
    batch = Boundary.of(torch.randn(2, 4))
    with pytest.raises(ValueError, match="modelled between layers that pass tensors"):
        Profiler().model(list(model), mse_loss, batch, batch)

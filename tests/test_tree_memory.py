"""The memory model of layers that pass dicts and dataclasses, beside real steps, counted byte by byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from real_steps import Step, compare
from torch import Tensor, nn
from tree_models import tree_batch, tree_loss, tree_model

from gpipe_bench.pipeline import Boundary, Pop, PortalSequential, Profiler, Stash, gpipe, portal_memory

WIDTH = 64


@dataclass
class Hidden:
    value: Tensor
    mask: Tensor
    scale: float = 0.5
    name: str | None = None


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


def loss(output: dict[str, Any], target: dict[str, Any]) -> Tensor:
    logits = output["logits"] / output["temperature"] * output["list"][0][:, None]
    each = nn.functional.cross_entropy(logits, target["y"], reduction="none")
    return (each * target["weight"]).mean()


@pytest.mark.parametrize(
    ("schedule", "remat"), [("gpipe", "always"), ("1f1b", "always"), ("1f1b", "never"), ("gpipe", "never")]
)
@pytest.mark.parametrize("num_stages", [1, 3])
def test_modelled_peaks_of_dicts_and_dataclasses_are_those_of_real_steps(
    num_stages: int, schedule: str, remat: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Embed(), *(Block() for _ in range(4)), Head())
    batch = {"ids": torch.randint(100, (512,)), "mask": torch.rand(512), "scale": 0.25}
    target = {"y": torch.randint(10, (512,)), "weight": torch.rand(512)}
    counted, modelled = compare(model, batch, target, loss, Step(num_stages, 4, remat, schedule, "sgd"))
    for peak, found in zip(counted.peaks, modelled, strict=True):
        assert found.peak == pytest.approx(peak, rel=0.01)


def test_every_kind_of_tree_reaches_the_layers_as_it_was() -> None:
    """The layers look at what they get; a tensor that stands twice is one, and constants are part of it."""
    batch, target = tree_batch(8)
    profiler = Profiler()
    layers, found = profiler.model(tree_model().double(), tree_loss, Boundary.of(batch), Boundary.of(target))
    assert [len(layer.inputs.tensors) for layer in layers] == [3, 5, 5, 3]
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
    with pytest.raises(ValueError, match="passes a dict and portals are carried past it"):
        Profiler().model(list(model), nn.functional.mse_loss, batch, batch)
    schedule, spans = gpipe(2, 2), [range(4), range(4, 5)]
    with pytest.raises(ValueError, match="passes a dict and portals are carried past it"):
        portal_memory(list(model), nn.functional.mse_loss, batch, batch, spans, schedule)
    apart = PortalSequential(nn.Linear(4, 4), Dict(), Undo(), Stash("a"), nn.Linear(4, 4), Pop("a", Sum()))
    spans = [range(2), range(2, 5), range(5, 6)]
    found = portal_memory(list(apart), nn.functional.mse_loss, batch, batch, spans, gpipe(3, 2))
    assert found[1].boundary == 2 * 4 * 4
    with pytest.raises(ValueError, match="portals is modelled in one process alone"):
        portal_memory(list(apart), nn.functional.mse_loss, batch, batch, spans, gpipe(3, 2), receive_ahead=1)

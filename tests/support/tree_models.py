"""Layers that pass every kind of pytree, and check that they get what was passed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

WIDTH = 6


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class State:
    hidden: Tensor
    ids: Tensor
    extra: list[Any]
    name: str = "state"


torch.export.register_dataclass(State)


class Output(OrderedDict):  # type: ignore[type-arg]
    """Like the outputs of `transformers`: an ordered dict with attributes, registered with torch."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


_pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: Output(zip(keys, values, strict=True)),
    serialized_type_name="tree_models.Output",
)


class ToDict(nn.Module):
    """A dict of the mini-batch -> a dict with a repeated tensor, a view, None and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        assert list(batch) == ["x", "more", "scale", "name", "nothing"]
        ids, mask = batch["more"]
        assert type(batch["more"]) is list
        assert (batch["name"], batch["nothing"]) == ("batch", None)
        assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)
        hidden = self.linear(batch["x"]).tanh()
        return {
            "hidden": hidden, "again": hidden, "view": hidden[:, :2], "ids": ids, "mask": mask,
            "weight": mask.to(hidden.dtype), "nothing": None, "scale": batch["scale"], "one": 1, "true": True,
            "mode": Mode.SLOW, "dtype": torch.float64, "size": torch.Size([2]), "nan": float("nan"),
        }  # fmt: skip


class ToState(nn.Module):
    """The dict of `ToDict` -> a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, tree: dict[str, Any]) -> State:
        assert tree["hidden"] is tree["again"]
        assert tree["nothing"] is None
        constants = tuple(tree[name] for name in ("one", "true", "mode", "dtype"))
        assert constants == (1, True, Mode.SLOW, torch.float64)
        assert tuple(map(type, constants)) == (int, bool, Mode, torch.dtype)
        assert type(tree["size"]) is torch.Size
        assert tree["nan"] != tree["nan"]
        assert not tree["weight"].requires_grad
        hidden = self.drop(self.linear(tree["hidden"])) * tree["scale"] + tree["again"]
        hidden = hidden * tree["weight"][:, None]
        return State(hidden, tree["ids"], [tree["view"], None, Pair(tree["mask"], "two")])


class ToOutput(nn.Module):
    """The dataclass of `ToState` -> an `Output`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)

    def forward(self, state: State) -> Output:
        assert (type(state), state.name) == (State, "state")
        view, nothing, pair = state.extra
        assert nothing is None
        assert (type(pair), pair.second, pair.first.dtype) == (Pair, "two", torch.bool)
        hidden = 2 * state.hidden + self.embed(state.ids)
        return Output(hidden=hidden + view.sum(1, keepdim=True), mask=pair.first, head=Output(cache=view))


class ToLogits(nn.Module):
    """The `Output` -> a dict of tensors and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, output: Output) -> dict[str, Any]:
        assert type(output) is Output
        assert (type(output.head), list(output.head)) == (Output, ["cache"])
        logits = self.linear(output.hidden) + output.head.cache.mean(1, keepdim=True)
        return {"logits": logits, "both": (logits, output.mask), "temperature": 0.5, "nothing": None}


def tree_model() -> nn.Sequential:
    return nn.Sequential(ToDict(), ToState(), ToOutput(), ToLogits())


def tree_batch(batch_size: int, seed: int = 0, scale: float = 0.5) -> tuple[dict[str, Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.randint(7, (batch_size,), generator=generator)
    mask = torch.rand(batch_size, generator=generator) > 0.2
    batch = {"x": x, "more": [ids, mask], "scale": scale, "name": "batch", "nothing": None}
    return batch, {"y": torch.randint(3, (batch_size,), generator=generator), "smoothing": 0.1}


def tree_loss(output: dict[str, Any], target: dict[str, Any]) -> Tensor:
    assert list(output) == ["logits", "both", "temperature", "nothing"]
    return nn.functional.cross_entropy(
        output["logits"] / output["temperature"], target["y"], label_smoothing=target["smoothing"]
    )


class Keyed(nn.Module):
    """A dict whose keys, and a number in it, depend on how often the layer was called in training.

    `changes` gives what is added to the dict in the n-th call.
    """

    def __init__(self, changes: Callable[[int], dict[str, Any]]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.changes = changes
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> dict[str, Any]:
        number = int(self.calls)
        self.calls += 1
        hidden = self.linear(x)
        changes = {
            name: hidden * 1.0 if value is Tensor else value for name, value in self.changes(number).items()
        }
        return {"hidden": hidden, **changes}


class ByKey(nn.Module):
    """Uses the values of `Keyed` by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tree: dict[str, Any]) -> Tensor:
        hidden = self.linear(tree["hidden"]) * tree.get("factor", 1)
        for power, name in enumerate(("left", "right")):
            if name in tree:
                hidden = hidden + (power + 1) * tree[name]
        return hidden

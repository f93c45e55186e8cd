"""Tests how micro-batches, which may be any pytree, are split, sent and refused. `test_transparency` trains
models with them.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import assert_trains_as_plain, mlp_batch
from torch import Tensor, nn
from torch.utils import _pytree
from tree_models import Mode, Output, Pair, State

from gpipe_bench.pipeline.stage.trees import Constant, change, flatten, merge, sizes, split, unflatten

mse_loss = nn.functional.mse_loss

TREES: dict[str, Any] = {
    "dict": {"b": Tensor, "a": None, 3: 1.5},
    "nested": {"a": [Tensor, (Tensor, {"b": True})], "c": ()},
    "ordered": OrderedDict(b=Tensor, a="text"),
    "default": defaultdict(list, {"a": Tensor}),
    "deque": deque([Tensor, 1], maxlen=3),
    "namedtuple": Pair(Tensor, Mode.FAST),
    "dataclass": State(Tensor, Tensor, [None]),  # type: ignore[arg-type]
    "output": Output(first=Tensor, second=[Tensor, b"bytes"]),
    "constants": [
        Tensor, 1, 1.0, True, 1j, torch.int8, torch.Size([2, 3]), slice(1, None), ..., float("inf"),
    ],
}  # fmt: skip


def with_tensors(tree: Any) -> Any:
    """The tree, each `Tensor` class replaced by a new tensor."""
    leaves, spec = _pytree.tree_flatten(tree, lambda node: isinstance(node, torch.Size))
    found = [torch.randn(4, 2) if leaf is Tensor else leaf for leaf in leaves]
    return _pytree.tree_unflatten(found, spec)


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_put_together_as_it_was(name: str) -> None:
    tree = with_tensors(TREES[name])
    tensors, structure = flatten(tree)
    back = unflatten(tensors, structure)
    assert type(back) is type(tree)
    assert str(back) == str(tree)
    sent = pickle.loads(pickle.dumps(structure))
    assert sent == structure
    assert hash(sent) == hash(structure)
    assert str(unflatten(tensors, sent)) == str(tree)
    parts = split(tree, 3)
    assert len(parts) == 3
    assert all(flatten(part)[1] == structure for part in parts)
    assert str(merge(parts)) == str(tree)
    doubled = flatten(change(tree, lambda tensor: tensor * 2, "the tree"))
    assert doubled[1] == structure
    assert torch.equal(doubled[0][0], tensors[0] * 2)


def test_structures_are_equal_only_if_everything_is() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    trees = [
        x, (x,), (x, x), (x, y), [x], [x, x], {"a": x}, {"b": x}, {"a": x, "b": y}, {"b": y, "a": x},
        {"a": x, "b": x}, {"a": x, "n": None}, {"a": x, "n": 1}, {"a": x, "n": 1.0}, {"a": x, "n": True},
        {"a": x, "n": 0.0}, {"a": x, "n": -0.0}, {"a": x, "n": float("nan")}, {"a": x, "n": "1"},
        Pair(x, 1), Pair(x, 2), State(x, y, []), State(x, y, [], "other"), Output(a=x), OrderedDict(a=x),
        (x, None),
    ]  # fmt: skip
    for i, one in enumerate(trees):
        for j, other in enumerate(trees):
            assert (flatten(one)[1] == flatten(other)[1]) == (i == j), (one, other)
    assert Constant(1) not in (Constant(True), Constant(1.0))  # even where the hashes are equal


def test_a_repeated_tensor_travels_once() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    tensors, structure = flatten((a, b, a))
    assert [t is wanted for t, wanted in zip(tensors, (a, b), strict=True)] == [True, True]
    back = unflatten(tensors, structure)
    assert back[0] is back[2] is a
    assert back[1] is b
    assert flatten(a) == ((a,), None)
    assert unflatten((a,), None) is a
    assert isinstance(unflatten(*flatten((a,))), tuple)


@dataclass
class Unknown:
    tensor: Tensor


def test_what_cannot_travel_or_be_joined_again_is_named() -> None:
    x = torch.zeros(2, 2)
    for tree, words in (
        ([x, {1, 2}], "list and holds a set"), (Unknown(x), r"Unknown.*register_dataclass\(Unknown\)"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"the output is of type {words}"):
            flatten(tree)
    for one, other in (({"a": x, "n": 1}, {"a": x, "n": 2}), ({"a": x}, {"b": x}), ((x, x), (x, x + 1))):
        with pytest.raises(ValueError, match="the outputs of two micro-batches,"):
            merge([one, other])
    with pytest.raises(ValueError, match="output holds a tensor without dimensions;"):
        merge([torch.tensor(1.0), torch.tensor(2.0)])


def test_a_batch_is_split_into_views_along_the_first_dimension() -> None:
    x, ids = torch.arange(14).view(7, 2), torch.arange(7)
    parts = split({"x": x, "same": x, "ids": [ids, "text"], "n": 3}, 3)
    assert [len(part["x"]) for part in parts] == [3, 2, 2]
    assert all(part["same"] is part["x"] and part["ids"][1:] == ["text"] and part["n"] == 3 for part in parts)
    assert parts[1]["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(merge(parts)["x"], x)
    with pytest.raises(ValueError, match="the tensors of the mini-batch have"):
        split({"x": x, "y": ids[1:]}, 2)


@given(batch_size=st.integers(1, 60), data=st.data())
def test_sizes_are_even_and_complete(batch_size: int, data: st.DataObject) -> None:
    num_microbatches = data.draw(st.integers(1, batch_size))
    found = sizes(batch_size, num_microbatches)
    assert (len(found), sum(found)) == (num_microbatches, batch_size)
    assert max(found) - min(found) <= 1
    assert list(found) == [len(part) for part in torch.zeros(batch_size).tensor_split(num_microbatches)]


class Maybe(nn.Linear):
    """The input `detach` decides whether the output `y` needs a gradient."""

    def forward(self, tree: dict[str, Any]) -> dict[str, Any]:
        hidden = super().forward(tree["x"])
        return {"x": hidden, "y": hidden.detach() if tree["detach"] else hidden * 2}


class Sum(nn.Linear):
    def forward(self, tree: dict[str, Any]) -> Tensor:
        return super().forward(tree["x"] + tree["y"].square())


def test_a_flag_may_decide_what_needs_a_gradient() -> None:
    def data(step: int) -> tuple[Any, Tensor]:
        x, target = mlp_batch(4, seed=step)
        return {"x": x, "detach": step == 1}, target

    build = lambda: nn.Sequential(Maybe(6, 6), Sum(6, 6))  # noqa: E731
    pipeline, _ = assert_trains_as_plain(build, data, mse_loss, 2, num_steps=3, num_stages=2)
    assert pipeline.num_steps == 3

"""Splitting a mini-batch into micro-batches, and trees of tensors into what crosses a stage boundary.

`torch.chunk` gives fewer micro-batches than asked for when the batch does not divide (6 examples in 4 chunks
make 3), which silently changes the schedule; here the number asked for is the number delivered and sizes
differ by at most one. What holds the same tensor twice is flattened to one tensor and a structure, so that
the tensor travels once and is one leaf of the receiver's graph: gradients that meet there are then summed as
the uncut model sums them.

A bare tensor and a tuple of tensors, which most layers pass, have the shortest way; any other pytree is taken
apart in `trees`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe_bench.pipeline.stage.trees import Nested, take_apart

# What a layer takes and gives: a tensor or a pytree of tensors and constants (`trees`).
Tree = Any

# Which of the flattened tensors stands at each place of a tuple; None for a bare tensor; else `Nested`.
Structure = tuple[int, ...] | Nested | None


class Message(NamedTuple):
    """What crosses a stage boundary forward: distinct tensors, how they make up the tree, which need a
    gradient, and the positions of those that share memory with another one.
    """

    tensors: tuple[Tensor, ...]
    structure: Structure
    needs_grad: tuple[bool, ...]
    aliases: tuple[int, ...] = ()


def sizes(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    """Examples in each micro-batch: as even as possible, the larger ones first."""
    if batch_size < 1:
        raise ValueError("the mini-batch is empty (batch_size is 0); a step needs at least one example")
    if num_microbatches > batch_size:
        raise ValueError(
            f"num_microbatches is {num_microbatches} but the mini-batch has only {batch_size} examples; "
            f"choose at most {batch_size} micro-batches"
        )
    size, larger = divmod(batch_size, num_microbatches)
    return (size + 1,) * larger + (size,) * (num_microbatches - larger)


def tensors_of(tree: Tree, what: str = "the mini-batch") -> tuple[Tensor, ...]:
    """The tensors of a tree, of a tuple of tensors repeated ones too. `TypeError` for what is no tree."""
    if isinstance(tree, Tensor):
        return (tree,)
    if _is_plain(tree):
        return tree  # type: ignore[no-any-return]
    return take_apart(tree, what)[0]


def num_examples(tree: Tree, what: str = "the mini-batch") -> int:
    """Examples in a mini-batch: the length of dimension 0, which every tensor of the tree must share."""
    lengths = []
    for tensor in tensors_of(tree, what):
        if tensor.ndim == 0:
            raise ValueError(f"{what} holds a tensor without dimensions; dimension 0 must count the examples")
        lengths.append(tensor.shape[0])
    if len(set(lengths)) > 1:
        raise ValueError(f"the tensors of {what} have {lengths} examples in dimension 0; they must agree")
    return lengths[0]


def split(tree: Tree, num_microbatches: int, what: str = "the mini-batch") -> tuple[Tree, ...]:
    """`num_microbatches` trees of views along dimension 0, of sizes that differ by at most one.

    Nothing is copied; what is no tensor stands in every one of them as it is.
    """
    lengths = list(sizes(num_examples(tree, what), num_microbatches))
    if isinstance(tree, Tensor):
        return tuple(torch.split(tree, lengths))
    tensors, structure = flatten(tree, what)
    parts = zip(*(torch.split(tensor, lengths) for tensor in tensors), strict=True)
    return tuple([unflatten(part, structure) for part in parts])


def merge(trees: Sequence[Tree]) -> Tree:
    """The inverse of `split`: concatenates micro-batches along dimension 0.

    `ValueError` where they are not of one structure, with equal constants.
    """
    flat = [flatten(tree) for tree in trees]
    if any(tensor.ndim == 0 for tensors, _ in flat for tensor in tensors):
        raise ValueError("the output holds a tensor without dimensions; dimension 0 must count the examples")
    if len(trees) == 1:
        return trees[0]
    _, structure = flat[0]
    for tensors, other in flat:
        if other != structure or len(tensors) != len(flat[0][0]):
            raise ValueError(
                f"the outputs of two micro-batches, {_named(structure)} and {_named(other)}, are not built "
                "alike or have other constants, so they can't be merged; let the last layer give the same "
                "for every micro-batch"
            )
    return unflatten(
        [torch.cat(parts) for parts in zip(*(tensors for tensors, _ in flat), strict=True)], structure
    )


def flatten(tree: Tree, what: str = "the output") -> tuple[tuple[Tensor, ...], Structure]:
    """The distinct tensors of a tree in order of appearance, and the structure that puts them back."""
    if isinstance(tree, Tensor):
        return (tree,), None
    if not _is_plain(tree):
        return take_apart(tree, what)
    positions: dict[int, int] = {}
    distinct: list[Tensor] = []
    structure: list[int] = []
    for tensor in tree:
        position = positions.setdefault(id(tensor), len(distinct))
        if position == len(distinct):
            distinct.append(tensor)
        structure.append(position)
    return tuple(distinct), tuple(structure)


def unflatten(tensors: Sequence[Tensor], structure: Structure) -> Tree:
    """The tree that `flatten` took apart."""
    if structure is None:
        return tensors[0]
    if type(structure) is Nested:
        return structure.build(tensors)
    return tuple([tensors[position] for position in structure])  # type: ignore[union-attr]


def change(tree: Tree, function: Callable[[Tensor], Tensor], what: str) -> Tree:
    """The tree with what `function` makes of each distinct tensor."""
    tensors, structure = flatten(tree, what)
    return unflatten([function(tensor) for tensor in tensors], structure)


def _is_plain(tree: Tree) -> bool:
    """Whether it is a tuple of tensors, with nothing else in it."""
    return type(tree) is tuple and bool(tree) and all(isinstance(part, Tensor) for part in tree)


def _named(structure: Structure) -> str:
    return "a tensor" if structure is None else repr(structure)

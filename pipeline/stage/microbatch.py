"""Splitting a mini-batch into micro-batches, and tensors into what crosses a stage boundary.

`torch.chunk` gives fewer micro-batches than asked for when the batch does not divide (6 examples in 4 chunks
make 3), which silently changes the schedule; here the number asked for is the number delivered and sizes
differ by at most one. A tuple that holds the same tensor twice is flattened to one tensor and a structure, so
that the tensor travels once and is one leaf of the receiver's graph: gradients that meet there are then
summed as the uncut model sums them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Tree = Tensor | tuple[Tensor, ...]  # what a layer takes and gives

# Which of the flattened tensors stands at each place of the tuple; None for a bare tensor.
Structure = tuple[int, ...] | None


class Message(NamedTuple):
    """What crosses a stage boundary forward: distinct tensors, how they make up the tree, and which need a
    gradient.
    """

    tensors: tuple[Tensor, ...]
    structure: Structure
    needs_grad: tuple[bool, ...]


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
    """The tensors of a tree, repeated ones too. `TypeError` for any other type."""
    if isinstance(tree, Tensor):
        return (tree,)
    if isinstance(tree, tuple) and tree and all(isinstance(part, Tensor) for part in tree):
        return tree
    found = type(tree).__name__
    if isinstance(tree, tuple):
        found = f"tuple of {', '.join(type(part).__name__ for part in tree)}" if tree else "empty tuple"
    raise TypeError(f"{what} is of type {found}; it must be a tensor or a non-empty tuple of tensors")


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
    """`num_microbatches` views along dimension 0, of sizes that differ by at most one. Nothing is copied."""
    lengths = list(sizes(num_examples(tree, what), num_microbatches))
    if isinstance(tree, Tensor):
        return tuple(torch.split(tree, lengths))
    return tuple(zip(*(torch.split(tensor, lengths) for tensor in tree), strict=True))


def merge(trees: Sequence[Tree]) -> Tree:
    """The inverse of `split`: concatenates micro-batches along dimension 0."""
    if any(tensor.ndim == 0 for tree in trees for tensor in tensors_of(tree, "the output")):
        raise ValueError("the output holds a tensor without dimensions; dimension 0 must count the examples")
    if len(trees) == 1:
        return trees[0]
    merged = tuple(torch.cat(parts) for parts in zip(*(tensors_of(tree) for tree in trees), strict=True))
    return merged[0] if isinstance(trees[0], Tensor) else merged


def flatten(tree: Tree, what: str = "the output") -> tuple[tuple[Tensor, ...], Structure]:
    """The distinct tensors of a tree in order of appearance, and the structure that puts them back."""
    if isinstance(tree, Tensor):
        return (tree,), None
    positions: dict[int, int] = {}
    distinct: list[Tensor] = []
    structure: list[int] = []
    for tensor in tensors_of(tree, what):
        position = positions.setdefault(id(tensor), len(distinct))
        if position == len(distinct):
            distinct.append(tensor)
        structure.append(position)
    return tuple(distinct), tuple(structure)


def unflatten(tensors: Sequence[Tensor], structure: Structure) -> Tree:
    """The tree that `flatten` took apart."""
    return tensors[0] if structure is None else tuple([tensors[position] for position in structure])

"""The mini-batch and its targets, on the device of the stage that takes them.

A micro-batch that is fetched when its forward begins holds up the host, which could enqueue what follows. So
all are sent when the step begins, one after another beside what the device computes, and each is waited for
by the device where it is first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gpipe_bench.pipeline.stage.trees import Structure, Tree, flatten, tensors_of, unflatten
from gpipe_bench.pipeline.transfers import Mark, Transfers

Batch = TypeVar("Batch", bound=Tree | None)  # None: there is no target


class Arriving:
    """Micro-batches on their way to `device`; taking one makes the device wait for it.

    What is taken `once` lives from then on as long as who has taken it wants.
    """

    def __init__(
        self, trees: Iterable[Tree], device: torch.device, transfers: Transfers, what: str, *, once: bool
    ) -> None:
        self._device, self._transfers, self._once = device, transfers, once
        self._parts: dict[int, tuple[tuple[Tensor, ...], tuple[Mark, ...], Structure]] = {}
        for microbatch, tree in enumerate(trees):
            tensors, structure = flatten(tree, what)
            self._parts[microbatch] = (*transfers.send(tensors, device), structure)

    def __getitem__(self, microbatch: int) -> Tree:
        tensors, marks, structure = self._parts[microbatch]
        if self._once:
            del self._parts[microbatch]
        self._transfers.receive(tensors, marks, self._device)
        return unflatten(tensors, structure)


def deliver(
    trees: Sequence[Batch], device: torch.device, transfers: Transfers, what: str, *, once: bool = False
) -> Sequence[Batch] | Arriving:
    """The micro-batches on `device`; as they are where all of them are there, or there are none."""
    for tree in trees:
        for tensor in () if tree is None else tensors_of(tree, what):
            if tensor.device != device:
                found = (tree for tree in trees if tree is not None)
                return Arriving(found, device, transfers, what, once=once)
    return trees

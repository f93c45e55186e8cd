"""Tensors of a stage: what it keeps of a micro-batch, and where the numbers of one are: with several
processes, or in the memory of another tensor too.

torch's `DTensor`, of which processes have a part each, takes a second to import. Only modules that make one
import it; others ask here.

Shared memory shows in two places. A parameter's first gradient torch makes the `.grad` without a copy, and
adds the next one to it in place, even if another tensor lives in its memory, such as the gradient that goes
out, where a layer adds a view of a parameter to its input. What is on its way to another stage would become a
sum. Of two tensors of one message, what a layer changes in one in place shows in the other as long as no
stage begins between; behind a cut they are two tensors.

All that a stage holds of a micro-batch stands in one object with a known moment for each part: the inputs
come in with F, they become the leaves of a graph with F or R, and all of it goes at once, in B, or in I,
which leaves what W needs. The graph is held by its outgoing edges rather than by the output tensors, so that
an output lives on only if a layer saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import cache
from itertools import combinations
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .buffers import Saved
from .trees import Message, Nested, Tree, unflatten


def is_divided(tensor: Any) -> bool:
    """Whether it is a `DTensor`."""
    return hasattr(tensor, "device_mesh")


@overload
def local(tensor: Tensor) -> Tensor: ...
@overload
def local(tensor: None) -> None: ...
def local(tensor: Any) -> Tensor | None:
    """Returns this process's part of a tensor as a plain tensor, once no collective is writing it."""
    return None if tensor is None else here(tensor.to_local() if is_divided(tensor) else tensor)


def here(tensor: Any) -> Tensor:
    """The tensor, once a functional collective of torch that may still be writing it is done. An operation
    that reads it would wait by itself; who reads its memory without one has to ask here.
    """
    found: Tensor = tensor.wait() if hasattr(tensor, "wait") else tensor
    return found


def separate(parameters: Iterable[nn.Parameter], others: Iterable[Tensor | None]) -> list[nn.Parameter]:
    """Copies the `.grad` of `parameters` that had none where it overlaps with `others` or with one another.

    Returns the parameters that still have no gradient.
    """
    taken: dict[int, list[tuple[int, int]]] = {}  # extents, by storage
    for tensor in others:
        if tensor is not None and tensor.layout is torch.strided:
            tensor = local(tensor)
            taken.setdefault(tensor.untyped_storage()._cdata, []).append(_extent(tensor))
    waiting: list[nn.Parameter] = []
    for parameter in parameters:
        gradient = local(parameter.grad)
        if parameter.grad is None or gradient is None:
            waiting.append(parameter)
        elif gradient.layout is torch.strided:
            neighbours = taken.setdefault(gradient.untyped_storage()._cdata, [])
            start, end = _extent(gradient)
            if any(start < other_end and other_start < end for other_start, other_end in neighbours):
                parameter.grad = parameter.grad.clone()
            else:
                neighbours.append((start, end))
    return waiting


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the positions of tensors whose memory lies in that of another one, or between its rows."""
    if len(tensors) < 2:
        return ()
    found = [local(tensor) if tensor.layout is torch.strided else None for tensor in tensors]
    storages = [None if tensor is None else tensor.untyped_storage()._cdata for tensor in found]
    if len(set(storages)) == len(storages):
        return ()
    positions: set[int] = set()
    for (i, a), (j, b) in combinations(enumerate(found), 2):
        if a is not None and b is not None and storages[i] == storages[j]:
            (start, end), (other_start, other_end) = _extent(a), _extent(b)
            if start < other_end and other_start < end:
                positions |= {i, j}
    return tuple(sorted(positions))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor's elements lie; fake tensors have no address."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    span = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (span + 1) * tensor.element_size() if tensor.numel() else start


class MicrobatchState:
    """The state that a stage holds of one micro-batch, from F to the end of its backward.

    It begins as the message that came from the stage before, or the stage's own part of the mini-batch.
    """

    versions: tuple[int, ...] = ()  # of the inputs, to notice a layer that overwrites what R needs
    buffers: Saved | None = None  # what the forward saw of the buffers that change, for R
    edges: tuple[GradientEdge, ...] = ()  # where the gradients of the outputs enter the graph
    places: tuple[int, ...] = ()  # which tensors of the outgoing message the edges belong to
    exits: Sequence[Tensor | None] = ()  # gradients of the inputs, once the backward has run

    def __init__(self, message: Message) -> None:
        # The boundary inputs, and which of them share memory with others.
        self.inputs, self.structure, self.needs_grad, self.aliases = message
        # What decides which of the stage's outputs need a gradient and which inputs its layers overwrite.
        self.kind: Hashable = self.needs_grad
        if type(self.structure) is Nested:
            self.kind = (self.needs_grad, self.structure.kind())

    def enter(
        self,
        copied: Collection[int] = (),
        *,
        again: bool = False,
        watched: list[tuple[Tensor, int]] | None = None,
    ) -> Tree:
        """The inputs, put together, as the beginning of a new graph; without a graph, as they are.

        A layer will overwrite those at the positions `copied`, so these are copied. If the inputs are needed
        `again`, for a recomputation, they stay here as they are. `watched` takes in what is returned, each
        with its version.
        """
        inputs = self.inputs
        if copied:
            inputs = tuple([t.clone() if i in copied else t for i, t in enumerate(inputs)])
        entered: Sequence[Tensor] = inputs
        if torch.is_grad_enabled() and True in self.needs_grad:
            exits: list[Tensor | None] = [None] * len(inputs)
            entered = [*inputs]
            for position, needed in enumerate(self.needs_grad):
                if needed:
                    tensor = inputs[position]
                    entered[position] = enter(root(tensor.device), tensor, exits, position)
            if not again:
                self.exits = exits
        if not again:
            self.inputs = inputs
        if watched is not None:
            watched += [(tensor, tensor._version) for tensor in entered]
        return entered[0] if self.structure is None else unflatten(entered, self.structure)

    def keep_graph(
        self, outputs: Sequence[Tensor], announced: Sequence[bool] = (True,), stage: int = 0
    ) -> None:
        """Keeps where the gradients enter the graph, and of the inputs only those that gradients leave by.
        `RuntimeError` for an output that needs one, of which the next stage was told otherwise.
        """
        places, edges = [], []
        for place, tensor in enumerate(outputs):
            if tensor.requires_grad:
                if not announced[place]:
                    raise RuntimeError(
                        f"an output of stage {stage} needs a gradient for this micro-batch and did not for "
                        "the first one, when the stages agreed on what travels; let it need one for all, as "
                        "in y + 0 * parameter.sum() where a layer is skipped, or keep the choice and what it "
                        "leaves out in one stage. Where another parameter is trained since, call "
                        "Pipeline.refresh() on every rank"
                    )
                places.append(place)
                node = tensor.grad_fn
                # `get_gradient_edge` takes longer, to find what is special of leaves and Python's nodes.
                special = node is None or isinstance(node, torch._C._FunctionBase)
                edges.append(
                    get_gradient_edge(tensor) if special else GradientEdge(node, tensor.output_nr)  # type: ignore[arg-type]
                )
        self.places, self.edges = tuple(places), tuple(edges)
        if False in self.needs_grad:
            self.inputs = tuple([t for t, needed in zip(self.inputs, self.needs_grad, strict=True) if needed])


class _Entry(torch.autograd.Function):
    """Where a boundary input enters the graph and its gradient leaves it, as it is: that of a leaf is copied
    unless it is laid out like the leaf. The `root` makes it a node of a graph, and gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, root: Tensor, tensor: Tensor, exits: list[Tensor | None], position: int) -> Tensor:
        ctx.exits, ctx.position = exits, position
        # Unlike a view of the same shape it keeps the strides of dimensions of length 1.
        return tensor.detach()


def _leave(node: Any, gradient: Tensor) -> tuple[None, None, None, None]:
    node.exits[node.position] = gradient
    return None, None, None, None


# `_Entry.apply` without what torch does for functorch, which takes as long as the rest.
enter: Callable[[Tensor, Tensor, list[Tensor | None], int], Tensor]
enter = super(torch.autograd.Function, _Entry).apply
ENTRY: Any = _Entry._backward_cls  # of the nodes with which inputs enter a graph
ENTRY.apply = _leave  # torch's looks for a `backward` and a `vjp` each time


@cache
def root(device: torch.device) -> Tensor:
    """A leaf on the device, so that a tensor that enters a graph need not be one, which would take as long as
    the rest.
    """
    return torch.zeros((), device=device, requires_grad=True)

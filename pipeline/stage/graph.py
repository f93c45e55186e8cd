"""What a stage keeps of one micro-batch between two of its actions.

The memory that a schedule needs is what the stages hold while they wait, so all that a stage may hold stands
here, in one object per micro-batch with a known moment for each part: the inputs come in with F, they become
the leaves of a graph with F or R, and all of it goes at once, in B, or in I, which leaves what W needs. The
graph is held by its outgoing edges rather than by the output tensors, so that an output lives on only if a
layer saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_bench.pipeline.stage.buffers import Saved
from gpipe_bench.pipeline.stage.trees import Message, Nested, Tree, unflatten


class Kept:
    """What a stage holds of one micro-batch, from F to the end of its backward.

    It begins as the message that came from the stage before, or the stage's own part of the mini-batch.
    """

    versions: tuple[int, ...] = ()  # of the inputs, to notice a layer that overwrites what R needs
    buffers: Saved | None = None  # what the forward saw of the buffers that change, for R
    edges: tuple[GradientEdge, ...] = ()  # where the gradients of the outputs enter the graph
    places: tuple[int, ...] = ()  # which tensors of the outgoing message the edges belong to
    exits: Sequence[Tensor | None] = ()  # gradients of the inputs, once the backward has run

    def __init__(self, message: Message) -> None:
        # The boundary inputs, leaves where they need a gradient, and which of them share memory with others.
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

        Those at the positions `copied` are copied before, because a layer will overwrite them. If they are
        needed `again`, for a recomputation, they stay here as they are. `watched` takes in what is returned,
        each with its version.
        """
        inputs = self.inputs
        if copied:
            inputs = tuple([t.clone() if i in copied else t for i, t in enumerate(inputs)])
        entered: Sequence[Tensor] = inputs
        if torch.is_grad_enabled() and True in self.needs_grad:
            exits: list[Tensor | None] = [None] * len(inputs)
            leaves, entered = [*inputs], [*inputs]
            for position, needed in enumerate(self.needs_grad):
                if needed:
                    leaf = leaves[position] = leaves[position].detach().requires_grad_()
                    entered[position] = enter(leaf, exits, position)
            if not again:
                self.exits, self.inputs = exits, tuple(leaves)
        elif not again:
            self.inputs = inputs
        if watched is not None:
            watched += [(tensor, tensor._version) for tensor in entered]
        return entered[0] if self.structure is None else unflatten(entered, self.structure)

    def keep_graph(
        self, outputs: Sequence[Tensor], announced: Sequence[bool] = (True,), stage: int = 0
    ) -> None:
        """Keeps where the gradients enter the graph, and of the inputs only the leaves that take gradients
        out. `RuntimeError` for an output that needs one, of which the next stage was told otherwise.
        """
        places, edges = [], []
        for place, tensor in enumerate(outputs):
            if tensor.requires_grad:
                if not announced[place]:
                    raise RuntimeError(
                        f"an output of stage {stage} needs a gradient now, but did not when the stages "
                        "agreed on what travels; call Pipeline.refresh() after changing which parameters are "
                        "trained"
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
            self.inputs = tuple([t for t in self.inputs if t.requires_grad])


class _Entry(torch.autograd.Function):
    """Where a boundary input enters the graph and its gradient leaves it.

    A leaf's gradient is copied unless it is laid out like the leaf, which the piece of a concatenation's
    gradient is not; here the gradient goes out as it is.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exits: list[Tensor | None], position: int) -> Tensor:
        ctx.exits, ctx.position = exits, position
        # Unlike a view of the same shape it keeps the strides of dimensions of length 1.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.exits[ctx.position] = gradient
        return None, None, None


# `Function.apply` without what it does for functorch, which takes as long as the rest.
enter: Callable[..., Tensor] = super(torch.autograd.Function, _Entry).apply
ENTRY: type = _Entry._backward_cls  # of the nodes with which inputs enter a graph

"""What a stage keeps of one micro-batch between two of its actions.

The memory that a schedule needs is what the stages hold while they wait, so all that a stage may hold stands
here, in one object per micro-batch with a known moment for each part: the inputs come in with F, they become
the leaves of a graph with F or R, and `drop` lets go of everything at once, in B, or in I, which leaves what
W needs. The graph is held by its outgoing edges rather than by the output tensors, so that an output lives on
only if a layer saved it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_bench.pipeline.stage.buffers import Saved
from gpipe_bench.pipeline.stage.split_backward import Split, Weights
from gpipe_bench.pipeline.stage.tensors import overlapping
from gpipe_bench.pipeline.stage.trees import Message, Nested, Structure, Tree, flatten


class Kept:
    """What stage number `stage` holds of one micro-batch between two of its actions."""

    def __init__(self, stage: int) -> None:
        self.stage = stage  # for messages
        self.drop()

    def drop(self) -> None:
        self.inputs: tuple[Tensor, ...] = ()  # the boundary inputs; leaves where they need a gradient
        self.structure: Structure = None
        self.needs_grad: tuple[bool, ...] = ()
        self.aliases: tuple[int, ...] = ()  # inputs that share memory with another one
        # What decides which of the stage's outputs need a gradient and which inputs its layers overwrite.
        self.kind: Hashable = ()
        self.versions: tuple[int, ...] = ()  # of the inputs, to notice a layer that overwrites what R needs
        self.buffers: Saved | None = None  # what the forward saw of the buffers that change, for R
        self.edges: tuple[GradientEdge, ...] = ()  # where the gradients of the outputs enter the graph
        self.exits: list[Tensor | None] = []  # gradients of the inputs, once the backward has run
        self.places: tuple[int, ...] = ()  # which tensors of the outgoing message the edges belong to
        self.weights: Weights | None = None  # what I left for W

    def take(self, received: Message) -> None:
        """The inputs that came from the stage before."""
        self.inputs, structure, self.needs_grad, self.aliases = received
        self.structure, self.kind = structure, self.needs_grad
        if type(structure) is Nested:
            self.kind = (self.needs_grad, structure.kind())

    def take_own(self, microbatch: Tree, *, again: bool) -> None:
        """The inputs of the first stage: its own part of the mini-batch, on its device. If they are needed
        `again`, for a recomputation, those that are overwritten are copied.
        """
        tensors, structure = flatten(microbatch, "the mini-batch")
        # .data: parts of one batch share a version counter, but overwriting one does not change the others.
        tensors = tuple([tensor.data for tensor in tensors])
        aliases = overlapping(tensors) if again else ()
        self.take(Message(tensors, structure, (False,) * len(tensors), aliases))

    def enter(
        self,
        copied: Collection[int] = (),
        *,
        again: bool = False,
        watched: list[tuple[Tensor, int]] | None = None,
    ) -> tuple[Tensor, ...]:
        """The inputs as the beginning of a new graph; without a graph, as they are.

        Those at the positions `copied` are copied before, because a layer will overwrite them. If they are
        needed `again`, for a recomputation, they stay here as they are. `watched` takes in what is returned,
        each with its version.
        """
        inputs = self.inputs
        if copied:
            inputs = tuple([t.clone() if i in copied else t for i, t in enumerate(inputs)])
        if not (torch.is_grad_enabled() and any(self.needs_grad)):
            if not again:
                self.inputs = inputs
            if watched is not None:
                watched += [(tensor, tensor._version) for tensor in inputs]
            return inputs
        exits: list[Tensor | None] = [None] * len(self.needs_grad)
        leaves: list[Tensor] = []
        entered: list[Tensor] = []
        for position, (tensor, needed) in enumerate(zip(inputs, self.needs_grad, strict=True)):
            leaf = tensor.detach().requires_grad_() if needed else tensor
            leaves.append(leaf)
            entered.append(_Entry.apply(leaf, exits, position) if needed else leaf)
        if not again:
            self.exits, self.inputs = exits, tuple(leaves)
        if watched is not None:
            watched += [(tensor, tensor._version) for tensor in entered]
        return tuple(entered)

    def roots(
        self, gradients: Sequence[Tensor | None]
    ) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...]]:
        """The edges that have one of the outputs' `gradients`, and these gradients."""
        pairs = [
            (edge, gradient)
            for edge, place in zip(self.edges, self.places, strict=True)
            if (gradient := gradients[place]) is not None
        ]
        return tuple([edge for edge, _ in pairs]), tuple([gradient for _, gradient in pairs])

    def split(self, edges: tuple[GradientEdge, ...]) -> Split:
        """The graph behind some of the edges, as what I computes and what W does."""
        return Split(edges, _Entry._backward_cls)

    def keep_graph(self, outputs: Sequence[Tensor], announced: tuple[bool, ...] | None = None) -> None:
        """Keeps where the gradients enter the graph, and of the inputs only the leaves that take gradients
        out.
        """
        if announced is not None and any(
            t.requires_grad and not a for t, a in zip(outputs, announced, strict=True)
        ):
            raise RuntimeError(
                f"an output of stage {self.stage} needs a gradient now, but did not when the stages agreed "
                "on what travels; call Pipeline.refresh() after changing which parameters are trained"
            )
        self.places = tuple([i for i, tensor in enumerate(outputs) if tensor.requires_grad])
        self.edges = tuple([get_gradient_edge(outputs[i]) for i in self.places])
        if not all(self.needs_grad):
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

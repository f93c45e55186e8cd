"""What waits between the two halves of a backward: operations whose weights get their gradients in W.

I  catch(gradient of the output), hold()      the graph is let go of, what the formula needs is kept
W  gradients(), to the engine                 at the weights' edges, a few together
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from gpipe_bench.pipeline.stage.deferrable import Formula

LEAF = "AccumulateGrad"
# W lets the engine add gradients when it has this many: a pass costs 10 us, and memory is to be free again.
MANY_BYTES = 1 << 20


def run_engine(
    edges: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...], inputs: tuple[GradientEdge, ...] = ()
) -> tuple[Tensor | None, ...]:
    """Passes the gradients of `edges` through their graph and frees it.

    Accumulates the gradients of all leaves; with `inputs` it returns the gradients at these edges instead.
    """
    # What torch.autograd.backward calls in the end; its own checks of gradient edges cost 30 us a time.
    caught: tuple[Tensor | None, ...] = Variable._execution_engine.run_backward(
        edges, gradients, False, False, inputs, allow_unreachable=True, accumulate_grad=not inputs
    )
    return caught


class Waiting:
    """An operation whose weights' gradients wait for W."""

    __slots__ = ("edges", "formula", "gradient", "held", "inputs", "leaves", "order", "versions")

    def __init__(
        self,
        order: int,
        edges: tuple[GradientEdge, ...],
        leaves: tuple[Any, ...],
        inputs: list[Any],
        held: tuple[Tensor, ...],
        formula: Formula,
    ) -> None:
        self.order = order  # the engine takes the operation with the largest number first
        self.edges, self.leaves = edges, leaves  # of weight and bias, and the parameters' nodes behind them
        self.inputs = inputs  # where the engine goes on from here; empty when I is over
        self.held, self.formula = held, formula
        self.gradient: Tensor | None = None
        self.versions: tuple[int, ...] = ()

    def catch(self, gradients: tuple[Tensor | None, ...]) -> None:
        """As a hook of the operation: all hooks of its output have had their say by then."""
        self.gradient = gradients[0]

    def hold(self) -> None:
        """I is over: the graph is let go of, and nothing may change what W works on."""
        self.inputs = []
        self.versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        assert self.gradient is not None
        return self.gradient._version, *[tensor._version for tensor in self.held]

    def gradients(self) -> tuple[Tensor, ...]:
        assert self.gradient is not None
        if self.versions != self._versions():
            raise RuntimeError(
                "a tensor that the gradients of weights are computed from was changed in place between the "
                "two halves of the backward; use the out-of-place form of the operation, or a schedule with "
                "B instead of I and W"
            )
        return self.formula(self.gradient)


class Weights:
    """What I leaves for W, of one micro-batch."""

    __slots__ = ("_done", "_shared", "_single")

    def __init__(
        self, single: list[Waiting], shared: list[Waiting], done: list[tuple[GradientEdge, Tensor]]
    ) -> None:
        self._single = single
        self._shared = shared  # operations with parameters in common, in the order of a whole backward
        self._done = done  # gradients that I has computed

    def parts(self) -> tuple[list[Waiting], list[Waiting], list[tuple[GradientEdge, Tensor]]]:
        """What waits, as it was given; W takes the first list from its end."""
        return self._single, self._shared, self._done

    @torch.no_grad()
    def accumulate(self) -> None:
        """W: the gradients of all parameters, let go of as they are added."""
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        num_bytes = 0
        while self._single:
            waiting = self._single.pop()  # caught last, so most likely still in a cache
            weight, *bias = waiting.edges
            edges += (_entrance(weight), *bias)
            gradients += waiting.gradients()
            num_bytes += sum([gradient.nbytes for gradient in gradients[-len(waiting.edges) :]])
            if num_bytes > MANY_BYTES:
                run_engine(tuple(edges), tuple(gradients))
                edges, gradients, num_bytes = [], [], 0
        # What is added up before it is added to a `.grad` has to be in one pass.
        for waiting in self._shared:
            edges += waiting.edges
            gradients += waiting.gradients()
        for edge, gradient in self._done:
            edges.append(edge)
            gradients.append(gradient)
        self._shared, self._done = [], []
        if edges:
            run_engine(tuple(edges), tuple(gradients))


def _entrance(edge: GradientEdge) -> GradientEdge:
    """The edge, such that a gradient new from its formula can become a parameter's `.grad` without a copy.

    That the engine allows to nobody who holds on to the tensor, as a caller does; to a view it does.
    """
    if type(edge.node).__name__ != LEAF:
        return edge
    parameter = edge.node.variable  # type: ignore[attr-defined]
    if parameter.grad is not None:
        return edge
    with torch.enable_grad():
        return GradientEdge(parameter.permute(*range(parameter.dim())).grad_fn, 0)

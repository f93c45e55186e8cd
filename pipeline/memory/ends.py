"""What stands before and after a layer that is profiled alone, in place of the rest of the model.

In a model a layer's inputs are outputs of the layer before, which takes their gradients and lets them go, and
its outputs are held by what follows, which sends fresh gradients back. A profile that fed leaves and called
`backward` on the outputs would see other storages live and die. Both ends are autograd functions that compute
nothing and keep nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpipe_bench.pipeline.memory.boundary import Boundary, TensorSpec, as_tuple
from gpipe_bench.pipeline.memory.tracker import EventLog


def enter(leaf: Tensor, spec: TensorSpec, position: int, delivered: dict[int, Tensor]) -> Tensor:
    if not (spec.requires_grad and torch.is_grad_enabled()):
        return torch.empty_like(leaf)
    made: Tensor = _Source.apply(leaf.requires_grad_(), position, delivered)
    return made


def follow(result: Any, unused: frozenset[int], log: EventLog, sent_back: list[int | None]) -> Tensor:
    # The graph of an output that nothing differentiates goes with the output, and its backward never runs.
    followed = [t.detach() if position in unused else t for position, t in enumerate(as_tuple(result))]
    root: Tensor = _Tail.apply(log, sent_back, *followed)
    return root


class _Source(torch.autograd.Function):
    """Makes an input that is no leaf, as between two layers, and takes its gradient as the layer before."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, position: int, delivered: dict[int, Tensor]) -> Tensor:
        ctx.position, ctx.delivered = position, delivered
        return torch.empty_like(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.delivered[ctx.position] = gradient
        return None, None, None


class _Tail(torch.autograd.Function):
    """Stands for all that follows the layer: keeps nothing, sends fresh gradients back."""

    @staticmethod
    def forward(ctx: Any, log: EventLog, sent_back: list[int | None], *outputs: Tensor) -> Tensor:
        ctx.log, ctx.sent_back = log, sent_back
        ctx.specs = [(t.shape, t.dtype) if t.requires_grad else None for t in outputs]
        ctx.same_as = Boundary.of(outputs).same_as
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            torch.empty(spec[0], dtype=spec[1]) if spec is not None and first == index else None
            for index, (spec, first) in enumerate(zip(ctx.specs, ctx.same_as, strict=True))
        ]
        ctx.sent_back.extend(None if each is None else ctx.log.serial_of(each) for each in gradients)
        return None, None, *gradients


SOURCE: type = _Source._backward_cls  # of the nodes with which the layer's inputs enter its graph

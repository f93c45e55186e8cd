"""Weights that several layers use: each has a leaf of its own in a step, which ends with their sum.

Autograd adds up what the uses of a weight give it as the graphs have it: in one stage the uses of a
micro-batch first, over several stages the micro-batches of each use. The two differ in the last bits. So in a
training step every layer that uses such a weight works with a leaf that shares the weight's memory and
gathers the gradients of that layer alone, as if it were no tie. At the end the leaves are added up, the last
layer's first, which is the order in which a plain backward meets them. That has the same bits for every
number of stages, and outside of a step there is but one parameter.

    in the step     layer 0: leaf 0   layer 3: leaf 3        .grad of the parameter is set aside
    at its end      .grad = what was there + (leaf 3 + leaf 0)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Leaves:
    """The tied weights among layers of one process, by their indices in the model; `elsewhere` are those that
    other processes have, too.

    Tensor hooks of such a parameter are called for every gradient of every leaf, so for each use and
    micro-batch; hooks behind the accumulation once, at the end of a step.
    """

    copies: frozenset[nn.Parameter] = frozenset()  # nobody else counts a parameter of one process

    def __init__(self, layers: Mapping[int, nn.Module], elsewhere: Collection[nn.Parameter] = ()) -> None:
        self._elsewhere = frozenset(elsewhere)
        users: dict[nn.Parameter, set[int]] = {}
        for index, layer in layers.items():
            for parameter in layer.parameters():
                users.setdefault(parameter, set()).add(index)
        tied = {p for p, found in users.items() if len(found) > 1 or p in self._elsewhere}
        # Where each layer has such weights: a module's parameters, and a name.
        self._places = {
            index: [
                (module._parameters, name)
                for module in layer.modules()
                for name, parameter in module._parameters.items()
                if parameter in tied
            ]
            for index, layer in layers.items()
            if not tied.isdisjoint(layer.parameters())
        }
        # In a step: what stands there for what, by layer.
        self._stands: dict[int, list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]]] = {}
        self._held: dict[nn.Parameter, Tensor | None] = {}
        self._left: dict[nn.Parameter, dict[int, nn.Parameter]] = {}
        self._own = False  # what is in .grad is of this replica alone

    def __bool__(self) -> bool:
        return bool(self._places)

    def around(self, index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which calls layer `index`, with the layer's leaves in the place of its tied weights."""
        if index not in self._places:
            return call

        def with_leaves(value: Any, **shared: Any) -> Any:
            stands = self._stands.get(index, ())
            for parameters, name, _, leaf in stands:
                parameters[name] = leaf
            try:
                return call(value, **shared)
            finally:
                for parameters, name, parameter, _ in stands:
                    parameters[name] = parameter

        return with_leaves

    def of_layers(self, indices: Collection[int]) -> list[nn.Parameter]:
        """The leaves that these layers work with in the step."""
        return list(dict.fromkeys(leaf for i in indices for *_, leaf in self._stands.get(i, ())))

    def stands_for(self, parameter: nn.Parameter) -> bool:
        """Whether there are leaves of the parameter in this step."""
        return parameter in self._held

    def begin(self, copies: Collection[nn.Parameter] = ()) -> None:
        """Before a training step: makes the leaves, and sets aside what is in `.grad`. What is of this
        replica alone goes on in a leaf instead, unless another process counts the parameter (`copies`).
        """
        found: dict[nn.Parameter, list[int]] = {}
        for index, places in self._places.items():
            for parameter in dict.fromkeys(parameters[name] for parameters, name in places):
                if parameter is not None:  # another one may stand there since the last step
                    found.setdefault(parameter, []).append(index)
        for parameter, indices in found.items():
            if not parameter.requires_grad or (len(indices) == 1 and parameter not in self._elsewhere):
                continue
            held, parameter.grad = parameter.grad, None
            leaves = {index: _leaf(parameter) for index in indices}
            if self._own:
                leaves[min(indices)].grad = None if parameter in copies else held
                held = None
            self._held[parameter] = held
            self._left[parameter] = leaves
            for index, leaf in leaves.items():
                stands = self._stands.setdefault(index, [])
                for parameters, name in self._places[index]:
                    if parameters[name] is parameter:
                        stands.append((parameters, name, parameter, leaf))

    def take(self, parameter: nn.Parameter, index: int) -> Tensor | None:
        """What layer `index` gave the parameter in the step; it is let go of."""
        leaf = self._left.get(parameter, {}).pop(index, None)
        if leaf is None:
            return None
        gradient, leaf.grad = leaf.grad, None
        return gradient

    def refuse_others(self) -> None:
        """`RuntimeError` for gradients that did not come in on a leaf, which replicas would not sum."""
        for parameter in self._held:
            if parameter.grad is not None:
                raise RuntimeError(
                    f"a weight of shape {tuple(parameter.shape)} that several layers use got a gradient from "
                    "a layer that runs again inside of the backward, which is not summed over replicas; use "
                    "checkpoint(..., use_reentrant=False)"
                )

    def sum_gradients(self, *, sync: bool = True) -> None:
        """Ends a training step in one process, which has no replicas to wait for."""
        self.end({})

    def end(
        self, sums: Mapping[nn.Parameter, Tensor | None], *, own: bool = False, keeps: bool = True
    ) -> None:
        """Ends a training step: `.grad` of every parameter is what it held before and the sum of its leaves,
        or what `sums` says instead. `own`: of this replica alone, of which one `keeps` what was held.
        """
        parameters = list(self._held)
        if not keeps and own:
            self._held = dict.fromkeys(parameters)
        self.restore(sums)
        self._own = own
        for parameter in parameters:
            if parameter.grad is not None:
                for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
                    hook(parameter)

    def restore(self, sums: Mapping[nn.Parameter, Tensor | None] | None = None) -> None:
        """The same without hooks, also after a failure: `.grad` has what completed actions gave."""
        sums = sums or {}
        for parameter, held in self._held.items():
            if parameter in sums:
                total = sums[parameter]
            else:
                total = None
                for index in sorted(self._left[parameter], reverse=True):
                    total = plus(total, self.take(parameter, index))
                # Of who calls layers where nobody sees it, as a reentrant checkpoint does in a backward.
                total = plus(total, parameter.grad)
            parameter.grad = plus(held, total)
        self._held, self._left, self._stands = {}, {}, {}


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    """Another leaf on the same memory, with the same attributes and tensor hooks."""
    leaf = nn.Parameter(parameter.detach())
    leaf.__dict__.update(parameter.__dict__)
    if parameter._backward_hooks:
        leaf._backward_hooks = parameter._backward_hooks
    return leaf


def plus(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The sum, in the memory of one of them as in autograd; either may be missing or sparse."""
    if total is None or gradient is None:
        return gradient if total is None else total
    if total.layout is not torch.strided and gradient.layout is torch.strided:
        total, gradient = gradient, total
    with torch.no_grad():
        return total.add_(gradient)

"""Portals inside of a stage: who declares them, and how they go from layer to layer.

A layer that stashes has the names in `stashes` and gives a tuple: its output and a tensor for each name. One
that pops has names in `pops` and takes a tuple: its input and a tensor for each name. Nothing else makes it
special, so a model can say so without importing anything from here.

For the stage a portal from elsewhere is one more input, and one that leads elsewhere one more output. What
holds for those holds for portals: inputs are kept for the recomputation, gradients enter and leave where the
schedule says, and a recomputation sends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..plan.edges import Declared, Edge, arriving, check, leaving
from .tensors import version
from .trees import Tree


class Stash(nn.Module):
    """Keeps the output of `module`, or without one its own input, for later layers that pop `name`.

    The tensor also goes on to the next layer; nothing is copied.
    """

    def __init__(self, name: str, module: nn.Module | None = None) -> None:
        super().__init__()
        self.stashes, self.module = (name,), module

    def forward(self, value: Tree) -> tuple[Tree, Tree]:
        if self.module is not None:
            value = self.module(value)
        return value, value


class Pop(nn.Module):
    """Gives `module` the pair of its input and what a layer before has stashed as `name`.

    Without a module, the pair is the output.
    """

    def __init__(self, name: str, module: nn.Module | None = None) -> None:
        super().__init__()
        self.pops, self.module = (name,), module

    def forward(self, value: tuple[Tree, Tensor]) -> Tree:
        return value if self.module is None else self.module(value)


class PortalSequential(nn.Sequential):
    """The plain model of layers with portals: runs them one after another, without a pipeline."""

    def forward(self, value: Tree) -> Tree:
        return run_through(tuple(self), value)


def run_through(layers: Sequence[nn.Module], value: Tree) -> Tree:
    """Runs layers on `value` one after another, with their portals."""
    carried = Carried(declarations(layers))
    for index, layer in enumerate(layers):
        value = carried.through(index, layer, value)
    return value


def declarations(layers: Iterable[nn.Module]) -> tuple[Declared, ...]:
    """Returns the portals that each layer declares. `ValueError` names one that cannot work as a portal."""
    layers = tuple(layers)
    found = tuple([Declared(_names(layer, "stashes"), _names(layer, "pops")) for layer in layers])
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if module is not layer and isinstance(module, Stash | Pop):
                name = (*getattr(module, "stashes", ()), *getattr(module, "pops", ()))[0]
                raise ValueError(
                    f"portal {name!r} is declared inside of layer {index} ({type(layer).__name__}); a "
                    f"{type(module).__name__} must be a layer of the pipeline itself"
                )
    check(found)
    return found


def _names(layer: nn.Module, attribute: str) -> tuple[str, ...]:
    names = getattr(layer, attribute, ())
    if isinstance(names, str):
        raise ValueError(
            f"{attribute} of a {type(layer).__name__} is {names!r}; give a tuple of names, ({names!r},)"
        )
    if isinstance(names, tuple | list) and all(isinstance(name, str) for name in names):
        return tuple(names)
    return ()  # something else of the user's that happens to be called so


class Carried:
    """The portals of passes through consecutive layers, one pass after another: each is held until its last
    use. `declared` is what each of the layers declares.

    The input of a stage is a tuple where portals are `arriving` from other stages, its output where they are
    `leaving`: the value between the stages, and a tensor for each name.
    """

    def __init__(
        self, declared: Sequence[Declared], arriving: Sequence[str] = (), leaving: Sequence[str] = ()
    ) -> None:
        self._declared, self._arriving, self._leaving = declared, arriving, leaving
        self._uses = Counter([*(name for layer in declared for name in layer.pops), *leaving])
        self.drop()

    def drop(self) -> None:
        """Lets go of what is held: a pass is over, or has failed."""
        self._left, self._held = self._uses.copy(), dict[str, tuple[Tensor, int]]()

    def enter(self, value: Tree) -> Tree:
        """Begins a pass: takes the arriving portals out of the stage's input, returns the rest."""
        self.drop()
        if not self._arriving:
            return value
        main, *arrived = value
        for name, tensor in zip(self._arriving, arrived, strict=True):
            self.put(name, tensor)
        return main

    def leave(self, value: Tree) -> Tree:
        """Ends a pass: adds the leaving portals to the stage's output."""
        found = (value, *[self.take(name) for name in self._leaving]) if self._leaving else value
        self.drop()
        return found

    def around(self, index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a layer, with what it pops and stashes."""
        if not any(self._declared[index]):
            return call
        return partial(self.through, index, call)

    def through(self, index: int, call: Callable[..., Any], value: Tree) -> Tree:
        """Runs layer `index` on `value` and the values that it pops; keeps the values that it stashes."""
        stashes, pops = self._declared[index]
        if pops:
            value = (value, *[self.take(name) for name in pops])
        value = call(value)
        if not stashes:
            return value
        if not isinstance(value, tuple) or len(value) != 1 + len(stashes):
            what = f"{len(value)} values" if isinstance(value, tuple) else f"a {type(value).__name__}"
            raise TypeError(
                f"a layer that stashes portal {', '.join(map(repr, stashes))} gave {what}; it must give a "
                f"tuple of {1 + len(stashes)}: its output, and a tensor for each name"
            )
        for name, tensor in zip(stashes, value[1:], strict=True):
            self.put(name, tensor)
        return value[0]

    def put(self, name: str, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"portal {name!r} was given a {type(tensor).__name__}; a portal takes a tensor")
        if self._left[name]:
            self._held[name] = (tensor, version(tensor))

    def take(self, name: str) -> Tensor:
        tensor, before = self._held[name]
        if version(tensor) != before:
            raise changed(name)
        self._left[name] -= 1
        if not self._left[name]:
            del self._held[name]
        return tensor


def changed(name: str) -> RuntimeError:
    """The error for a portal whose tensor was overwritten on the way."""
    return RuntimeError(
        f"the tensor of portal {name!r} was changed in place between the layers that stash and pop it; use "
        "the out-of-place form of the operation (inplace=False)"
    )


def portals_of(
    declared: Sequence[Declared], spans: Sequence[range], lines: Sequence[Edge], stage: int
) -> Carried | None:
    """Returns the portals of a stage, or None; `declared` and `lines` are those of the whole model."""
    mine = [declared[layer] for layer in spans[stage]]
    return Carried(mine, arriving(lines, stage), leaving(lines, stage)) if any(map(any, mine)) else None

"""What crosses a stage boundary: trees of tensors, taken apart and put together, micro-batches of them, and
portals.

`torch.chunk` gives fewer micro-batches than asked for when the batch does not divide (6 examples in 4 chunks
make 3), which silently changes the schedule; here the number asked for is the number delivered and sizes
differ by at most one. What holds the same tensor twice is flattened to one tensor and a structure, so that
the tensor travels once and is one leaf of the receiver's graph: gradients that meet there are then summed as
the uncut model sums them.

A bare tensor and a tuple of tensors, which most layers pass, have the shortest way. But models also pass
dicts, named tuples and the outputs of `transformers`, with None and numbers in them. Only
tensors can travel, be kept for a recomputation or need a gradient, so everything else is structure: a value
that is compared, and goes to another process only where it is not what it was. Equality is exact, since a
receiver puts the tensors it gets into the structure it knows: 1, 1.0 and True are different constants, and so
are two dicts with other keys or the same keys in another order. What may be taken apart, and how, torch knows
(`torch.utils._pytree`); a dataclass is registered with it (`torch.export.register_dataclass`).

A layer that stashes a portal has its name in `stashes` and gives a tuple: its output and a tensor for each
name. One that pops has names in `pops` and takes a tuple: its input and a tensor for each name. Nothing else
makes it special, so a model can say so without importing anything from here. On its way from the one to the
other the tensor is one more input and output of each layer between, and so of each stage.
"""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# What a layer takes and gives: a tensor or a pytree of tensors and constants.
Tree = Any

# Which of the flattened tensors stands at each place of a tuple; None for a bare tensor; else `Nested`.
Structure: TypeAlias = "tuple[int, ...] | Nested | None"


class Message(NamedTuple):
    """Data that crosses a stage boundary forward: distinct tensors, how they make up the tree, which need
    a gradient, and the positions of tensors that share memory with another one.
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
    tensors, _ = flatten(tree, what)
    for tensor in tensors:
        if tensor.ndim == 0:
            raise ValueError(f"{what} holds a tensor without dimensions; dimension 0 must count the examples")
    lengths = [tensor.shape[0] for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(f"the tensors of {what} have {lengths} examples in dimension 0; they must agree")
    return lengths[0]


def split(tree: Tree, num_microbatches: int, what: str = "the mini-batch") -> tuple[Tree, ...]:
    """`num_microbatches` trees of views along dimension 0, of sizes that differ by at most one.

    Nothing is copied; what is no tensor stands in every one of them as it is.
    """
    return divide(tree, sizes(num_examples(tree, what), num_microbatches), what)


def divide(tree: Tree, lengths: tuple[int, ...], what: str = "the mini-batch") -> tuple[Tree, ...]:
    """Same as `split`, but with the number of examples of each micro-batch given (`sizes`)."""
    if isinstance(tree, Tensor):
        return tree.split_with_sizes(lengths)
    tensors, structure = flatten(tree, what)
    parts = zip(*[tensor.split_with_sizes(lengths) for tensor in tensors], strict=True)
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


# What may stand beside the tensors. All of it is immutable, so that a stage can't change another one's.
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, slice, range, type(Ellipsis),
)  # fmt: skip


class Constant:
    """A leaf that is no tensor. Equal to one of the same type and value only; NaN is equal to itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or type(self.value) is not type(other.value):
            return False
        if isinstance(self.value, float | complex | slice):  # by its text, which tells 0.0 from -0.0
            return repr(self.value) == repr(other.value)
        return bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), repr(self.value)))

    def __repr__(self) -> str:
        return repr(self.value)


class Nested:
    """The structure of a pytree that is no tuple of tensors.

    `leaves` says for each leaf of `spec` what stands there: the position of a tensor, or a constant.
    """

    __slots__ = ("_hash", "leaves", "spec")

    def __init__(self, spec: pytree.TreeSpec, leaves: tuple[int | Constant, ...]) -> None:
        self.spec, self.leaves = spec, leaves
        self._hash = hash((spec.num_nodes, leaves))

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The tree with `tensors` in their places."""
        found = [tensors[leaf] if isinstance(leaf, int) else leaf.value for leaf in self.leaves]
        return pytree.tree_unflatten(found, self.spec)

    def kind(self) -> Nested:
        """Returns the structure with each number replaced by its type. Keys, None and flags usually decide
        shapes; numbers may change with every step.
        """
        if not any(map(_is_number, self.leaves)):
            return self
        leaves = [
            Constant(type(leaf.value)) if isinstance(leaf, Constant) and _is_number(leaf) else leaf
            for leaf in self.leaves
        ]
        return Nested(self.spec, tuple(leaves))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Nested)
            and self._hash == other._hash
            and self.leaves == other.leaves
            and self.spec == other.spec
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return _load, (pickle.dumps(self.spec), self.leaves)

    def __repr__(self) -> str:
        return repr(self.build([f"tensor {i}" for i in range(64)]))  # type: ignore[misc]


def take_apart(tree: Any, what: str) -> tuple[tuple[Tensor, ...], Nested]:
    """The distinct tensors of a pytree in the order of appearance, and its structure.

    `TypeError`, which begins with `what`, for leaves that cannot travel and for a tree without tensors.
    """
    positions: dict[int, int] = {}
    distinct: list[Tensor] = []
    # torch would give a Size back as a tuple.
    found, spec = pytree.tree_flatten(tree, lambda node: isinstance(node, torch.Size))
    leaves: list[int | Constant] = []
    for leaf in found:
        if isinstance(leaf, Tensor):
            position = positions.setdefault(id(leaf), len(distinct))
            if position == len(distinct):
                distinct.append(leaf)
            leaves.append(position)
        elif isinstance(leaf, _CONSTANTS):
            leaves.append(Constant(leaf))
        else:
            raise TypeError(
                f"{what} is of type {type(tree).__name__} and holds a {type(leaf).__name__}, which cannot "
                f"travel; {_instead(leaf)}"
            )
    if not distinct:
        raise TypeError(
            f"{what} is of type {type(tree).__name__} and holds no tensor; it must be a tensor, or a tuple, "
            "list, dict or other pytree with at least one"
        )
    return tuple(distinct), Nested(spec, tuple(leaves))


def _instead(leaf: Any) -> str:
    if dataclasses.is_dataclass(leaf):
        return (
            f"register it once, before the first step: torch.export.register_dataclass({type(leaf).__name__})"
        )
    return (
        "pass tensors in tuples, lists, dicts and what is registered with torch.utils._pytree, and beside "
        "them None, bools, numbers, strings, enums and dtypes; of a loader one mini-batch after another"
    )


def _is_number(leaf: int | Constant) -> bool:
    return isinstance(leaf, Constant) and type(leaf.value) in (int, float, complex)


def _load(spec: bytes, leaves: tuple[int | Constant, ...]) -> Nested:
    with warnings.catch_warnings():  # torch warns of a class that its own specs are made of
        warnings.simplefilter("ignore", FutureWarning)
        return Nested(pickle.loads(spec), leaves)


# Portals


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
    for layer, portals in zip(layers, portals_of(layers), strict=True):
        value = portals.around(layer)(value)
    return value


class Portals(NamedTuple):
    """The names of the portals that a layer stashes and pops, and of those that it takes and gives beside
    its value: they come from layers before, and are popped here or later.
    """

    stashes: tuple[str, ...]
    pops: tuple[str, ...]
    arriving: tuple[str, ...]
    leaving: tuple[str, ...]

    def around(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """The layer as it stands in the chain: with portals it takes and gives `(value, *tensors)`."""
        return partial(self._run, layer) if any(self) else layer

    def _run(self, layer: Callable[..., Any], given: Tree) -> Tree:
        value, *arrived = given if self.arriving else (given,)
        held: dict[str, Tensor] = dict(zip(self.arriving, arrived, strict=True))
        versions = {name: version(tensor) for name, tensor in held.items()}
        if self.pops:
            value = (value, *[held[name] for name in self.pops])
        value = layer(value)
        if self.stashes:
            value, *stashed = self._parted(value)
            held.update(zip(self.stashes, stashed, strict=True))
        for name in self.leaving:
            if name in versions and versions[name] != version(held[name]):
                raise RuntimeError(
                    f"the tensor of portal {name!r} was changed in place between the layers that stash and "
                    "pop it; use the out-of-place form of the operation (inplace=False)"
                )
        return (value, *[held[name] for name in self.leaving]) if self.leaving else value

    def _parted(self, value: Tree) -> Tree:
        """What a layer that stashes has given: its output, and a tensor for each name."""
        if not isinstance(value, tuple) or len(value) != 1 + len(self.stashes):
            what = f"{len(value)} values" if isinstance(value, tuple) else f"a {type(value).__name__}"
            raise TypeError(
                f"a layer that stashes portal {', '.join(map(repr, self.stashes))} gave {what}; it must give "
                f"a tuple of {1 + len(self.stashes)}: its output, and a tensor for each name"
            )
        for name, tensor in zip(self.stashes, value[1:], strict=True):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"portal {name!r} was given a {type(tensor).__name__}; a portal takes a tensor"
                )
        return value


def portals_of(layers: Iterable[nn.Module]) -> tuple[Portals, ...]:
    """The portals of each layer. `ValueError`, which names the portal, unless each is declared by layers
    themselves, stashed once, and popped by later layers only.
    """
    layers = tuple(layers)
    declared = [(_names(layer, "stashes"), _names(layer, "pops")) for layer in layers]
    home: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, (layer, (stashes, pops)) in enumerate(zip(layers, declared, strict=True)):
        for module in layer.modules():
            if module is not layer and isinstance(module, Stash | Pop):
                name = (*getattr(module, "stashes", ()), *getattr(module, "pops", ()))[0]
                raise ValueError(
                    f"portal {name!r} is declared inside of layer {index} ({type(layer).__name__}); a "
                    f"{type(module).__name__} must be a layer of the pipeline itself"
                )
        for name in pops:
            if name not in home:
                raise ValueError(f"layer {index} pops portal {name!r}, which no layer before it stashes")
            if pops.count(name) > 1:
                raise ValueError(f"layer {index} pops portal {name!r} more than once; it is given it once")
            last[name] = index
        for name in stashes:
            if name in home:
                raise ValueError(
                    f"portal {name!r} is stashed by layer {home[name]} and by layer {index}; give each a "
                    "name of its own"
                )
            home[name] = index
    for name, index in home.items():
        if name not in last:
            raise ValueError(f"layer {index} stashes portal {name!r}, which no later layer pops")
    return tuple(
        [
            Portals(
                *names,
                arriving=tuple([name for name in home if home[name] < index <= last[name]]),
                leaving=tuple([name for name in home if home[name] <= index < last[name]]),
            )
            for index, names in enumerate(declared)
        ]
    )


def _names(layer: nn.Module, attribute: str) -> tuple[str, ...]:
    names = getattr(layer, attribute, ())
    if isinstance(names, str):
        raise ValueError(
            f"{attribute} of a {type(layer).__name__} is {names!r}; give a tuple of names, ({names!r},)"
        )
    if isinstance(names, tuple | list) and all(isinstance(name, str) for name in names):
        return tuple(names)
    return ()  # something else of the user's that happens to be called so


def version(tensor: Tensor) -> int:
    """Version of the tensor, which changes when the tensor is overwritten; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version

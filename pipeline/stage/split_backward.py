"""Splits a backward: I computes the gradients that the stage before waits for, W those of the weights.

I passes through the graph once, and the graph is free afterwards. On the way it catches the gradients at the
operations whose weights can wait (`KINDS`) and leaves these weights out; W does the products that a whole
backward would have done there, and gives them to the engine at the weights' edges. What is of no such kind,
or is a sum over several uses of a weight, is computed in I and added in W. So the engine gets the same
numbers in the same order: the gradients are the same bits.

    x --linear--> a --norm--> b --linear--> y      I  gradients of b, a and x; those of y and a are caught for
          |            |           |                  W, those of the norm's weights come with a's
        weight       weight      weight            W  gradients of the linear weights; all are accumulated

Parameters change in W alone, with their hooks. A kind of node is known here if torch computes the gradient
of its weight apart from that of its input, by the same formula; normalizations get theirs from the pass that
the gradient of the input takes anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from .tensors import is_divided

aten = torch.ops.aten

Formula = Callable[[Tensor], tuple[Tensor, ...]]  # gradient of the output -> of the weight and of the bias

LEAF = "AccumulateGrad"
_ORDER = attrgetter("order")

# W lets the engine add gradients when it has this many: a pass costs 10 us, and memory is to be free again.
MANY_BYTES = 1 << 20

# Passes the gradients of edges through their graph, frees it and accumulates the gradients of all leaves.
# torch.autograd.backward calls this in the end; its own checks of gradient edges cost 30 us a time.
run_engine: Callable[..., tuple[Tensor | None, ...]] = partial(
    Variable._execution_engine.run_backward,
    keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True,
)  # fmt: skip


class Split:
    """The graph of a micro-batch, looked through for what I computes and what W does. It is `whole`, and
    cannot be split, where a layer is checkpointed in the reentrant way: its backward runs an engine of its
    own.
    """

    __slots__ = ("_entries", "_rest", "_waiting", "whole")

    def __init__(self, edges: Iterable[GradientEdge], entry: type) -> None:
        self.whole = False
        self._entries: list[Any] = []  # where the stage's inputs enter the graph, nodes of type `entry`
        self._rest: dict[Any, None] = {}  # leaves whose gradients I computes
        self._waiting: list[tuple[Any, Waiting]] = []  # operations that wait, and what is known of each
        self._walk([edge.node for edge in edges], entry)
        # An operation waits for its own weights alone: what several uses give is added up as the engine goes.
        uses = Counter(leaf for _, waiting in self._waiting for leaf in waiting.leaves)
        self._rest |= dict.fromkeys(leaf for leaf, number in uses.items() if number > 1)
        while leaving := [w for _, w in self._waiting if not self._rest.keys().isdisjoint(w.leaves)]:
            self._waiting = [(n, w) for n, w in self._waiting if w not in leaving]
            self._rest |= dict.fromkeys(leaf for w in leaving for leaf in w.leaves)

    def _walk(self, todo: list[Any], entry: type) -> None:
        seen: set[Any] = set()  # holds the nodes, too: without a holder their Python halves come and go
        while todo:
            node = todo.pop()
            while node is not None and node not in seen:
                seen.add(node)
                name = type(node).__name__
                following = node.next_functions
                if (kind := KINDS.get(name)) is not None:
                    waiting = _defer(node, kind, following)
                    if waiting is not None:
                        self._waiting.append((node, waiting))
                        todo += waiting.inputs
                        break
                elif name == LEAF:
                    self._rest[node] = None
                elif type(node) is entry:
                    self._entries.append(node)
                    break
                elif "Checkpoint" in name:
                    self.whole = True
                node = None
                for each, _ in following:  # most have one: no detour for it
                    if node is not None:
                        todo.append(node)
                    node = each

    def inputs(
        self, edges: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...], exits: list[Tensor | None]
    ) -> Weights:
        """I: fills `exits` with the gradients of the stage's inputs and returns what is left for W.

        The graph is free afterwards.
        """
        # Where the engine goes on, it would show a gradient before the tensor's hooks have run; there a hook
        # behind them catches it.
        last: list[Waiting] = []
        asked: list[Any] = []
        for node, waiting in self._waiting:
            if waiting.inputs:
                node.register_prehook(waiting.catch)
            else:
                last.append(waiting)
                asked.append(node)
        wanted = tuple([GradientEdge(node, 0) for node in (*asked, *self._entries, *self._rest)])
        with _hooks_set_aside(leaf.variable for leaf in self._rest):
            caught = iter(run_engine(edges, gradients, inputs=wanted, accumulate_grad=not wanted))
        for waiting in last:
            waiting.gradient = next(caught)
        for node in self._entries:
            exits[node.position] = next(caught)
        at_rest = wanted[len(wanted) - len(self._rest) :]
        done = [(edge, g) for edge, g in zip(at_rest, caught, strict=True) if g is not None]
        found = [waiting for _, waiting in self._waiting if waiting.gradient is not None]
        for waiting in found:
            waiting.hold()
        # W takes them from the end, so the latest operation is first here and what was caught last at hand.
        found.sort(key=_ORDER, reverse=True)
        return Weights(found, done)


@dataclass(slots=True, eq=False)
class Weights:
    """Operations that I leaves to W for one micro-batch; W takes them from the end."""

    waiting: list[Waiting]
    done: list[tuple[GradientEdge, Tensor]]  # gradients that I has computed

    @torch.no_grad()
    def accumulate(self) -> None:
        """W: the gradients of all parameters, let go of as they are added."""
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        num_bytes = 0
        while self.waiting:
            waiting = self.waiting.pop()  # caught last, so most likely still in a cache
            weight, *bias = waiting.edges
            found = waiting.gradients()
            # Autograd must not copy a divided one: torch 2.11 leaves the copy whole.
            edges += (_entrance(weight), *(map(_entrance, bias) if is_divided(found[-1]) else bias))
            gradients += found
            num_bytes += sum([gradient.nbytes for gradient in gradients[-len(waiting.edges) :]])
            if num_bytes > MANY_BYTES:
                run_engine(tuple(edges), tuple(gradients))
                edges, gradients, num_bytes = [], [], 0
        for edge, gradient in self.done:
            edges.append(_entrance(edge) if is_divided(gradient) else edge)
            gradients.append(gradient.clone() if is_divided(gradient) else gradient)
        self.done = []
        if edges:
            run_engine(tuple(edges), tuple(gradients))


@dataclass(slots=True, eq=False)
class Waiting:
    """An operation whose weights' gradients wait for W."""

    order: int  # the engine takes the operation with the largest number first
    edges: tuple[GradientEdge, ...]  # of weight and bias
    leaves: tuple[Any, ...]  # the parameters' nodes behind them
    inputs: list[Any]  # where the engine goes on from here; empty when I is over
    held: tuple[Tensor, ...]
    formula: Formula
    gradient: Tensor | None = None
    versions: tuple[int, ...] = ()

    def catch(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Hook of the operation; it is called after all hooks of the operation's output."""
        self.gradient = gradients[0]

    def hold(self) -> None:
        """Called when I is over: frees the graph, and guards the tensors that W needs against changes."""
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


def _entrance(edge: GradientEdge) -> GradientEdge:
    """The edge, such that a gradient new from its formula can become a parameter's `.grad` without a copy:
    autograd makes one while a caller holds the tensor itself, but not for a view of the tensor.
    """
    if type(edge.node).__name__ != LEAF:
        return edge
    parameter = edge.node.variable  # type: ignore[attr-defined]
    if parameter.grad is not None:
        return edge
    with torch.enable_grad():
        return GradientEdge(parameter.permute(*range(parameter.dim())).grad_fn, 0)


@contextmanager
def _hooks_set_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """The hooks of parameters run once, in W, though the engine would run them in I as well."""
    hooks: list[tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]] = [
        (parameter._backward_hooks, dict(parameter._backward_hooks))
        for parameter in parameters
        if parameter._backward_hooks
    ]
    for active, _ in hooks:
        active.clear()
    try:
        yield
    finally:
        for active, all_of_them in hooks:
            active.update(all_of_them)


def _defer(node: Any, kind: Operation, following: Sequence[tuple[Any, int]]) -> Waiting | None:
    """Returns what computes the gradients of a node's weights later; None if they cannot wait."""
    weight_at, bias_at = kind.weight, kind.bias
    weight = _leaf(following[weight_at][0])
    if weight is None:
        return None
    bias = None if bias_at is None else _leaf(following[bias_at][0])
    prepared = kind.prepare(node, bias is not None)
    if prepared is None:
        return None
    ours: tuple[int | None, ...] = (weight_at,) if bias is None else (weight_at, bias_at)
    return Waiting(
        node._sequence_nr(),
        tuple([GradientEdge(*following[place]) for place in ours if place is not None]),
        (weight,) if bias is None else (weight, bias),
        [each for place, (each, _) in enumerate(following) if each is not None and place not in ours],
        *prepared,
    )


def _leaf(node: Any) -> Any:
    """The parameter's node, if nothing but passages lies before it."""
    while node is not None and (name := type(node).__name__) != LEAF:
        node = node.next_functions[0][0] if name in PASSAGES else None
    return node


class Operation(NamedTuple):
    """A kind of node of the autograd graph.

    `weight` and `bias` are the places of its weight and bias among `next_functions`. `prepare`, given a node
    and whether its bias needs a gradient, returns the tensors to hold until the weights' turn and the formula
    over them; None where this node is not like the others of its kind.
    """

    weight: int
    bias: int | None
    prepare: Callable[[Any, bool], tuple[tuple[Tensor, ...], Formula] | None]


def _saved(node: Any, name: str) -> Tensor | None:
    """Returns a tensor that a node saved, without the graph; None if there is none, or none that can be held.
    Behind a hook a saved tensor may not exist: a checkpoint would compute it at every look.
    """
    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:
        return None
    tensor: Tensor | None = getattr(node, f"_saved_{name}")
    if tensor is None or tensor.layout is not torch.strided or tensor.is_complex():
        return None
    return tensor.detach()


def _matrix_product(name: str, node: Any, bias: bool) -> tuple[tuple[Tensor, ...], Formula] | None:
    """Of mm and addmm, which save their left factor as `name`. The gradient of the right factor is laid out
    like the factor, as torch does it.
    """
    left = _saved(node, name)
    if left is None or getattr(node, "_saved_alpha", 1) != 1 or getattr(node, "_saved_beta", 1) != 1:
        return None
    (rows, _), (down, across) = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    is_transposed = down == 1 and across == rows

    def formula(gradient: Tensor) -> tuple[Tensor, ...]:
        found = gradient.t().mm(left).t() if is_transposed else left.t().mm(gradient)
        # The engine sums a gradient over the dimensions along which its tensor was expanded.
        return (found, gradient) if bias else (found,)

    return (left,), formula


def _bmm(node: Any, bias: bool) -> tuple[tuple[Tensor, ...], Formula] | None:
    left = _saved(node, "self")
    if left is None:
        return None
    return (left,), lambda gradient: (left.transpose(1, 2).bmm(gradient),)


def _convolution(node: Any, bias: bool) -> tuple[tuple[Tensor, ...], Formula] | None:
    image, kernel = _saved(node, "input"), _saved(node, "weight")
    if image is None or kernel is None:
        return None
    options = (
        node._saved_bias_sym_sizes_opt, node._saved_stride, node._saved_padding, node._saved_dilation,
        node._saved_transposed, node._saved_output_padding, node._saved_groups, [False, True, bias],
    )  # fmt: skip

    def formula(gradient: Tensor) -> tuple[Tensor, ...]:
        _, *gradients = aten.convolution_backward(gradient, image, kernel, *options)
        return tuple(gradients) if bias else (gradients[0],)

    return (image,), formula


def _embedding(node: Any, bias: bool) -> tuple[tuple[Tensor, ...], Formula] | None:
    indices = _saved(node, "indices")
    if indices is None or node._saved_sparse:
        return None
    padding = node._saved_padding_idx
    options = (
        node._saved_weight_sym_argsize_0,
        padding if padding < 2**63 else padding - 2**64,  # it is read as unsigned, and none is -1
        node._saved_scale_grad_by_freq,
    )
    return (indices,), lambda gradient: (aten.embedding_dense_backward(gradient, indices, *options),)


KINDS: dict[str, Operation] = {
    "AddmmBackward0": Operation(weight=2, bias=0, prepare=partial(_matrix_product, "mat1")),
    "MmBackward0": Operation(weight=1, bias=None, prepare=partial(_matrix_product, "self")),
    "BmmBackward0": Operation(weight=1, bias=None, prepare=_bmm),
    "ConvolutionBackward0": Operation(weight=1, bias=2, prepare=_convolution),
    "EmbeddingBackward0": Operation(weight=0, bias=None, prepare=_embedding),
}

# What may stand between a parameter and the operation that it is the weight of: other shapes, copies and
# autocast's casts. They save no tensors; the engine passes them when W comes.
PASSAGES = frozenset(
    f"{name}Backward0"
    for name in (
        "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand",
        "Slice", "Select", "Split", "SplitWithSizes", "Clone", "ToCopy",
    )
)  # fmt: skip

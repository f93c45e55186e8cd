"""The two halves of a backward: I computes what the stage before waits for, W what only the optimizer needs.

I passes through the graph once, and the graph is free afterwards. On the way it catches the gradients at the
operations whose weights can wait (`deferrable`) and leaves these weights out; W does the same products that a
whole backward would have done there, and gives them to the engine at the weights' edges. What is not known
well enough is computed in I and added in W. So together they do a backward's work, and hand the engine the
same numbers in the same order: the gradients are the same bits.

    x --linear--> a --norm--> b --linear--> y      I  gradients of b, a and x; those of y and a are caught for
          |            |           |                  W, those of the norm's weights come with a's
        weight       weight      weight            W  gradients of the linear weights; all are accumulated

Parameters change in W alone, with their hooks, in the order in which the micro-batches take W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from gpipe_bench.pipeline.stage.deferrable import KINDS, PASSAGES, Kind
from gpipe_bench.pipeline.stage.waiting import LEAF, Waiting, Weights, run_engine

_ORDER = attrgetter("order")

# A weight that is used more often than this in a micro-batch, as in a recurrent network, would be held as
# often: the engine adds up its gradients as it goes.
_MOST_USES = 4


class Split:
    """The graph of a micro-batch, looked through for what I computes and what W does.

    `whole` says that it cannot be split at all: a layer is checkpointed in the reentrant way, whose backward
    runs an engine of its own.
    """

    __slots__ = ("_entries", "_nodes", "_rest", "_shared", "_waiting", "whole")

    def __init__(self, edges: Iterable[GradientEdge], entry: type) -> None:
        self.whole = False
        self._entries: list[Any] = []  # where the stage's inputs enter the graph, nodes of type `entry`
        self._rest: dict[Any, None] = {}  # leaves whose gradients I computes
        self._nodes: list[Any] = []  # operations that wait, and what is known of each
        self._waiting: list[Waiting] = []
        self._shared: set[Any] = set()  # leaves that several of them lead to
        self._walk([edge.node for edge in edges], entry)
        self._withdraw()

    def _walk(self, todo: list[Any], entry: type) -> None:
        seen: set[Any] = set()  # holds the nodes, too: without a holder their Python halves come and go
        leaves: set[Any] = set()
        while todo:
            node = todo.pop()
            while node is not None and node not in seen:
                seen.add(node)
                name = type(node).__name__
                following = node.next_functions
                if (kind := KINDS.get(name)) is not None:
                    waiting = _defer(node, kind, following)
                    if waiting is not None:
                        self._nodes.append(node)
                        self._waiting.append(waiting)
                        for leaf in waiting.leaves:
                            (self._shared if leaf in leaves else leaves).add(leaf)
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

    def _withdraw(self) -> None:
        """Leaves to I what cannot wait after all: weights that something else uses too, or with others.

        A sum of more than two depends on the order of its parts, so all parts have to come the way they come
        in a whole backward.
        """
        for leaf in self._shared:
            uses = [
                edge
                for w in self._waiting
                for edge, end in zip(w.edges, w.leaves, strict=True)
                if end is leaf
            ]
            if len(uses) > _MOST_USES or (len(uses) > 2 and not _arrive_in_turn(uses)):
                self._rest[leaf] = None
        while leaving := [w for w in self._waiting if not self._rest.keys().isdisjoint(w.leaves)]:
            stay = [(n, w) for n, w in zip(self._nodes, self._waiting, strict=True) if w not in leaving]
            self._nodes, self._waiting = [n for n, _ in stay], [w for _, w in stay]
            self._rest.update(dict.fromkeys(leaf for w in leaving for leaf in w.leaves))

    def inputs(
        self, edges: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...], exits: list[Tensor | None]
    ) -> Weights:
        """I: fills `exits` with the gradients of the stage's inputs and returns what is left for W.

        The graph is free afterwards.
        """
        # The engine goes where somebody asked, and shows a gradient there before the tensor's hooks have had
        # their say if it goes on; so where it goes on in any case, a hook behind them catches it.
        last: list[Waiting] = []
        asked: list[Any] = []
        for node, waiting in zip(self._nodes, self._waiting, strict=True):
            if waiting.inputs:
                node.register_prehook(waiting.catch)
            else:
                last.append(waiting)
                asked.append(node)
        wanted = tuple([GradientEdge(node, 0) for node in (*asked, *self._entries, *self._rest)])
        with _hooks_set_aside(leaf.variable for leaf in self._rest):
            caught = iter(run_engine(edges, gradients, wanted))
        for waiting in last:
            waiting.gradient = next(caught)
        for node in self._entries:
            exits[node.position] = next(caught)
        done = (
            [
                (edge, gradient)
                for edge, gradient in zip(wanted[-len(self._rest) :], caught, strict=True)
                if gradient is not None
            ]
            if self._rest
            else []
        )
        single: list[Waiting] = []
        shared: list[Waiting] = []
        for waiting in self._waiting:
            if waiting.gradient is not None:
                waiting.hold()
                (single if self._shared.isdisjoint(waiting.leaves) else shared).append(waiting)
        # W takes them from the end, so the latest operation is first here and what was caught last at hand.
        single.sort(key=_ORDER, reverse=True)
        shared.sort(key=_ORDER, reverse=True)
        return Weights(single, shared, done)


def _defer(node: Any, kind: Kind, following: Sequence[tuple[Any, int]]) -> Waiting | None:
    """What is needed to compute the gradients of a node's weights later; None if they cannot wait."""
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


def _arrive_in_turn(edges: list[GradientEdge]) -> bool:
    """Whether none of several gradients for one parameter comes in where another one passes by later.

    A gradient that enters directly would be there first, whatever its turn in a whole backward.
    """
    entrances = {edge.node for edge in edges}
    for entrance in entrances:
        node: Any = entrance
        while type(node).__name__ != LEAF:
            node = node.next_functions[0][0]
            if node in entrances:
                return False
    return True


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

"""Cutting the graph of a forward into consecutive parts, and making a layer of each.

What crosses a cut is what is computed before it and used behind it. A tensor that the next layers have no use
for goes past them, as a portal from the layer that makes or last uses it to the one that uses it next: each
hop is sent once, and gradients are added up as in the model. Sizes and other numbers do not travel: they are
read again, behind the cut, from a tensor that does. Parameters and buffers are read where they are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, fx, nn

from gpipe_bench.pipeline.model.kinds import surely_tensor
from gpipe_bench.pipeline.model.trace import Place, Trace, is_number
from gpipe_bench.pipeline.model.traced import Traced, program_of


def cuttable(trace: Trace) -> dict[Place, fx.Node]:
    """The calls before which the forward may be cut, in its order.

    Something must come before. And what is changed in place must be so in the part that made it: behind a cut
    it is another tensor than what the parts before it, or views of it, hold.
    """
    order = {node: i for i, node in enumerate(trace.graph.nodes)}
    forbidden: set[int] = set()
    for node, i in order.items():
        if (
            node.op == "call_method"
            and str(node.target).endswith("_")
            and not str(node.target).endswith("__")
        ):
            forbidden.update(range(order[node.all_input_nodes[0]] + 1, i + 1))
    first = next(i for node, i in order.items() if node.op not in ("placeholder", "get_attr"))
    places = sorted(trace.calls.items(), key=lambda call: (order[call[1]], call[0]))
    return {place: node for place, node in places if order[node] > first and order[node] not in forbidden}


class Piece(NamedTuple):
    """A part of a graph, which takes what it pops behind its other inputs, and gives what it stashes behind
    its other outputs.
    """

    graph: fx.Graph
    stashes: tuple[str, ...] = ()
    pops: tuple[str, ...] = ()


def parts_between(
    model: nn.Module,
    traces: Mapping[bool, Trace],
    starts: Mapping[bool, Sequence[fx.Node]],
    *,
    portals: bool = True,
) -> list[Traced]:
    """The layers that begin at the nodes `starts` of each mode's graph; the first begins with the inputs.
    Without `portals` all is passed from each to the next.
    """
    hops = {mode: _hops(model, trace, starts[mode]) if portals else {} for mode, trace in traces.items()}
    both = set(hops[True].values()) & set(hops[False].values())  # a layer declares the same in both modes
    pieces = {
        mode: _pieces(trace, starts[mode], {hop: name for hop, name in hops[mode].items() if name in both})
        for mode, trace in traces.items()
    }
    return [
        _traced(model, traces, {mode: pieces[mode][i] for mode in traces})
        for i in range(len(starts[True]) + 1)
    ]


Hop = tuple[fx.Node, int]
"""A value, and the piece that uses it next."""


def _hops(model: nn.Module, trace: Trace, starts: Sequence[fx.Node]) -> dict[Hop, str]:
    """The values that go past pieces, with the names of their portals: from which piece to which."""
    nodes = list(trace.graph.nodes)
    piece_of = _piece_of(nodes, starts)
    found: dict[Hop, str] = {}
    count: Counter[tuple[int, int]] = Counter()
    for node in nodes:
        users = sorted(_users(node, piece_of))
        if not users or not surely_tensor(model, node):
            continue
        for before, after in pairwise([piece_of[node], *users]):
            if after > before + 1:
                ends = before, after
                found[node, after] = f"value {count[ends]} of layer {before} for layer {after}"
                count[ends] += 1
    return found


def _users(node: fx.Node, piece_of: Mapping[fx.Node, int]) -> set[int]:
    """The later pieces that need a value to come: directly, or for a number that is read of it again."""
    if _anywhere(node):
        return set()
    found: set[int] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if is_number(user):
                todo.append(user)
            found.add(piece_of[user])
    return {piece for piece in found if piece > piece_of[node]}


def _piece_of(nodes: Sequence[fx.Node], starts: Sequence[fx.Node]) -> dict[fx.Node, int]:
    places = {node: i for i, node in enumerate(nodes)}
    bounds = [0, *(places[node] for node in starts), len(nodes)]
    return {node: i for i in range(len(bounds) - 1) for node in nodes[bounds[i] : bounds[i + 1]]}


def _traced(model: nn.Module, traces: Mapping[bool, Trace], pieces: Mapping[bool, Piece]) -> Traced:
    """One layer of its graph in each mode."""
    graphs = {mode: piece.graph for mode, piece in pieces.items()}
    names: dict[str, dict[str, str]] = {"call_module": {}, "get_attr": {}}
    constants: dict[str, Tensor] = {}
    for mode, graph in graphs.items():
        for node in graph.nodes:
            if node.target in traces[mode].constants:
                constant = traces[mode].constants[node.target]
                node.target = f"{node.target}, {'training' if mode else 'evaluation'}"
                constants[node.target] = constant
            elif node.op in names:
                names[node.op][node.target] = node.target
    programs = {mode: program_of(graph) for mode, graph in graphs.items()}
    stashes, pops = pieces[True].stashes, pieces[True].pops
    return Traced(
        model, programs, names["call_module"], tuple(names["get_attr"]), constants, stashes=stashes, pops=pops
    )


def _pieces(trace: Trace, starts: Sequence[fx.Node], hops: Mapping[Hop, str]) -> list[Piece]:
    """The graph cut before each of `starts`."""
    nodes = list(trace.graph.nodes)
    places = {node: i for i, node in enumerate(nodes)}
    bounds = [0, *(places[node] for node in starts), len(nodes)]
    piece_of = _piece_of(nodes, starts)
    users = {node: _users(node, piece_of) for node in nodes}
    # By the name of its portal: what goes past pieces, from where to where.
    flights = {
        name: (node, max([piece_of[node], *[u for u in users[node] if u < target]]), target)
        for (node, target), name in hops.items()
    }
    stashed = [sorted(n for n, (_, a, _) in flights.items() if a == i) for i in range(len(bounds) - 1)]
    popped = [sorted(n for n, (_, _, b) in flights.items() if b == i) for i in range(len(bounds) - 1)]
    needed = [_needed(i, piece_of) for i in range(len(bounds) - 1)]
    crossing: list[list[fx.Node]] = [[] for _ in bounds]  # crossing[i]: what piece i takes
    for i in range(1, len(bounds) - 1):
        later = set().union(*(tensors for tensors, _ in needed[i:]))
        flying = {node for node, source, target in flights.values() if source < i <= target}
        coming = (node for node in later if piece_of[node] < i and node not in flying)
        crossing[i] = sorted(coming, key=places.__getitem__)
    pieces = []
    for i in range(len(bounds) - 1):
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        own = nodes[bounds[i] : bounds[i + 1]]
        again = sorted(needed[i][1], key=places.__getitem__)
        for node in (*crossing[i], *[flights[name][0] for name in popped[i]]):
            made[node] = graph.placeholder(node.name)
        # A parameter may be read before the cut and used behind it.
        used = [node for node in own if not _anywhere(node) or i in {piece_of[user] for user in node.users}]
        for node in (*again, *used):
            if node.op != "output":
                made[node] = graph.node_copy(node, made.__getitem__)
        if i + 1 < len(bounds) - 1:
            given = tuple(made[node] for node in crossing[i + 1])
            output = given[0] if len(given) == 1 else given
            leaving = [made[flights[name][0]] for name in stashed[i]]
            graph.output((output, *leaving) if leaving else output)
        else:
            graph.output(fx.node.map_arg(own[-1].args[0], made.__getitem__))
        pieces.append(Piece(graph, tuple(stashed[i]), tuple(popped[i])))
    return pieces


def _anywhere(node: fx.Node) -> bool:
    """Whether a value needs not travel, because it can be had again."""
    return node.op == "get_attr" or is_number(node)


def _needed(piece: int, piece_of: Mapping[fx.Node, int]) -> tuple[set[fx.Node], set[fx.Node]]:
    """What a piece uses of those before it: tensors that must come, and what it can work out again."""
    tensors: set[fx.Node] = set()
    again: set[fx.Node] = set()
    todo = [source for node, place in piece_of.items() if place == piece for source in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if piece_of[node] >= piece or node in again or node in tensors:
            continue
        if _anywhere(node):
            again.add(node)
            todo += node.all_input_nodes
        else:
            tensors.add(node)
    return tensors, again

"""What a compiled layer costs in bytes: the story of its two graphs.

A compiler changes two things. Fewer tensors are kept from forward to backward: where a value is cheap to
compute again from what is kept anyway, torch's minimal cut does so. And fewer appear in between: an
element-wise operation runs inside the ones that read it. The first is torch's own decision and equals a real
compiled step to the byte (tests); the second is modelled: a tensor exists where an operation that is not
element-wise (a product, a convolution, a reduction, a copy for one of them) makes or reads it, or where it is
kept or returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.compiling.halves import Halves, base, is_view, tensor_of
from gpipe_bench.pipeline.memory.story import Story


def compiled_stories(
    graphs: Halves, inputs: Boundary, outputs: Boundary, unused: frozenset[int], *, with_shapes: bool = False
) -> tuple[Story, Story, Story]:
    """Forward without a graph, first and later backward, as `LayerProfile` has them.

    ``inputs`` and ``outputs`` are the layer's ends, ``unused`` the outputs that get no gradient. The stories
    keep the shapes of their storages if asked to.
    """
    fusible = _fusible()
    free, first, later = (_Teller(graphs, inputs, outputs, unused, fusible, with_shapes) for _ in range(3))
    return (
        free.tell(keeps=False, accumulates=False),
        first.tell(keeps=True, accumulates=False),
        later.tell(keeps=True, accumulates=True),
    )


def _fusible() -> Callable[[fx.Node], bool]:
    """Whether an operation can run inside those that read it."""
    from torch._functorch.partitioners import get_default_op_list

    kinds = get_default_op_list()

    def fusible(node: fx.Node) -> bool:
        made = tensor_of(node)
        if made is None or not kinds.is_fusible(node):
            return False
        read = [tensor_of(each) for each in node.all_input_nodes]
        # What has fewer elements than it reads is a reduction and ends a fused loop.
        return all(each is None or each.numel() <= made.numel() for each in read)

    return fusible


@dataclass
class _Teller:
    """Numbers the storages of both graphs and tells one story."""

    graphs: Halves
    inputs: Boundary
    outputs: Boundary
    unused: frozenset[int]
    fusible: Callable[[fx.Node], bool]
    with_shapes: bool
    sizes: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    numbers: dict[fx.Node, int | None] = field(default_factory=dict)

    def tell(self, *, keeps: bool, accumulates: bool) -> Story:
        graphs = self.graphs
        for node in graphs.weights:
            self.numbers[node] = None
        given = {position: self.new(node) for position, node in graphs.inputs.items()}
        inputs = tuple(given[first] for first in self.inputs.same_as)
        ends = [*graphs.outputs.values(), *(graphs.kept if keeps else ())]
        forward = tuple(self.follow(graphs.forward, ends, held=set(inputs)))
        first = {position: self.number(node) for position, node in graphs.outputs.items()}
        outputs = tuple(
            inputs[handed] if handed is not None else first[self.outputs.same_as[position]]
            for position, handed in enumerate(graphs.handed_on)
        )
        story = Story(
            sizes=(), inputs=inputs, outputs=outputs, kept=frozenset(), gradients=frozenset(),
            output_gradients=(None,) * len(outputs), input_gradients=(None,) * len(inputs), forward=forward,
            backward=(), without_gradient=frozenset(),
        )  # fmt: skip
        if keeps:
            return self.backward(story, accumulates)
        return replace(story, sizes=tuple(self.sizes), shapes=tuple(self.shapes) if self.with_shapes else ())

    def backward(self, story: Story, accumulates: bool) -> Story:
        graphs = self.graphs
        kept = [self.number(node) for node in graphs.kept]
        for node, number in zip(graphs.taken, kept, strict=True):
            self.numbers[node] = number
        tangents = {position: self.new(node) for position, node in graphs.tangents.items()}
        handed = {
            position: self.new_like(graphs.inputs[source])
            for position, source in enumerate(graphs.handed_on)
            if source is not None
            and position not in self.unused
            and self.outputs.tensors[position].requires_grad
            and self.outputs.same_as[position] == position
        }
        sent = {position: node for position, node in graphs.input_gradients.items() if node is not None}
        trained = [node for node in graphs.parameter_gradients if node is not None]
        events = list(self.follow(graphs.backward, [*sent.values(), *trained], held=set()))
        gradients = {self.number(node) for node in trained}
        returned: dict[int, int] = {position: self.number(node) for position, node in sent.items()}
        for position, tangent in handed.items():
            source = graphs.handed_on[position]
            assert source is not None, "it is handed on"
            if source in returned:  # added up by autograd, outside the graph
                part = returned[source]
                returned[source] = self.new_like(graphs.inputs[source])
                events.append(returned[source] + 1)
                if part not in returned.values():
                    events.append(-part - 1)
                events.append(-tangent - 1)
            else:
                returned[source] = tangent
        if accumulates:
            events += [-number - 1 for number in sorted(gradients)]
        known = {**tangents, **handed}
        return replace(
            story,
            sizes=tuple(self.sizes),
            shapes=tuple(self.shapes) if self.with_shapes else (),
            kept=frozenset(number for number in kept if number is not None),
            gradients=frozenset() if accumulates else frozenset(gradients),
            output_gradients=tuple(known.get(position) for position in range(len(self.outputs.tensors))),
            input_gradients=tuple(
                returned.get(position) if first == position else None
                for position, first in enumerate(self.inputs.same_as)
            ),
            backward=tuple(events),
            without_gradient=frozenset(
                position
                for position, first in enumerate(self.inputs.same_as)
                if self.inputs.tensors[position].requires_grad and first not in returned
            ),
        )

    def new(self, node: fx.Node) -> int:
        """A number for the storage that the node makes."""
        number = self.new_like(node)
        self.numbers[node] = number
        return number

    def new_like(self, node: fx.Node) -> int:
        tensor = tensor_of(node)
        assert tensor is not None, "only tensors have storages"
        self.sizes.append(tensor.numel() * tensor.itemsize)
        self.shapes.append((*map(int, tensor.shape), tensor.itemsize))
        return len(self.sizes) - 1

    def number(self, node: fx.Node) -> Any:
        """The number of the node's storage; None for that of a parameter or buffer."""
        return self.numbers[base(node)]

    def follow(self, graph: fx.Graph, ends: Iterable[fx.Node], held: set[int]) -> Iterator[int]:
        """The order in which storages of one graph appear and die; those of ``ends`` and ``held`` live on."""
        ends = list(ends)
        exists = self._materialized(graph, ends)
        reads: dict[fx.Node, set[fx.Node]] = {}
        last: dict[int, int] = {}
        made: list[tuple[int, int]] = []
        for place, node in enumerate(graph.nodes):
            if node.op == "placeholder":
                number = self.numbers.get(node)
                if number is not None:
                    last.setdefault(number, -1)
                continue
            if node.op != "call_function" or base(node) is not node:
                continue
            read: set[fx.Node] = set()
            for each in map(base, _inputs(node)):
                read |= {each} if each in exists or each.op != "call_function" else reads[each]
            if node in exists:
                made.append((place, self.new(node)))
                last[self.number(node)] = place
                for each in read:
                    number = self.numbers.get(each)
                    if number is not None:
                        last[number] = place
            else:
                reads[node] = read
        living = {self.numbers.get(base(node)) for node in ends} | held
        ending: dict[int, list[int]] = {}
        for number, place in last.items():
            if number not in living:
                ending.setdefault(place, []).append(number)
        yield from (-number - 1 for number in ending.get(-1, ()))
        for place, number in made:
            yield number + 1
            if place in ending:
                rest = ending.pop(place)
                yield from (-each - 1 for each in rest)

    def _materialized(self, graph: fx.Graph, ends: Iterable[fx.Node]) -> set[fx.Node]:
        """The nodes that make a storage."""
        found = {base(node) for node in ends}
        for node in graph.nodes:
            if node.op != "call_function" or is_view(node) or _is_item(node):
                continue
            if not self.fusible(node):
                if tensor_of(node) is not None:
                    found.add(node)
                found.update(base(each) for each in node.all_input_nodes if tensor_of(each) is not None)
        found.update(n for n in graph.nodes if n.op == "call_function" and _is_item(n) and base(n) is n)
        return {node for node in found if node.op == "call_function"}


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _inputs(node: fx.Node) -> Iterator[fx.Node]:
    """What an operation reads; one of several results reads what the operation does."""
    for each in node.all_input_nodes:
        if tensor_of(each) is None and each.op == "call_function":
            yield from _inputs(each)
        elif tensor_of(each) is not None:
            yield each

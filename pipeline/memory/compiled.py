"""What a compiled layer costs in bytes: its graph as a compiler cuts it, and the trace of the two graphs.

A compiler changes two things. Fewer tensors are kept from forward to backward: where a value is cheap to
compute again from what is kept anyway, torch's minimal cut does so. And fewer appear in between: an
element-wise operation runs inside the ones that read it. The first is torch's own decision and equals a real
compiled step to the byte (tests): `torch.compile` traces a layer's forward and backward together, takes the
operations apart into simple ones and decides what is kept; the same functions are called here, on fake
tensors and without compiling anything. The second is modelled: a tensor exists where an operation that is not
element-wise (a product, a convolution, a reduction, a copy for one of them) makes or reads it, or where it is
kept or returned.

Everything of torch that is private or takes long to import is imported when a layer is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import Tensor, fx, nn

from gpipe_bench.pipeline.memory.boundary import Boundary, as_tuple
from gpipe_bench.pipeline.memory.trace import Trace

_VIEWS = frozenset(("_unsafe_view", "reshape", "lift_fresh", "expand"))
"""Operations whose result lies in the storage of their input although their schema does not say so, or not
in every release."""


@dataclass(frozen=True)
class Graphs:
    """The two graphs of a layer, and which of their nodes are what.

    Positions are those of `Boundary.tensors`. An output that is an input, handed on, is in no graph:
    ``handed_on`` gives the input's position, for others None.
    """

    forward: fx.Graph
    backward: fx.Graph
    weights: tuple[fx.Node, ...]  # parameters and buffers, in the forward graph
    inputs: dict[int, fx.Node]  # by position, a tensor that stands twice once
    outputs: dict[int, fx.Node]  # by position, without those that are handed on
    handed_on: tuple[int | None, ...]
    kept: tuple[fx.Node, ...]  # in the forward graph, what the backward graph takes ...
    taken: tuple[fx.Node, ...]  # ... and these are the same in the backward graph
    tangents: dict[int, fx.Node]  # gradients of outputs, by position
    parameter_gradients: tuple[fx.Node | None, ...]
    input_gradients: dict[int, fx.Node | None]  # by position


def graphs_of(
    layer: nn.Module,
    inputs: Boundary,
    unused: frozenset[int] = frozenset(),
    precision: AbstractContextManager[object] | None = None,
) -> Graphs | None:
    """The graphs of a layer, whose parameters are fake tensors; call it under their fake mode.

    None where there is nothing to differentiate, or where an output is a view of an input, which no compiled
    graph returns. ``unused`` are positions of outputs that get no gradient; ``precision`` is entered around
    the forward. Raises ValueError for a layer that returns several views of one tensor.
    """
    import_module("torch._inductor.compile_fx")  # the decompositions look into its lowerings
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch.func import functional_call

    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    num_weights = len(parameters) + len(buffers)
    leaves = [
        inputs.tensors[p].empty().requires_grad_(inputs.tensors[p].requires_grad) for p in inputs.distinct
    ]
    place = {position: index for index, position in enumerate(inputs.distinct)}
    handed_on: list[int | None] = []
    returned: list[int] = []
    followed: list[int] = []  # of these, what needs a gradient
    parts: list[fx.Graph] = []
    num_outputs = 0

    def run(weights: list[Tensor], held: list[Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
        names = dict(zip(parameters, weights, strict=True))
        # Copies, so that a layer that counts its calls or follows statistics writes to no input of the graph.
        state = {name: buffer.clone() for name, buffer in zip(buffers, held, strict=True)}
        every = [tensors[place[first]] for first in inputs.same_as]
        with precision if precision is not None else nullcontext():
            result = functional_call(layer, {**names, **state}, (inputs.build(every),))
        found = {id(t): position for position, t in zip(inputs.distinct, tensors, strict=True)}
        handed_on[:] = [found.get(id(tensor)) for tensor in as_tuple(result)]
        made: dict[int, Tensor] = {}
        returned.clear()
        for position, (tensor, source) in enumerate(zip(as_tuple(result), handed_on, strict=True)):
            if source is None and id(tensor) not in made:
                made[id(tensor)] = tensor
                returned.append(position)
        outputs = [t.detach() if p in unused else t for p, t in zip(returned, made.values(), strict=True)]
        followed[:] = [p for p, t in zip(returned, outputs, strict=True) if t.requires_grad]
        return tuple(outputs)

    def cut(joint: fx.GraphModule, traced: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        nonlocal num_outputs
        halves = min_cut_rematerialization_partition(
            joint,
            traced,
            compiler="inductor",
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=list(range(num_weights)),
        )
        parts[:], num_outputs = [half.graph for half in halves], num_fwd_outputs
        raise _EndOfTracing

    traced = aot_function(
        run, fw_compiler=nop, bw_compiler=nop, partition_fn=cut, decompositions=select_decomp_table()
    )
    with suppress(_EndOfTracing):
        traced(list(parameters.values()), list(buffers.values()), leaves)
    if not parts:
        return None
    forward, backward = parts
    outputs, kept = _results(forward)[:num_outputs], _results(forward)[num_outputs:]
    placeholders, taken = forward.find_nodes(op="placeholder"), backward.find_nodes(op="placeholder")
    tangents = [node for node in taken if "tangents" in str(node.target)]
    given, gradients = placeholders[num_weights:], _results(backward)
    if any(_base(node) in given for node in outputs):
        return None
    if len(outputs) != len(returned) or len(tangents) != len(followed):
        raise ValueError(
            f"layer {type(layer).__name__} returns several views of one tensor, which the model of compiled "
            "layers cannot follow: let it return copies, or leave it uncompiled"
        )
    return Graphs(
        forward=forward,
        backward=backward,
        weights=tuple(placeholders[:num_weights]),
        inputs=dict(zip(inputs.distinct, given, strict=True)),
        outputs=dict(zip(returned, outputs, strict=True)),
        handed_on=tuple(handed_on),
        kept=tuple(kept),
        taken=tuple(node for node in taken if node not in tangents),
        tangents=dict(zip(followed, tangents, strict=True)),
        parameter_gradients=tuple(gradients[: len(parameters)]),
        input_gradients=dict(zip(inputs.distinct, gradients[num_weights:], strict=True)),
    )


class _EndOfTracing(Exception):  # noqa: N818  # no error: it ends the tracing once the graph is cut
    pass


def compiled_traces(
    graphs: Graphs, inputs: Boundary, outputs: Boundary, unused: frozenset[int], *, with_shapes: bool = False
) -> tuple[Trace, Trace, Trace]:
    """Forward without a graph, first and later backward, as `LayerProfile` has them.

    ``inputs`` and ``outputs`` are the layer's ends, ``unused`` the outputs that get no gradient. The traces
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
        made = _tensor_of(node)
        if made is None or not kinds.is_fusible(node):
            return False
        read = [_tensor_of(each) for each in node.all_input_nodes]
        # What has fewer elements than it reads is a reduction and ends a fused loop.
        return all(each is None or each.numel() <= made.numel() for each in read)

    return fusible


@dataclass
class _Teller:
    """Numbers the storages of both graphs and tells one trace."""

    graphs: Graphs
    inputs: Boundary
    outputs: Boundary
    unused: frozenset[int]
    fusible: Callable[[fx.Node], bool]
    with_shapes: bool
    sizes: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    numbers: dict[fx.Node, int | None] = field(default_factory=dict)

    def tell(self, *, keeps: bool, accumulates: bool) -> Trace:
        graphs, ends = self.graphs, self.inputs
        self.numbers.update(dict.fromkeys(graphs.weights))
        given = {position: self.new(node) for position, node in graphs.inputs.items()}
        inputs = tuple(given[first] for first in ends.same_as)
        alive = [*graphs.outputs.values(), *(graphs.kept if keeps else ())]
        forward = tuple(self.follow(graphs.forward, alive, held=set(inputs)))
        first = {position: self.number(node) for position, node in graphs.outputs.items()}
        outputs = tuple(
            inputs[handed] if handed is not None else first[self.outputs.same_as[position]]
            for position, handed in enumerate(graphs.handed_on)
        )
        kept = [self.number(node) for node in graphs.kept] if keeps else []
        sent_back, returned = dict[int, int](), dict[int, int]()  # gradients of outputs, and of inputs
        trained, backward = set[int](), tuple[int, ...]()
        if keeps:
            self.numbers.update(zip(graphs.taken, kept, strict=True))
            backward = tuple(self.back(sent_back, returned, trained))
        if accumulates:
            backward += tuple(-number - 1 for number in sorted(trained))
        return Trace(
            sizes=tuple(self.sizes),
            inputs=inputs,
            outputs=outputs,
            kept=frozenset(number for number in kept if number is not None),
            gradients=frozenset() if accumulates else frozenset(trained),
            output_gradients=tuple(map(sent_back.get, range(len(outputs)))),
            input_gradients=tuple(
                returned.get(position) if same == position else None
                for position, same in enumerate(ends.same_as)
            ),
            forward=forward,
            backward=backward,
            without_gradient=frozenset(
                position
                for position, same in enumerate(ends.same_as)
                if keeps and ends.tensors[position].requires_grad and same not in returned
            ),
            shapes=tuple(self.shapes) if self.with_shapes else (),
        )

    def back(self, sent_back: dict[int, int], returned: dict[int, int], trained: set[int]) -> Iterator[int]:
        """The backward; fills in the gradients of outputs, inputs and parameters."""
        graphs = self.graphs
        sent_back |= {position: self.new(node) for position, node in graphs.tangents.items()}
        handed = {
            position: self.new_like(graphs.inputs[source])
            for position, source in enumerate(graphs.handed_on)
            if source is not None
            and position not in self.unused
            and self.outputs.tensors[position].requires_grad
            and self.outputs.same_as[position] == position
        }
        sent_back |= handed
        sent = {position: node for position, node in graphs.input_gradients.items() if node is not None}
        gradients = [node for node in graphs.parameter_gradients if node is not None]
        yield from self.follow(graphs.backward, [*sent.values(), *gradients], held=set())
        trained.update(map(self.number, gradients))
        returned |= {position: self.number(node) for position, node in sent.items()}
        for position, tangent in handed.items():
            source = graphs.handed_on[position]
            assert source is not None, "it is handed on"
            if source in returned:  # added up by autograd, outside the graph
                part = returned[source]
                returned[source] = self.new_like(graphs.inputs[source])
                yield returned[source] + 1
                if part not in returned.values():
                    yield -part - 1
                yield -tangent - 1
            else:
                returned[source] = tangent

    def new(self, node: fx.Node) -> int:
        """A number for the storage that the node makes."""
        number = self.new_like(node)
        self.numbers[node] = number
        return number

    def new_like(self, node: fx.Node) -> int:
        tensor = _tensor_of(node)
        assert tensor is not None, "only tensors have storages"
        self.sizes.append(tensor.numel() * tensor.itemsize)
        self.shapes.append((*map(int, tensor.shape), tensor.itemsize))
        return len(self.sizes) - 1

    def number(self, node: fx.Node) -> Any:
        """The number of the node's storage; None for that of a parameter or buffer."""
        return self.numbers[_base(node)]

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
            if node.op != "call_function" or _base(node) is not node:
                continue
            read: set[fx.Node] = set()
            for each in map(_base, _inputs(node)):
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
        living = {self.numbers.get(_base(node)) for node in ends} | held
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
        found = {_base(node) for node in ends}
        for node in graph.nodes:
            if node.op != "call_function" or _is_view(node) or _is_item(node):
                continue
            if not self.fusible(node):
                if _tensor_of(node) is not None:
                    found.add(node)
                found.update(_base(each) for each in node.all_input_nodes if _tensor_of(each) is not None)
        found.update(n for n in graph.nodes if n.op == "call_function" and _is_item(n) and _base(n) is n)
        return {node for node in found if node.op == "call_function"}


# What is known of a node


def _base(node: fx.Node) -> fx.Node:
    """The node that made the storage in which this one's tensor lies."""
    while node.op == "call_function":
        if _is_item(node):
            source = node.args[0]
            if not (isinstance(source, fx.Node) and _is_view(source)):
                return node
            node = source
        elif not _is_view(node):
            return node
        source = node.args[0]
        assert isinstance(source, fx.Node), "a view is a view of something"
        node = source
    return node


def _is_view(node: fx.Node) -> bool:
    """Whether the operation makes no storage of its own."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    return _name(node) in _VIEWS or any(
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    )


def _is_item(node: fx.Node) -> bool:
    return _name(node) == "getitem"


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "_overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _tensor_of(node: fx.Node) -> Tensor | None:
    """The fake tensor that stands for the node's result, None where that is no single tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def _inputs(node: fx.Node) -> Iterator[fx.Node]:
    """What an operation reads; one of several results reads what the operation does."""
    for each in node.all_input_nodes:
        if _tensor_of(each) is None and each.op == "call_function":
            yield from _inputs(each)
        elif _tensor_of(each) is not None:
            yield each


def _results(graph: fx.Graph) -> list[Any]:
    (end,) = graph.find_nodes(op="output")
    return list(end.args[0])

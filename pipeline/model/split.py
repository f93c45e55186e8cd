"""Any module as a sequence of layers, cut where it is told to or where it balances.

The forward is traced twice, in training and in evaluation mode, because what it does between its modules may
depend on the mode; a layer follows its own.

What crosses a cut is what is computed before it and used behind it; a tensor that the next layer has no use
for is passed on by it. Sizes and other numbers do not travel: they are
read again, behind the cut, from a tensor that does. Parameters and buffers are read where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from ..memory.profile import layer_costs
from ..plan.partition import partition
from ..stage.trees import Tree
from .parts import OwnLayers, Part
from .trace import Call, Tracer, inputs_of, is_number, trace


def split(
    model: nn.Module,
    at: Sequence[str] | None = None,
    *,
    num_layers: int | None = None,
    inputs: Sequence[str] | None = None,
    example: Tree | None = None,
) -> OwnLayers:
    """A model as the layers that a `Pipeline` takes, with what is alive at a cut passed from one to the next.

    Args:
        model: any module whose forward takes tensors. It is not changed, and shares its modules with the
            layers: what is trained is the model. Parameters and buffers keep their names.
        at: names of modules in the model, before whose first calls it is cut. Only what contains these
            modules is looked into; everything else stays as it is.
        num_layers: instead of `at`: how many layers to cut it into, balanced by parameters, or by what the
            parts cost on `example`.
        inputs: which arguments of the model's forward a batch holds, in its order: a tensor for one, a tuple
            for several. Default: those that have no default.
        example: a micro-batch, also on the meta device.

    `ValueError` if a name is not a module or is not called, and where the forward to be cut does what a graph
    cannot hold, with what to do then.
    """
    if (at is None) == (num_layers is None):
        raise ValueError("give either at=, the names of modules to cut before, or num_layers=")
    if at is not None and example is not None:
        raise ValueError("example= is for balancing, with num_layers=; at= says where the cuts are")
    names = inputs_of(model, inputs)
    opened = None if at is None else _around(model, at)
    traces = {mode: trace(model, names, opened, mode) for mode in (True, False)}
    if at is not None:
        places = _named(traces, at)
    else:
        assert num_layers is not None
        places = _balanced(model, traces, num_layers, example)
    return _layers(model, traces, places)


# Where to cut


def _around(model: nn.Module, at: Sequence[str]) -> set[str]:
    """Returns the names of all modules that contain one of the modules `at`."""
    if isinstance(at, str) or not at or len(set(at)) < len(at):
        raise ValueError(f"at is {at!r}; give names of modules, each once")
    known = dict(model.named_modules())
    for name in at:
        if not name or name not in known:
            some = ", ".join(list(known)[1:9])
            raise ValueError(f"the model has no module {name!r}; it has {some} and so on (named_modules)")
    return {name[:i] for name in at for i, letter in enumerate(name) if letter == "."}


def _named(traces: Mapping[bool, Tracer], at: Sequence[str]) -> list[Call]:
    """The first calls of these modules, in the order of the forward."""
    for found in traces.values():
        for name in at:
            if (name, 0) not in found.calls:
                raise ValueError(f"module {name!r} is not called by itself in the forward; cut at another")
            if (name, 0) not in _cuttable(found):
                raise ValueError(
                    f"the forward cannot be cut before {name!r}: nothing is computed before it, or a value "
                    "from before it is changed in place behind it, where it may have another name; cut "
                    "elsewhere"
                )
    places = list(_cuttable(traces[True]))
    return sorted([(name, 0) for name in at], key=places.index)


def _balanced(
    model: nn.Module, traces: Mapping[bool, Tracer], num_layers: int, example: Tree | None
) -> list[Call]:
    """Where to cut into layers of which the largest is smallest."""
    places: list[Call] = []
    order = {place: i for i, place in enumerate(_cuttable(traces[False]))}
    nodes = set()
    for place, node in _cuttable(traces[True]).items():
        if node not in nodes and place in order and (not places or order[place] > order[places[-1]]):
            places.append(place)
            nodes.add(node)
    if not 1 <= num_layers <= len(places) + 1:
        raise ValueError(
            f"num_layers is {num_layers}, but this model can be cut into 1 to {len(places) + 1} layers; what "
            "is not looked into stays in one piece"
        )
    pieces = list(_layers(model, traces, places))
    if example is None:
        costs = [1.0 + sum(parameter.numel() for parameter in piece.parameters()) for piece in pieces]
    else:
        costs = list(layer_costs(pieces, example))
    return [places[span.start - 1] for span in partition(costs, num_layers)[1:]]


def _cuttable(trace: Tracer) -> dict[Call, fx.Node]:
    """The calls before which the forward may be cut, in its order.

    Something must come before. And what is changed in place must be so in the part that made it: behind a cut
    it is another tensor than what the parts before it, or views of it, hold.
    """
    order = {node: i for i, node in enumerate(trace.graph.nodes)}
    forbidden: set[int] = set()
    for node, i in order.items():
        name = str(node.target)
        if node.op == "call_method" and name.endswith("_") and not name.endswith("__"):
            forbidden.update(range(order[node.all_input_nodes[0]] + 1, i + 1))
    first = next(i for node, i in order.items() if node.op not in ("placeholder", "get_attr"))
    places = sorted(trace.calls.items(), key=lambda call: (order[call[1]], call[0]))
    return {place: node for place, node in places if order[node] > first and order[node] not in forbidden}


# The layers between the cuts


def _layers(model: nn.Module, traces: Mapping[bool, Tracer], places: Sequence[Call]) -> OwnLayers:
    """The layers that begin at these calls; the first begins with the inputs."""
    pieces = {mode: _Cut(found, places).pieces() for mode, found in traces.items()}
    titles = [name if call == 0 else f"{name}, call {call + 1}" for name, call in places]
    titles.insert(0, f"what comes before {titles[0]}" if titles else "the model")
    layers: dict[str, Part] = {}
    for title, both_modes in zip(titles, zip(*pieces.values(), strict=True), strict=True):
        graphs, constants = dict[bool, fx.Graph](), dict[str, Tensor]()
        for mode, graph in zip(pieces, both_modes, strict=True):
            graphs[mode] = graph
            for node in graph.nodes:
                if node.op == "get_attr" and node.target in traces[mode].constants:
                    constant = traces[mode].constants[node.target]
                    node.target = f"{node.target}, {'training' if mode else 'evaluation'}"
                    constants[node.target] = constant
        layers[title] = Traced(model, graphs, constants)
    return OwnLayers(model, layers)


class _Cut:
    """The graph of one mode, cut before some calls into pieces with numbers."""

    def __init__(self, trace: Tracer, starts: Sequence[Call]) -> None:
        nodes = list(trace.graph.nodes)
        self._order = {node: i for i, node in enumerate(nodes)}
        bounds = [0, *(self._order[trace.calls[place]] for place in starts), len(nodes)]
        self._own = [nodes[start:stop] for start, stop in pairwise(bounds)]
        self._piece_of = {node: i for i, own in enumerate(self._own) for node in own}

    def pieces(self) -> list[fx.Graph]:
        """A graph for each piece, which takes what the one before it gives."""
        numbers = range(len(self._own))
        needed = [self._needed(i) for i in numbers]
        crossing: list[list[fx.Node]] = [[]]  # crossing[i]: what piece i takes
        for i in numbers[1:]:
            later = set().union(*(tensors for tensors, _ in needed[i:]))
            coming = (node for node in later if self._piece_of[node] < i)
            crossing.append(sorted(coming, key=self._order.__getitem__))
        pieces = []
        for i, own in enumerate(self._own):
            graph = fx.Graph()
            made: dict[fx.Node, fx.Node] = {}
            for node in crossing[i]:
                made[node] = graph.placeholder(node.name)
            again = sorted(needed[i][1], key=self._order.__getitem__)
            # A parameter may be read before the cut and used behind it.
            used = [n for n in own if not _anywhere(n) or i in {self._piece_of[user] for user in n.users}]
            for node in (*again, *used):
                if node.op != "output":
                    made[node] = graph.node_copy(node, made.__getitem__)
            if i < numbers[-1]:
                given = tuple(made[node] for node in crossing[i + 1])
                graph.output(given[0] if len(given) == 1 else given)
            else:
                graph.output(fx.node.map_arg(own[-1].args[0], made.__getitem__))
            pieces.append(graph)
        return pieces

    def _needed(self, piece: int) -> tuple[set[fx.Node], set[fx.Node]]:
        """Returns what a piece needs of earlier pieces: tensors to receive, and nodes to compute again."""
        tensors: set[fx.Node] = set()
        again: set[fx.Node] = set()
        todo = [source for node in self._own[piece] for source in node.all_input_nodes]
        while todo:
            node = todo.pop()
            if self._piece_of[node] >= piece or node in again or node in tensors:
                continue
            if _anywhere(node):
                again.add(node)
                todo += node.all_input_nodes
            else:
                tensors.add(node)
        return tensors, again


def _anywhere(node: fx.Node) -> bool:
    """Whether a value needs not travel, because it can be had again."""
    return node.op == "get_attr" or is_number(node)


# A layer between cuts


class Traced(Part):
    """A piece of a graph, its steps one after the other: takes and gives what crosses the cuts, a tensor or a
    tuple of tensors. The steps are data, so that the layer can be copied, pickled and sent like any other; a
    value is let go after its last use, as in the forward that the graph was made of.

    Args:
        model: the model.
        graphs: what to do in training mode and in evaluation mode; placeholders come first.
        constants: tensors that the forward makes out of nothing, by what the graphs call them.
    """

    def __init__(
        self,
        model: nn.Module,
        graphs: Mapping[bool, fx.Graph],
        constants: Mapping[str, Tensor],
    ) -> None:
        nodes = [node for graph in graphs.values() for node in graph.nodes]
        super().__init__(model, {str(n.target): str(n.target) for n in nodes if n.op == "call_module"})
        for name in dict.fromkeys([str(node.target) for node in nodes if node.op == "get_attr"]):
            if name not in constants:
                self.hold(model, name)
        for name, tensor in constants.items():
            self._buffers[name] = tensor
            self._non_persistent_buffers_set.add(name)
        self._programs = {mode: _program_of(graph) for mode, graph in graphs.items()}
        self._constants = tuple(constants)

    def held(self) -> Iterable[str]:
        return [name for name in super().held() if name not in self._constants]

    def forward(self, value: Any) -> Any:
        program = self._programs[self.training]
        values = [value] if isinstance(value, Tensor) else list(value)
        if len(values) != program.num_inputs:
            raise ValueError(
                f"{len(values)} tensors came where {program.num_inputs} were expected; the first layer takes "
                "one for each of the inputs that split was given"
            )
        values += [None] * len(program.steps)
        del value

        def filled(part: Any) -> Any:
            return values[part] if type(part) is _Slot else part

        for result, (kind, target, arguments, keywords, done) in enumerate(program.steps, program.num_inputs):
            given, named = _mapped(arguments, filled), _mapped(keywords, filled)
            if kind == "call_module":
                values[result] = self._modules[target](*given, **named)  # type: ignore[misc]
            elif kind == "call_function":
                values[result] = target(*given, **named)
            elif kind == "call_method":
                values[result] = getattr(given[0], target)(*given[1:], **named)
            else:
                table = self._parameters if target in self._parameters else self._buffers
                values[result] = table[target]
            del given, named
            for index in done:
                values[index] = None
        return _mapped(program.output, filled)


class _Slot(int):
    """Where a value of a program is kept: the inputs first, then what each step gives."""


class _TracedStep(NamedTuple):
    """One call of a traced forward: the callee, its arguments, and the slots that are freed afterwards."""

    kind: str  # as fx calls it: call_module, call_function, call_method or get_attr
    target: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    done: tuple[int, ...]


class _Program(NamedTuple):
    """The steps of a graph."""

    num_inputs: int
    steps: tuple[_TracedStep, ...]
    output: Any


def _program_of(graph: fx.Graph) -> _Program:
    nodes = list(graph.nodes)
    slots = {node: _Slot(i) for i, node in enumerate(nodes[:-1])}
    last_use = {source: node for node in nodes for source in node.all_input_nodes}
    num_inputs = sum(node.op == "placeholder" for node in nodes)

    def plain(part: Any) -> Any:
        return slots[part] if isinstance(part, fx.Node) else part

    steps = []
    for node in nodes[num_inputs:-1]:
        done = [slots[source] for source in node.all_input_nodes if last_use[source] is node]
        if node not in last_use:
            done.append(slots[node])
        arguments, keywords = _mapped(node.args, plain), _mapped(node.kwargs, plain)
        steps.append(_TracedStep(node.op, node.target, arguments, keywords, tuple(done)))
    return _Program(num_inputs, tuple(steps), _mapped(nodes[-1].args[0], plain))


def _mapped(structure: Any, function: Callable[[Any], Any]) -> Any:
    """A structure of fx in Python's own containers, with what `function` makes of its leaves."""
    if isinstance(structure, tuple):
        return tuple([_mapped(part, function) for part in structure])
    if isinstance(structure, list):
        return [_mapped(part, function) for part in structure]
    if isinstance(structure, dict):
        return {key: _mapped(part, function) for key, part in structure.items()}
    if isinstance(structure, slice):
        return slice(*[_mapped(part, function) for part in (structure.start, structure.stop, structure.step)])
    return function(structure)

"""A layer that is a piece of a graph: its steps one after the other.

The steps are data, so that the layer can be copied, pickled and sent like any other; a value is let go after
its last use, as in the forward that the graph was made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from gpipe_bench.pipeline.model.parts import Part


class Traced(Part):
    """Takes and gives what crosses the cuts of a graph, a tensor or a tuple of tensors.

    Args:
        model: the model.
        graphs: what to do in training mode and in evaluation mode; placeholders come first.
        constants: tensors that the forward makes out of nothing, by what the graphs call them.
        stashes, pops: portals that it gives behind its other outputs, and takes behind its other inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        graphs: Mapping[bool, fx.Graph],
        constants: Mapping[str, Tensor],
        *,
        stashes: tuple[str, ...] = (),
        pops: tuple[str, ...] = (),
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
        self.stashes, self.pops = stashes, pops
        self._constants = tuple(constants)

    def held(self) -> Iterable[str]:
        return [name for name in super().held() if name not in self._constants]

    def forward(self, value: Any) -> Any:
        program = self._programs[self.training]
        popped: list[Any] = []
        if self.pops:
            value, *popped = value
        values = [value] if isinstance(value, Tensor) else list(value)
        values += popped
        del popped
        if len(values) != program.num_inputs:
            raise ValueError(
                f"{len(values)} tensors came where {program.num_inputs} were expected; the first layer takes "
                "one for each of the inputs that split was given"
            )
        values += [None] * (program.num_slots - len(values))
        del value
        for kind, target, arguments, keywords, result, done in program.steps:
            given = _filled(arguments, values)
            named = _filled(keywords, values) if keywords else keywords
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
        return _filled(program.output, values)


class _Slot(int):
    """Where a value of a program is kept."""


class _Step(NamedTuple):
    """What is called, with what, and which slots are empty then."""

    kind: str  # as fx calls it: call_module, call_function, call_method or get_attr
    target: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: int
    done: tuple[int, ...]


class _Program(NamedTuple):
    """The steps of a graph; the inputs are in the first slots."""

    num_inputs: int
    num_slots: int
    steps: tuple[_Step, ...]
    output: Any


def _program_of(graph: fx.Graph) -> _Program:
    nodes = list(graph.nodes)
    slots = {node: _Slot(i) for i, node in enumerate(nodes[:-1])}
    last_use = {source: node for node in nodes for source in node.all_input_nodes}
    inputs = [node for node in nodes if node.op == "placeholder"]
    steps = []
    for node in nodes[len(inputs) : -1]:
        done = [slots[source] for source in node.all_input_nodes if last_use[source] is node]
        if node not in last_use:
            done.append(slots[node])
        arguments, keywords = _plain(node.args, slots), _plain(node.kwargs, slots)
        steps.append(_Step(node.op, node.target, arguments, keywords, slots[node], tuple(done)))
    return _Program(len(inputs), len(slots), tuple(steps), _plain(nodes[-1].args[0], slots))


def _plain(structure: Any, slots: Mapping[fx.Node, _Slot]) -> Any:
    """A structure of fx in Python's own containers, with slots for nodes."""
    if isinstance(structure, fx.Node):
        return slots[structure]
    if isinstance(structure, tuple):
        return tuple(_plain(part, slots) for part in structure)
    if isinstance(structure, list):
        return [_plain(part, slots) for part in structure]
    if isinstance(structure, dict):
        return {key: _plain(part, slots) for key, part in structure.items()}
    if isinstance(structure, slice):
        return slice(*(_plain(part, slots) for part in (structure.start, structure.stop, structure.step)))
    return structure


def _filled(structure: Any, values: list[Any]) -> Any:
    """Such a structure with the values of its slots. Exact types, because every step does this."""
    kind = type(structure)
    if kind is _Slot:
        return values[structure]
    if kind is tuple:
        return tuple([_filled(part, values) for part in structure])
    if kind is list:
        return [_filled(part, values) for part in structure]
    if kind is dict:
        return {key: _filled(part, values) for key, part in structure.items()}
    if kind is slice:
        return slice(*(_filled(part, values) for part in (structure.start, structure.stop, structure.step)))
    return structure

"""A layer that is a piece of a graph: its steps one after the other.

The steps are data, so that the layer can be copied, pickled and sent like any other; a value is let go after
its last use, as in the forward that the graph was made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from gpipe_bench.pipeline.model.parts import Part


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a value of a program is kept."""

    index: int


class Step(NamedTuple):
    """What is called, with what, and which slots are empty then."""

    kind: str  # as fx calls it: call_module, call_function, call_method or get_attr
    target: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: int
    done: tuple[int, ...]


class Program(NamedTuple):
    """The steps of a graph; the inputs are in the first slots."""

    num_inputs: int
    num_slots: int
    steps: tuple[Step, ...]
    output: Any


class Traced(Part):
    """Takes and gives what crosses the cuts of a graph, a tensor or a tuple of tensors.

    Args:
        model: the model.
        programs: what to do in training mode and in evaluation mode.
        modules: names of the modules that are called.
        tensors: names of the parameters and buffers that are used by themselves.
        constants: tensors that the forward makes out of nothing, by what the programs call them.
        stashes, pops: portals that it gives behind its other outputs, and takes behind its other inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        programs: Mapping[bool, Program],
        modules: Mapping[str, str],
        tensors: Iterable[str],
        constants: Mapping[str, Tensor],
        *,
        stashes: tuple[str, ...] = (),
        pops: tuple[str, ...] = (),
    ) -> None:
        super().__init__(model, modules)
        for name in tensors:
            self.hold(model, name)
        for name, tensor in constants.items():
            self._buffers[name] = tensor
            self._non_persistent_buffers_set.add(name)
        self._programs = dict(programs)
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
            given = filled(arguments, values)
            named = filled(keywords, values) if keywords else keywords
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
        return filled(program.output, values)


def filled(structure: Any, values: list[Any]) -> Any:
    """A structure with the values of its slots."""
    kind = type(structure)
    if kind is Slot:
        return values[structure.index]
    if kind is tuple:
        return tuple([filled(part, values) for part in structure])
    if kind is list:
        return [filled(part, values) for part in structure]
    if kind is dict:
        return {key: filled(part, values) for key, part in structure.items()}
    if kind is slice:
        return slice(*(filled(part, values) for part in (structure.start, structure.stop, structure.step)))
    return structure


def program_of(graph: fx.Graph) -> Program:
    """The steps of a graph, whose placeholders come first."""
    nodes = list(graph.nodes)
    slots = {node: Slot(i) for i, node in enumerate(nodes[:-1])}
    last_use = {source: node for node in nodes for source in node.all_input_nodes}
    inputs = [node for node in nodes if node.op == "placeholder"]
    steps = []
    for node in nodes[len(inputs) : -1]:
        done = [source for source in node.all_input_nodes if last_use[source] is node]
        if node not in last_use:
            done.append(node)
        steps.append(
            Step(
                node.op,
                node.target,
                _plain(node.args, slots),
                _plain(node.kwargs, slots),
                slots[node].index,
                tuple(slots[each].index for each in done),
            )
        )
    return Program(len(inputs), len(slots), tuple(steps), _plain(nodes[-1].args[0], slots))


def _plain(structure: Any, slots: Mapping[fx.Node, Slot]) -> Any:
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

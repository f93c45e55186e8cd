"""Cuts any module into a sequence of layers, before named modules or where the layers balance.

`torch.fx` runs the forward once on proxies that record each operation. Modules that are not traced into are
calls in the graph, and may do anything. Only the code between them must compute the same for all inputs; so
modules that fx cannot trace are not traced into, and a model is refused only if the forward that has to be
cut does what a graph cannot hold. (`torch.export` would record single operations and lose the modules, by
which batch normalization, dropout and names are known.) A model is traced in training and in evaluation mode;
a layer follows its own mode.

A tensor crosses a cut if it is computed before and used behind; a layer passes on tensors that only later
layers use. Sizes and other numbers do not cross: they are read again, behind the cut, from a tensor that
does. Parameters and buffers are read where they are used.
"""

from __future__ import annotations

import inspect
import operator
import random
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..memory.profile import layer_costs
from ..plan.partition import partition
from ..stage.buffers import State
from ..stage.trees import Tree
from .parts import OwnLayers, Part, Traced, chosen

Call = tuple[str, int]  # a module's name in the model, and which of its calls

_DESCRIBING = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
_ASKING = ("size", "dim", "numel", "stride", "is_floating_point", "ndimension", "get_device")
_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.neg, operator.pow, operator.getitem, min, max, int, float, round, abs, len, getattr,
}  # fmt: skip

REMEDY = (
    "move what does it into a module of its own, which then is a layer or part of one as it stands, or write "
    "the layers yourself as an nn.Sequential"
)


def split(
    model: nn.Module,
    at: Sequence[str] | None = None,
    *,
    num_layers: int | None = None,
    inputs: Sequence[str] | None = None,
    example: Tree | None = None,
) -> OwnLayers:
    """A model as the layers that a `Pipeline` takes; tensors needed after a cut pass from layer to layer.

    Args:
        model: any module whose forward takes tensors. It is not changed. The layers share its modules, so
            training them trains the model. Parameters and buffers keep their names.
        at: names of modules; the model is cut before the first call of each. Only modules that contain these
            are traced into.
        num_layers: instead of `at`: the number of layers, balanced by parameters, or by costs on `example`.
        inputs: the arguments of the model's forward that a batch holds, in its order: a tensor for one, a
            tuple for several. Default: those without a default.
        example: a micro-batch; it may be on the meta device.

    `ValueError` if a name is not a module or is not called, or if the forward to be cut does what a graph
    cannot hold; the message says what to do.
    """
    if (at is None) == (num_layers is None):
        raise ValueError("give either at=, the names of modules to cut before, or num_layers=")
    if at is not None and example is not None:
        raise ValueError("example= is for balancing, with num_layers=; at= says where the cuts are")
    names = inputs_of(model, inputs)
    opened = None if at is None else _around(model, at)
    traces = {mode: Tracer(model, names, opened) for mode in (True, False)}
    for mode, tracer in traces.items():
        tracer.run(training=mode)
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
    """Returns the cuts for which the largest layer is smallest."""
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

    A cut needs something before it. A tensor that is changed in place must be made in the same layer: behind
    a cut it is another tensor than the one that earlier layers, or their views, hold.
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
    """The layers that begin at `places`; the first layer begins with the inputs."""
    pieces = {mode: _pieces(found, places) for mode, found in traces.items()}
    titles = [name if call == 0 else f"{name}, call {call + 1}" for name, call in places]
    titles.insert(0, f"what comes before {titles[0]}" if titles else "the model")
    layers: dict[str, Part] = {}
    for title, both_modes in zip(titles, zip(*pieces.values(), strict=True), strict=True):
        graphs, constants = dict(zip(pieces, both_modes, strict=True)), dict[str, Tensor]()
        for mode, graph in graphs.items():
            for node in graph.nodes:
                if node.op == "get_attr" and node.target in traces[mode].constants:
                    constant = traces[mode].constants[node.target]
                    node.target = f"{node.target}, {'training' if mode else 'evaluation'}"
                    constants[node.target] = constant
        layers[title] = Traced(model, graphs, constants)
    return OwnLayers(model, layers)


def _pieces(trace: Tracer, starts: Sequence[Call]) -> list[fx.Graph]:
    """The graph of one mode, cut before the calls `starts`; each piece takes what the one before returns."""
    nodes = list(trace.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    bounds = [0, *(order[trace.calls[place]] for place in starts), len(nodes)]
    pieces = [nodes[start:stop] for start, stop in pairwise(bounds)]
    piece_of = {node: i for i, own in enumerate(pieces) for node in own}
    needed = [_needed(own, i, piece_of) for i, own in enumerate(pieces)]
    crossing: list[list[fx.Node]] = [[]]  # the inputs of piece i
    for i in range(1, len(pieces)):
        later = set().union(*(tensors for tensors, _ in needed[i:]))
        crossing.append(sorted([node for node in later if piece_of[node] < i], key=order.__getitem__))
    graphs = []
    for i, own in enumerate(pieces):
        graph = fx.Graph()
        made = {node: graph.placeholder(node.name) for node in crossing[i]}
        again = sorted(needed[i][1], key=order.__getitem__)
        # A parameter that is read before a cut may be used behind it only.
        used = [n for n in own if not _anywhere(n) or i in {piece_of[user] for user in n.users}]
        for node in (*again, *used):
            if node.op != "output":
                made[node] = graph.node_copy(node, made.__getitem__)
        if i < len(pieces) - 1:
            given = tuple(made[node] for node in crossing[i + 1])
            graph.output(given[0] if len(given) == 1 else given)
        else:
            graph.output(fx.node.map_arg(own[-1].args[0], made.__getitem__))
        graphs.append(graph)
    return graphs


def _needed(
    own: Sequence[fx.Node], piece: int, piece_of: Mapping[fx.Node, int]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Returns what a piece needs of earlier pieces: tensors to receive, and nodes to compute again."""
    tensors: set[fx.Node] = set()
    again: set[fx.Node] = set()
    todo = [source for node in own for source in node.all_input_nodes]
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


def _anywhere(node: fx.Node) -> bool:
    """Whether a value need not cross cuts, because it can be computed again."""
    return node.op == "get_attr" or is_number(node)


# Tracing the forward: a graph of calls of modules, and of functions between them


def inputs_of(model: nn.Module, inputs: Sequence[str] | None) -> tuple[str, ...]:
    """The arguments of the model's forward that a batch gives: `inputs`, or those without a default."""
    parameters = inspect.signature(model.forward).parameters
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    allowed = [name for name, parameter in parameters.items() if parameter.kind in kinds]
    needed = [name for name in allowed if parameters[name].default is inspect.Parameter.empty]
    return chosen(inputs, needed, allowed, type(model).__name__)


class Tracer(fx.Tracer):
    """Traces a forward into `graph`, `calls` (where each call of a module begins) and `constants` (tensors
    that the forward creates without inputs).

    `opened` are the modules to trace into; None: all that can be traced, except torch's own. `ValueError` if
    the model itself, or one of `opened`, does what a graph cannot hold.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[str], opened: Collection[str] | None) -> None:
        super().__init__()
        self.inputs = tuple(inputs)
        self.opened = opened
        self.constants: dict[str, Tensor] = {}
        self._model = model
        self._closed: set[nn.Module] = set()  # fx failed to trace into these
        self._begun: list[tuple[str, fx.Node]] = []  # each call of a module, and the node before it
        self.calls: dict[Call, fx.Node] = {}

    def run(self, *, training: bool) -> None:
        """Traces the forward in one mode; afterwards the modules have their former modes again."""
        model, before = self._model, _Before(self._model)
        modes = [(module, module.training) for module in model.modules()]
        if model.training is not training:
            model.train(training)
        try:
            self.graph = self.trace(model)
            before.check()
            self._arrange(self.graph)
        except Exception as error:
            before.undo()
            why = (str(error).strip() or type(error).__name__).partition("\n")[0].rstrip(".")
            raise ValueError(
                f"the forward of {type(model).__name__} cannot be cut, because it does what no graph "
                f"of it can hold: {why}; {REMEDY}"
            ) from error
        finally:
            for module, mode in modes:
                module.training = mode

    # Methods that fx calls

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        given = {name: self.create_proxy("placeholder", name, (), {}) for name in self.inputs}
        return lambda model: _plain(root_fn(model, **given)), [self.root]

    def create_arg(self, a: Any) -> Any:
        if (
            isinstance(a, Tensor)
            and not isinstance(a, nn.Parameter)
            and not any(a is buffer for buffer in self._model.buffers())
        ):
            name = next((name for name, tensor in self.constants.items() if tensor is a), None)
            if name is None:
                name = f"constant {len(self.constants)}"
                self.constants[name] = a.detach()
            return self.create_node("get_attr", name, (), {})
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self.opened is not None:
            return module_qualified_name not in self.opened
        if m in self._closed or m._buffers or m._forward_hooks or m._forward_pre_hooks:
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        last = next(iter(reversed(self.graph.nodes)))
        self._begun.append((name, last))
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        begun = len(self._begun)
        before = _Before(m)
        stack, constants = self.module_stack.copy(), dict(self.constants)
        try:
            result = super().call_module(m, forward, args, kwargs)
            before.check()
        except Exception:
            # A user's forward may raise anything for proxies. The module becomes a call in the graph; if its
            # forward is really wrong, that shows when it runs.
            before.undo()
            if self.opened is not None:
                raise
            for node in reversed(self.graph.nodes):  # forget the attempt
                if node is last:
                    break
                if node.op != "get_attr":  # fx reuses these
                    self.graph.erase_node(node)
            self.module_stack, self.constants = stack, constants
            del self._begun[begun:]
            self._closed.add(m)
            return super().call_module(m, forward, args, kwargs)
        return result

    def _arrange(self, graph: fx.Graph) -> None:
        """Moves indexing and attribute access right behind the node they read, so that only tensors cross a
        cut; then records where each call of a module begins.
        """
        nodes = list(graph.nodes)
        places = {node: i for i, node in enumerate(nodes)}
        moved = set()
        for node in nodes:
            if node.op == "call_function" and node.target in (operator.getitem, getattr):
                source, key, *_ = node.args
                if isinstance(key, int | str) and source.op != "placeholder" and not is_number(node):
                    source.append(node)
                    moved.add(node)
        count: dict[str, int] = {}
        for name, last in self._begun:
            start = places[last] + 1
            while nodes[start] in moved:
                start += 1
            self.calls[name, count.get(name, 0)] = nodes[start]
            count[name] = count.get(name, 0) + 1


def _plain(output: Any) -> Any:
    """The output; `ValueError` for a subclass of tuple, list or dict, which a graph would replace."""
    if isinstance(output, tuple | list | dict) and type(output) not in (tuple, list, dict):
        raise ValueError(
            f"it gives a {type(output).__name__}, which would come back as one of Python's own; let it "
            "give a tensor, or a tuple, list or dict of tensors, such as output.logits"
        )
    parts = list(output.values()) if isinstance(output, dict) else output
    for part in parts if isinstance(parts, tuple | list) else ():
        _plain(part)
    return output


class _Before:
    """A module's state before its forward: attributes, buffers, and the random generators of torch and
    Python.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._drawn = module, (torch.get_rng_state(), random.getstate())
        self._attributes = _attributes(module)
        self._buffers = {
            name: (State.of(buffer), None if buffer is None else buffer.clone())
            for name, buffer in module._buffers.items()
        }

    def check(self) -> None:
        """`ValueError` if the forward has changed any of it."""
        was, now, buffers = self._attributes, _attributes(self._module), self._module._buffers
        changed = [name for name in {**was, **now} if was.get(name) is not now.get(name)]
        changed += [
            name
            for name in {**self._buffers, **buffers}
            if name not in self._buffers or self._buffers[name][0].has_moved(buffers.get(name))
        ]
        kind = type(self._module).__name__
        if changed:
            raise ValueError(f"it changes {kind}'s {changed[0]}")
        if not torch.equal(self._drawn[0], torch.get_rng_state()) or self._drawn[1] != random.getstate():
            raise ValueError(f"{kind} draws random numbers whose shape no input decides")

    def undo(self) -> None:
        """Restores the state."""
        attributes, buffers = vars(self._module), self._module._buffers
        for name in _attributes(self._module).keys() - self._attributes.keys():
            del attributes[name]
        attributes.update(self._attributes)
        buffers.clear()
        for name, (state, value) in self._buffers.items():
            buffers[name] = state.tensor
            if state.tensor is not None and value is not None and state.has_moved(state.tensor):
                state.tensor.copy_(value)
        torch.set_rng_state(self._drawn[0])
        random.setstate(self._drawn[1])


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in ("_buffers", "training")}


def is_number(node: fx.Node) -> bool:
    """Whether a node's value describes a tensor (size, dtype, device) or is computed from such values."""
    if node.op == "call_method":
        return node.target in _ASKING
    if node.op != "call_function":
        return False
    if node.target is getattr and node.args[1] in _DESCRIBING:
        return True
    sources = node.all_input_nodes
    return node.target in _ARITHMETIC and bool(sources) and all(map(is_number, sources))

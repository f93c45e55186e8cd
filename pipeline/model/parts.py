"""Layers that share a model's modules and keep the model's parameter names.

A pipeline names parameters after its layers, but a model's weights are saved and loaded by the model's names.
So the pipeline holds the model's own tree of modules, and calls the layers, which share the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..stage.trees import run_through


class Part(nn.Module):
    """One layer, made of modules from any place in the model, held under their full names in the model, with
    dots. It can be profiled, copied and moved without the rest of the model.

    Args:
        model: contains the modules; they are shared, not copied.
        modules: by attribute name in a subclass's forward, the module's name in the model.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, str]) -> None:
        super().__init__()
        self._called = dict(modules)
        for name in modules.values():
            self._modules[name] = model.get_submodule(name)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(self.__dict__.get("_called", {}).get(name, name))

    def hold(self, model: nn.Module, tensor: str) -> None:
        """Holds the parameter or buffer of that name, which belongs to no module of this layer."""
        path, _, name = tensor.rpartition(".")
        _share(model.get_submodule(path), name, self, tensor)

    def held(self) -> Iterable[str]:
        """Names of the parameters and buffers that belong to no module of this layer."""
        return (*self._parameters, *self._buffers)


class Traced(Part):
    """A layer that runs a piece of a graph, as code that `fx` generates. Inputs and outputs are what crosses
    the cuts, a tensor or a tuple of tensors. A value is freed after its last use.

    Args:
        model: the model.
        graphs: the piece in training mode and in evaluation mode; placeholders come first.
        constants: tensors that the forward creates without inputs, by their names in the graphs.
    """

    def __init__(
        self, model: nn.Module, graphs: Mapping[bool, fx.Graph], constants: Mapping[str, Tensor]
    ) -> None:
        outside = ("call_module", "get_attr")
        nodes = [node for graph in graphs.values() for node in graph.nodes if node.op in outside]
        names = {str(node.target): f"own_{i}" for i, node in enumerate(nodes)}  # code has no dots in a name
        super().__init__(model, {names[str(n.target)]: str(n.target) for n in nodes if n.op == "call_module"})
        for name in dict.fromkeys([str(node.target) for node in nodes if node.op == "get_attr"]):
            if name not in constants:
                self.hold(model, name)
        for name, tensor in constants.items():
            self._buffers[name] = tensor
            self._non_persistent_buffers_set.add(name)
        self._called = {short: name for name, short in names.items()}
        for node in nodes:
            node.target = names[str(node.target)]
        self._programs = {mode: _Program.of(graph) for mode, graph in graphs.items()}
        self._constants = tuple(constants)

    def held(self) -> Iterable[str]:
        return [name for name in super().held() if name not in self._constants]

    def forward(self, value: Any) -> Any:
        program = self._programs[self.training]
        values = (value,) if isinstance(value, Tensor) else tuple(value)
        if len(values) != program.num_inputs:
            raise ValueError(
                f"{len(values)} tensors came where {program.num_inputs} were expected; the first layer takes "
                "one for each of the inputs that split was given"
            )
        return program.run(self, *values)


class _Program:
    """The code of a graph, and the functions it calls besides torch's. Programs of equal code are equal."""

    def __init__(self, num_inputs: int, code: str, called: Mapping[str, Any]) -> None:
        self.num_inputs, self._code, self._called = num_inputs, code, dict(called)
        found = {"torch": torch, **called}
        exec(code, found)
        self.run: Callable[..., Any] = found["forward"]

    @classmethod
    def of(cls, graph: fx.Graph) -> _Program:
        written = graph.python_code("self")
        code, known = written.src, written.globals.items()
        called = {name: each for name, each in known if name in code and not isinstance(each, ModuleType)}
        return cls(sum(node.op == "placeholder" for node in graph.nodes), code, called)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Program) and (self._code, self._called) == (other._code, other._called)

    def __hash__(self) -> int:
        return hash(self._code)

    def __reduce__(self) -> Any:
        return _Program, (self.num_inputs, self._code, self._called)


class OwnLayers(nn.Module):
    """The layers that `layers_of` and `split` return. Give them to a `Pipeline`, or call this module to run
    them one after another. Who calls single layers must pass on the portals, values that skip layers.

    `state_dict`, `parameters` and so on are the model's, which shares its modules with the layers. `len`,
    iteration and indexing are over the layers.

    Args:
        model: the model.
        parts: its layers by name, in order. A tensor that none of them holds goes to the first layer that
            shares it, or to the first layer.
    """

    def __init__(self, model: nn.Module, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self._whole = [model]  # in a list, so that it is no submodule
        self._parts = dict(parts)
        _take_over(self, model)
        layers = list(self._parts.values())
        inside = {module for part in layers for module in part.modules()}
        for name, module in model.named_modules():
            if module not in inside and (module._forward_hooks or module._forward_pre_hooks):
                raise ValueError(
                    f"{name or 'the model'} ({type(module).__name__}) has hooks on its forward, which would "
                    "not be called, because its modules are called one by one; remove them"
                )
        known = {name for part in layers for name, _ in _all_tensors(part)}
        holders = {id(tensor): part for part in reversed(layers) for _, tensor in _all_tensors(part)}
        for name, tensor in _all_tensors(model):
            if name not in known:
                holders.get(id(tensor), layers[0]).hold(model, name)

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts.values())

    def __getitem__(self, index: int) -> Part:
        return list(self._parts.values())[index]

    def names(self) -> tuple[str, ...]:
        """Names of the layers, for messages."""
        return tuple(self._parts)

    def forward(self, value: Any) -> Any:
        """Runs the layers one after another."""
        return run_through(tuple(self), value)

    def train(self, mode: bool = True) -> OwnLayers:
        super().train(mode)
        self._whole[0].train(mode)
        for part in self:
            part.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> OwnLayers:
        super()._apply(fn, recurse)
        follow(list(self), self)
        return self

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        found = super().load_state_dict(*arguments, **options)
        follow(list(self), self)  # assign=True replaces the parameters
        return found

    def give_to(self, owner: nn.Module, parts: Sequence[Part]) -> None:
        """Registers the modules of `parts` in `owner`, under the model's names.

        If `parts` are all layers, `owner` shares the model's own tree; otherwise it gets a tree of these
        modules only.
        """
        for part in parts:
            for name in part.held():
                _put(self._whole[0], name, part)
        tree = self._whole[0] if len(parts) == len(self) else _pruned(self._whole[0], parts)
        for name in tree._modules:
            if name in vars(owner) or hasattr(type(owner), name):
                raise ValueError(
                    f"the model has a module {name!r}, which is a name that a {type(owner).__name__} has for "
                    "something else; give the module another name"
                )
        _take_over(owner, tree)


def chosen(
    inputs: Sequence[str] | None, needed: Sequence[str], allowed: Sequence[str], model: str
) -> tuple[str, ...]:
    """The arguments of a model's forward that a batch holds: `inputs`, else those that are `needed`."""
    found = tuple(needed if inputs is None else inputs)
    if isinstance(inputs, str) or not 0 < len(set(found)) == len(found) or not set(found) <= set(allowed):
        raise ValueError(
            f"inputs is {inputs!r}; give the names of the arguments of {model}'s forward that a batch holds, "
            f"in its order, each once, from: {', '.join(allowed) or 'none that has a name'}"
        )
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"inputs lacks {missing[0]!r}, without which {model}'s forward cannot run")
    return found


def follow(parts: Sequence[Part], tree: nn.Module) -> None:
    """Makes the parts hold the tensors of `tree` after it was moved or loaded."""
    for part in parts:
        for name in part.held():
            part.hold(tree, name)


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and buffers by all of their names; a tied tensor has several."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


# A tree of modules, some or all of which are the model's


def _take_over(module: nn.Module, tree: nn.Module) -> None:
    """Makes `module` share the parameters, buffers and modules of `tree`."""
    for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        module.__dict__[table] = tree.__dict__[table]


def _pruned(model: nn.Module, parts: Sequence[Part]) -> nn.Module:
    """The model's tree with only what the parts hold, in the model's order, so that a tied weight's first
    name stays the same.
    """
    tree = nn.Module()
    holders = {name: part for part in parts for name in (*part._modules, *part.held())}
    places = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}

    def place(name: str) -> int:
        return places[name] if name in places else places[name.rpartition(".")[0]]

    for name in sorted(holders, key=place):
        part = holders[name]
        if name in part._modules:
            path, _, last = name.rpartition(".")
            _reach(tree, path)._modules.setdefault(last, part._modules[name])
        else:
            _put(tree, name, part)
    return tree


def _put(tree: nn.Module, name: str, part: Part) -> None:
    """Registers a tensor of `part` in `tree`: the opposite of `Part.hold`."""
    path, _, last = name.rpartition(".")
    _share(part, name, _reach(tree, path), last)


def _share(source: nn.Module, name: str, target: nn.Module, new_name: str) -> None:
    """Registers the parameter or buffer `name` of one module in another one, too."""
    if name in source._parameters:
        target._parameters[new_name] = source._parameters[name]
    else:
        target._buffers[new_name] = source._buffers[name]
        if name in source._non_persistent_buffers_set:
            target._non_persistent_buffers_set.add(new_name)


def _reach(tree: nn.Module, path: str) -> nn.Module:
    """The module at `path`; missing modules are created."""
    for name in path.split(".") if path else ():
        found = tree._modules.get(name)
        if found is None:
            found = tree._modules[name] = nn.Module()
        tree = found
    return tree

"""Compiles each layer of a stage on its own with torch.

Each by itself, because each layer's random stream is set outside its code, and because a cut between any two
layers must not change a bit. A layer is compiled whole or not at all, and always in the form that a backward
needs: a forward and its recomputation are the same program, so they give the same numbers. What cannot be
compiled runs as it is, with a warning; so do inputs of more sizes than torch keeps code for.

`signature` tells whether two layers are the same one, so that each is compiled, or profiled, once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from .tensors import enter, root

BACKEND = "inductor"
_MOST_PROGRAMS = 256  # kinds of layers whose code is kept for later pipelines


class Compilation(NamedTuple):
    """The arguments of `torch.compile`."""

    backend: str = BACKEND
    mode: str | None = None
    fullgraph: bool | None = None  # None: what cannot be compiled whole runs as it is
    dynamic: bool | None = False

    @property
    def options(self) -> dict[str, Any] | None:
        """The mode's options, plus random numbers from torch's generators, as in eager mode."""
        if self.backend != BACKEND:
            return None
        from torch._inductor import list_mode_options  # takes a second: only where layers are compiled

        return {**list_mode_options(self.mode or "default"), "fallback_random": True}


def compile_layers(
    layers: Sequence[nn.Module], first_layer: int, compilation: Compilation
) -> tuple[Compiled, ...]:
    """The layers as a stage calls them; `first_layer` is the index of the first, for warnings."""
    made = tuple(Compiled(layer, first_layer + i, compilation) for i, layer in enumerate(layers))
    normalizing = [str(each.index) for each in made if each.normalizes]
    if normalizing:
        warnings.warn(
            f"not compiled: layers {', '.join(normalizing)} have batch normalization, whose averages follow "
            "the mini-batch and are kept outside of the layers; they run as they are",
            stacklevel=2,
        )
    return made


class Compiled:
    """Calls one layer, compiled where that is possible."""

    def __init__(self, layer: nn.Module, index: int, compilation: Compilation) -> None:
        self.layer, self.index, self._must = layer, index, compilation.fullgraph is True
        self.normalizes = any(
            isinstance(module, _BatchNorm) and module.running_mean is not None for module in layer.modules()
        )
        self._program = None if self.normalizes else _program(_kind(layer), compilation)

    def __call__(self, value: Any) -> Any:
        """Calls the layer. Without a graph, result tensors that would need a gradient are still marked so:
        the next layer then runs the same program.
        """
        if torch.is_grad_enabled():
            return self._run(value)
        with torch.enable_grad():
            output = self._run(pytree.tree_map_only(Tensor, _enter, value))
        return pytree.tree_map_only(Tensor, _cut_off, output)

    def _run(self, value: Any) -> Any:
        program = self._program
        if program is None:
            return self.layer(value)
        try:
            with torch.compiler.set_stance("eager_on_recompile") if program.is_full else nullcontext():
                return program.call(self.layer, value)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            program.is_full = True
            if not _CompiledCall.has_warned:
                _CompiledCall.has_warned = True
                warnings.warn(
                    f"not compiled: layer {self.index} ({type(self.layer).__name__}) was given more sizes or "
                    f"modes than the {torch._dynamo.config.recompile_limit} that torch keeps code for; "
                    "further ones run as they are, here and in other layers. Give mini-batches of fewer "
                    "sizes, or raise torch._dynamo.config.recompile_limit",
                    stacklevel=2,
                )
            return self._run(value)
        except torch._dynamo.exc.TorchDynamoException as error:
            if self._must:
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        self._program = None
        output = self.layer(value)  # raises what the layer itself has to say
        warnings.warn(
            f"not compiled: layer {self.index} ({type(self.layer).__name__}) runs as it is, because torch "
            f"cannot compile it whole: {reason}",
            stacklevel=2,
        )
        return output


def _enter(tensor: Tensor) -> Tensor:
    """The tensor as a stage's input enters a graph: a layer may modify it in place."""
    return enter(root(tensor.device), tensor, [None], 0) if tensor.requires_grad else tensor


def without_graph(value: Any) -> Any:
    """The tensors as a forward without gradients gives them."""
    return pytree.tree_map_only(Tensor, Tensor.detach, value)


def _cut_off(tensor: Tensor) -> Tensor:
    """Returns the tensor without its graph, still marked if it needs a gradient."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _call_layer(layer: nn.Module, value: Any) -> Any:
    return layer(value)


def _kind(layer: nn.Module) -> int:
    """Returns a number that is equal for layers that compile to the same program. Where it is equal for
    others by chance, torch tells them apart.
    """
    devices = tuple([tensor.device for tensor in (*layer.parameters(), *layer.buffers())])
    return hash((signature(layer), devices))


class _CompiledCall:
    """A compiled call for all layers of a kind. Torch keeps a few forms (sizes, modes) with the code of a
    function, so each kind has code of its own. Once `is_full`, all other forms run eagerly.
    """

    has_warned = False  # once in a process: where one layer comes with too many sizes, others do

    def __init__(self, number: int, compilation: Compilation) -> None:
        code = _call_layer.__code__.replace(co_name=f"layer_{number}")
        self.is_full = False
        self.call: Callable[[nn.Module, Any], Any] = torch.compile(
            FunctionType(code, _call_layer.__globals__),
            fullgraph=compilation.fullgraph is not False,
            dynamic=compilation.dynamic,
            backend=compilation.backend,
            options=compilation.options,
        )


@functools.lru_cache(maxsize=_MOST_PROGRAMS)
def _program(kind: int, compilation: Compilation) -> _CompiledCall:
    return _CompiledCall(_program.cache_info().misses, compilation)


_BASE_ATTRIBUTES = frozenset(vars(nn.Module()))


def signature(layer: nn.Module) -> object:
    """A hashable value that is equal for layers of the same configuration: each submodule's type, attributes
    and tensor shapes. An attribute that cannot be compared by value makes layers differ.
    """
    return tuple(
        (
            name,
            type(module),
            tuple(
                _comparable(value) for key, value in vars(module).items() if key.endswith("_hooks") and value
            ),
            tuple((k, _comparable(v)) for k, v in vars(module).items() if k not in _BASE_ATTRIBUTES),
            tuple(
                (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
                for key, tensor in (*module._parameters.items(), *module._buffers.items())
                if tensor is not None
            ),
        )
        for name, module in layer.named_modules()
    )


class Same:
    """Compares `value` by identity; holds it, so that its id is not reused."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


def _comparable(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_comparable, value))
    if isinstance(value, dict):
        return tuple((_comparable(key), _comparable(each)) for key, each in value.items())
    if isinstance(value, partial):
        return partial, _comparable(value.func), _comparable(value.args), _comparable(value.keywords)
    if isinstance(value, Tensor):
        return Same(value)
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return type(value), value

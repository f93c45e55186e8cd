"""One layer of a model that is no sequence.

Such a layer is made of modules from here and there in the model. It holds them under their full names in the
model, dots and all, so that its parameters are called what the model calls them, and so that it is complete
in itself: it can be profiled, copied and moved without the rest of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


class Part(nn.Module):
    """Modules of `model`, each under its name there.

    Args:
        model: where the modules are; they are shared with it, not copied.
        modules: what a subclass's forward calls each module, and its name in the model.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, str]) -> None:
        super().__init__()
        self._called = dict(modules)
        for name in modules.values():
            self._modules[name] = model.get_submodule(name)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(self.__dict__.get("_called", {}).get(name, name))

    def hold(self, model: nn.Module, tensor: str) -> None:
        """Takes in the parameter or buffer of that name, which belongs to no module of this layer."""
        owner, name = owner_of(model, tensor)
        if name in owner._parameters:
            self._parameters[tensor] = owner._parameters[name]
        else:
            self._buffers[tensor] = owner._buffers[name]
            if name in owner._non_persistent_buffers_set:
                self._non_persistent_buffers_set.add(tensor)

    def held(self) -> Iterable[str]:
        """Names of the parameters and buffers that belong to no module of this layer."""
        return (*self._parameters, *self._buffers)


def owner_of(model: nn.Module, tensor: str) -> tuple[nn.Module, str]:
    """The module that a parameter or buffer belongs to, and its name there."""
    path, _, name = tensor.rpartition(".")
    return model.get_submodule(path), name


def all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by all of their names: one that is tied has several."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)

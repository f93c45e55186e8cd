"""What torch is asked for while an accelerator is pretended (`streams`): told to it, and answered by it.

Python's calls say which device a tensor is on and where it shall go; the operations that come of them,
forward or backward, are the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gpipe_bench.pipeline.memory.tracker import tensors_in

if TYPE_CHECKING:
    from fakes.streams import FakeAccelerator

TYPE = "privateuseone"
_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that is no kernel of anybody's."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return tensor.clone()


class Kernels(TorchDispatchMode):
    """Tells the accelerator of every operation that is no view."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = tensors_in((args, kwargs))
            result = func(*args, **kwargs)
            if not given:
                return result
            known = {address_of(tensor) for tensor in given}
            made = [tensor for tensor in tensors_in((result,)) if address_of(tensor) not in known]
            written = []
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    written += tensors_in((value,))
            if made or written or not tensors_in((result,)):  # the last gives a number, as `.item()` does
                self._accelerator.ran(func, given, written, made)
            return result


class Calls(TorchFunctionMode):
    """What a tensor says of its device, and what is asked for on a pretended one."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE_OF:
            return self._accelerator.device_of(args[0])
        if func is torch.Tensor.to or func is torch.Tensor.cpu:
            return self._to(func, args, kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == TYPE:
            device = torch.device(kwargs["device"])
            device = self._accelerator.current(TYPE) if device.index is None else device
            made = func(*args, **{**kwargs, "device": "cpu"})
            return self._accelerator.made_on(made, device)
        return func(*args, **kwargs)

    def _to(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        tensor, *options = args
        kwargs = dict(kwargs)
        copied = kwargs.pop("copy", False)
        source = self._accelerator.device_of(tensor)
        device, dtype, non_blocking, layout = torch.device("cpu"), None, False, None
        if func is torch.Tensor.to:
            if options and isinstance(options[0], Tensor):
                options = [self._accelerator.device_of(options[0]), options[0].dtype, *options[1:]]
            device, dtype, non_blocking, layout = torch._C._nn._parse_to(*options, **kwargs)
            device = source if device is None else device
        if device.type == TYPE and device.index is None:
            device = self._accelerator.current(TYPE)
        if device != source:
            tensor = self._accelerator.moved(tensor, device, non_blocking=non_blocking)
            copied = False
        wanted = {"dtype": dtype, "memory_format": layout}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        return tensor.to(**wanted, copy=copied) if wanted or copied else tensor

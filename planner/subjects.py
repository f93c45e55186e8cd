"""Models that are timed, as something a process can be sent and builds for itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.stage.microbatch import flatten, unflatten

Loss = Callable[[Any, Tensor], Tensor]


class Subject(Protocol):
    """A model, its loss, and examples for it; equal ones in every process with the same seed."""

    def build(self) -> tuple[list[nn.Module], Loss]:
        """Layers and loss."""

    def batch(self, examples: int, device: str = "cpu") -> tuple[Any, Any]:
        """Inputs and target of so many examples."""


@dataclass(frozen=True)
class OfTheZoo:
    """A model of `gpipe_bench.models` with its options."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[list[nn.Module], Loss]:
        return list(MODELS[self.model](**self.options)), loss_fn(self.model, **self.options)

    def batch(self, examples: int, device: str = "cpu") -> tuple[Any, Any]:
        return example_batch(self.model, examples, device=device, **self.options)


@dataclass(frozen=True)
class OneOfYours:
    """`module:function`, which returns (layers, inputs, target, loss_fn, ...); batches repeat these."""

    name: str

    def build(self) -> tuple[list[nn.Module], Loss]:
        layers, _, _, loss = self._given()
        return list(layers), loss

    def batch(self, examples: int, device: str = "cpu") -> tuple[Any, Any]:
        with torch.device(device):
            _, inputs, target, _ = self._given()
        return _repeated(inputs, examples), _repeated(target, examples)

    def _given(self) -> tuple[Any, Any, Any, Loss]:
        module, _, attribute = self.name.partition(":")
        layers, inputs, target, loss, *_ = getattr(importlib.import_module(module), attribute)()
        return layers, inputs, target, loss


def _repeated(tree: Any, examples: int) -> Any:
    tensors, structure = flatten(tree)
    times = [-(-examples // tensor.shape[0]) for tensor in tensors]
    found = [torch.cat([tensor] * count)[:examples] for tensor, count in zip(tensors, times, strict=True)]
    return unflatten(tuple(found), structure)

"""What a stage has found out about its layers, which holds as long as nothing about them changes.

Which outputs need a gradient and which inputs are overwritten shows only when the layers run, so it is found
in the first step of a kind and forgotten when another parameter is trained or a layer changes its mode.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import nn


class Habits:
    """What is known of the layers of stage `index`, whose parameters are on `device`.

    `needs_grad` and `overwritten` are by the kind of the stage's inputs: which of the outputs need a
    gradient, and the positions of the inputs that the layers overwrite.
    """

    def __init__(self, index: int, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._index, self._layers, self._device = index, layers, device
        self.needs_grad: dict[Hashable, tuple[bool, ...]] = {}
        self.overwritten: dict[Hashable, tuple[int, ...]] = {}
        self._loss: nn.Module | None = None
        self.parameters = _parameters(layers)
        self._trainable: tuple[bool, ...] = ()
        self._modes: tuple[bool, ...] = ()

    def look(self, loss_fn: object = None) -> None:
        """Before a step: finds the parameters, those of a loss that is a module among them, and forgets what
        was found if what is trained, or a layer's mode, has changed.

        `ValueError` for a model that was moved.
        """
        if loss_fn is not None:  # there is none where nothing is trained
            self._loss = loss_fn if isinstance(loss_fn, nn.Module) else None
        self.parameters = self._all_parameters()
        trainable = tuple([parameter.requires_grad for parameter in self.parameters])
        modes = tuple([layer.training for layer in self._layers])
        if (trainable, modes) != (self._trainable, self._modes):
            self._trainable, self._modes = trainable, modes
            self.forget()

    def forget(self) -> None:
        """The next step finds out."""
        self.needs_grad.clear()
        self.overwritten.clear()

    def without_grad(self) -> list[nn.Parameter]:
        """Those that are trained and have no gradient."""
        return [p for p in self.parameters if p.requires_grad and p.grad is None]

    def _all_parameters(self) -> tuple[nn.Parameter, ...]:
        found = _parameters(self._layers)
        if found and found[0].device != self._device:
            raise ValueError(
                f"the parameters of stage {self._index} have moved from {self._device} to "
                f"{found[0].device}; move the model before the pipeline is built, or pass devices="
            )
        return found if self._loss is None else _parameters([*self._layers, self._loss])


def _parameters(roots: Iterable[nn.Module]) -> tuple[nn.Parameter, ...]:
    """Each once; `Module.parameters` takes three times as long."""
    found = [p for root in roots for module in root.modules() for p in module._parameters.values()]
    return tuple([p for p in dict.fromkeys(found) if p is not None])


def other_outputs(stage: int, now: int, before: int) -> RuntimeError:
    """What to raise where a stage's layers return another number of tensors than they did."""
    return RuntimeError(
        f"{now} tensors leave stage {stage} now and {before} did before, for inputs of the same kind; call "
        "Pipeline.refresh() on every rank after changing the model"
    )


def overwrites_alias(stage: int) -> RuntimeError:
    """What to raise where a layer overwrites an input that shares memory with another one."""
    return RuntimeError(
        f"a layer of stage {stage} changes an input of the stage in place that shares memory with another "
        "one, in which the change would not show behind a cut as it does without; give the layer before "
        "clone() one of the two, use the out-of-place form of the operation (inplace=False), or keep both "
        "layers in one stage"
    )


def overwrites_now(stage: int) -> RuntimeError:
    """What to raise where a layer overwrites an input that a recomputation needs, and did not before."""
    return RuntimeError(
        f"a layer of stage {stage} has begun to change the stage's input in place, so it cannot be "
        "recomputed; call Pipeline.refresh() on every rank before the first step in which it does, or use "
        "the out-of-place form of the operation (inplace=False) in the first layer"
    )

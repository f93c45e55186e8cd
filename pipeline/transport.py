"""How tensors move between stages that live in one process.

A transport is a set of mailboxes, one per stage, direction and micro-batch. With all stages on one device
nothing moves at all: the receiver works on the sender's tensor. Stages on devices of their own get the tensor
copied to their device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from pipeline.microbatch import Message
from pipeline.stage import Gradients


class Transport(Protocol):
    """Carries activations towards the last stage and gradients towards the first.

    `stage` is always the calling stage. The order of sends and receives is that of the schedule.
    """

    def begin(self) -> None:
        """Called before the first action of a step."""

    def send_activation(self, stage: int, microbatch: int, message: Message) -> None:
        """Hands an output to the next stage; never waits for it."""

    def receive_activation(self, stage: int, microbatch: int) -> Message:
        """The output of the stage before."""

    def send_gradient(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        """Hands the gradients of the inputs to the stage before; never waits for it."""

    def receive_gradient(self, stage: int, microbatch: int) -> Gradients:
        """The gradients of this stage's outputs."""

    def finish(self) -> None:
        """Called after the last action of a step."""

    def abort(self, error: BaseException) -> None:
        """Called instead of `finish` when an action failed."""


class InProcess:
    """All stages in this process, on one device or one each.

    `devices` is the device of each stage; None leaves every tensor where it is. With `copy` each stage gets a
    tensor of its own even on a shared device, as on separate devices; `observe_transfer`, given the receiving
    stage, is entered around the copy, so that a memory tracker can charge it to its owner.
    """

    def __init__(
        self,
        devices: Sequence[torch.device] | None = None,
        *,
        copy: bool = False,
        observe_transfer: Callable[[int], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._devices = list(devices) if devices is not None else None
        self._moves = copy or len(set(self._devices or ())) > 1
        self._copy = copy
        self._observe_transfer = observe_transfer or (lambda stage: nullcontext())
        self._activations: dict[tuple[int, int], Message] = {}
        self._gradients: dict[tuple[int, int], Gradients] = {}

    def begin(self) -> None:
        pass

    def send_activation(self, stage: int, microbatch: int, message: Message) -> None:
        if self._moves:
            tensors = tuple([self._move(tensor, stage + 1) for tensor in message.tensors])
            message = Message(tensors, message.structure, message.needs_grad)
        self._activations[stage + 1, microbatch] = message

    def receive_activation(self, stage: int, microbatch: int) -> Message:
        return self._activations.pop((stage, microbatch))

    def send_gradient(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        if self._moves:
            gradients = tuple([None if g is None else self._move(g, stage - 1) for g in gradients])
        self._gradients[stage - 1, microbatch] = gradients

    def receive_gradient(self, stage: int, microbatch: int) -> Gradients:
        return self._gradients.pop((stage, microbatch))

    def finish(self) -> None:
        assert not self._activations, "a message was sent that no action received"
        assert not self._gradients, "a gradient was sent that no action received"

    def abort(self, error: BaseException) -> None:
        self._activations.clear()
        self._gradients.clear()

    def _move(self, tensor: Tensor, receiver: int) -> Tensor:
        with self._observe_transfer(receiver):
            if self._devices is not None and tensor.device != self._devices[receiver]:
                return tensor.to(self._devices[receiver], non_blocking=True)
            return tensor.clone() if self._copy else tensor

"""What the engine asks of a transport, and the transport of stages that live in one process.

`Transport` is all that the engine knows of how tensors move; `ranks.distributed` serves processes.
In one process a transport is a set of mailboxes, one per stage, direction and micro-batch. With all stages on
one device nothing moves at all: the receiver works on the sender's tensor. Stages on devices of their own get
the tensor copied to their device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gpipe_bench.pipeline.errors import ActionError, summary
from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.stage.microbatch import Message
from gpipe_bench.pipeline.stage.stage import Gradients


class Plan(NamedTuple):
    """What every process must know of a step before it begins."""

    examples: int  # in the mini-batch
    training: bool  # or forwards only


class Transport(Protocol):
    """Carries activations towards the last stage and gradients towards the first.

    `stage` is always the calling stage. The order of sends and receives is that of the schedule.
    """

    def begin(self, plan: Plan | None, signature: Hashable) -> Plan:
        """Starts a step; the process of the first stage brings the plan, all learn it.

        Under an equal `signature` (that of the first stage counts) all messages have the same shapes and
        dtypes.
        """

    def send_activation(self, stage: int, microbatch: int, message: Message) -> None:
        """Hands an output to the next stage."""

    def receive_activation(self, stage: int, microbatch: int) -> Message:
        """The output of the stage before."""

    def send_gradient(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        """Hands the gradients of the inputs to the stage before."""

    def receive_gradient(self, stage: int, microbatch: int) -> Gradients:
        """The gradients of this stage's outputs."""

    def release(self, stage: int, microbatch: int) -> None:
        """The stage is done with the micro-batch: what it received for it may be overwritten."""

    def send_loss(self, loss: Tensor) -> None:
        """Hands the loss of a training step to all, once all micro-batches are forward; the last stage calls
        it.
        """

    def finish(self) -> Tensor | None:
        """Ends a step; returns the loss of a training step, on all processes."""

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        """Ends a step that failed in `action`, everywhere; returns what to raise."""


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
        self._observe_transfer = observe_transfer or _unobserved
        self._activations: dict[tuple[int, int], Message] = {}
        self._gradients: dict[tuple[int, int], Gradients] = {}
        self._loss: Tensor | None = None

    def begin(self, plan: Plan | None, signature: Hashable) -> Plan:
        assert plan is not None
        self._activations.clear()
        self._gradients.clear()
        return plan

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

    def release(self, stage: int, microbatch: int) -> None:
        pass

    def send_loss(self, loss: Tensor) -> None:
        self._loss = loss

    def finish(self) -> Tensor | None:
        assert not self._activations, "an output was sent that no action received"
        assert not self._gradients, "a gradient was sent that no action received"
        loss, self._loss = self._loss, None
        return loss

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        self._activations.clear()
        self._gradients.clear()
        self._loss = None
        return ActionError(action, summary(error))

    def _move(self, tensor: Tensor, receiver: int) -> Tensor:
        with self._observe_transfer(receiver):
            if self._devices is not None and tensor.device != self._devices[receiver]:
                return tensor.to(self._devices[receiver], non_blocking=True)
            return tensor.clone() if self._copy else tensor


def _unobserved(stage: int) -> AbstractContextManager[object]:
    return nullcontext()

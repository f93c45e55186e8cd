"""What the engine asks of a transport, and the transport of stages that live in one process.

`Transport` is all that the engine knows of how tensors move; `ranks.distributed` serves processes.
In one process a transport is a set of mailboxes, one per stage, direction and micro-batch. With all stages on
one device nothing moves at all: the receiver works on the sender's tensor. Stages on devices of their own get
the tensor copied to their device, beside what the devices compute (`transfers`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gpipe_bench.pipeline.errors import ActionError, summary
from gpipe_bench.pipeline.plan.named import shortened
from gpipe_bench.pipeline.plan.schedule import Action, Schedule
from gpipe_bench.pipeline.stage.stage import Gradients
from gpipe_bench.pipeline.stage.trees import Message
from gpipe_bench.pipeline.transfers import Mark, Sent, Transfers


class Plan(NamedTuple):
    """What every process must know of a step before it begins."""

    examples: int  # in the mini-batch
    num_microbatches: int  # as many as the schedule has, or fewer
    training: bool  # or forwards only
    shared: Message | None = None  # what the layers share: tensors, and the structure of the dict


class ShortBatchError(ValueError):
    """A mini-batch that a schedule cannot take; nothing of it was sent, and the next step may train."""


def rows_for(schedule: Schedule, plan: Plan, *, is_own: bool) -> Schedule:
    """What a step takes: `schedule`, or the same one for fewer micro-batches unless it is one of the user's
    own, which says nothing about them.
    """
    if plan.num_microbatches == schedule.num_microbatches:
        return schedule
    if is_own:
        raise ShortBatchError(
            f"num_microbatches is {schedule.num_microbatches} but the mini-batch has only "
            f"{plan.num_microbatches} examples, and a Schedule of one's own is for all of its micro-batches; "
            "name a schedule, which is then laid out for fewer, or leave such a mini-batch out"
        )
    return shortened(schedule, plan.num_microbatches)


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
    """All stages in this process, on one device.

    With `copy` each stage gets a tensor of its own, as on separate devices; `observe_transfer`, given the
    receiving stage, is entered around the copy, so that a memory tracker can charge it to its owner.
    """

    def __init__(
        self,
        *,
        copy: bool = False,
        observe_transfer: Callable[[int], AbstractContextManager[object]] | None = None,
    ) -> None:
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
        if self._copy:
            message = message._replace(tensors=self._copies(message.tensors, stage + 1))
        self._activations[stage + 1, microbatch] = message

    def receive_activation(self, stage: int, microbatch: int) -> Message:
        return self._activations.pop((stage, microbatch))

    def send_gradient(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        if self._copy:
            gradients = self._copies(gradients, stage - 1)
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

    def carry(self, tensors: Sequence[Sent], receiver: int) -> tuple[Sent, ...]:
        """The tensors as stage `receiver` gets them."""
        return self._copies(tensors, receiver) if self._copy else tuple(tensors)

    def _copies(self, tensors: Sequence[Sent], receiver: int) -> tuple[Sent, ...]:
        copies = []
        for tensor in tensors:
            with self._observe_transfer(receiver):
                copies.append(None if tensor is None else tensor.clone())
        return tuple(copies)


class BetweenDevices(InProcess):
    """All stages in this process, on devices of their own; `devices` is that of each stage."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._devices = tuple(devices)
        self._transfers = Transfers()
        # When what a stage is to receive is there, by stage, micro-batch and whether it is a gradient.
        self._marks: dict[tuple[int, int, bool], tuple[Mark, ...]] = {}

    def begin(self, plan: Plan | None, signature: Hashable) -> Plan:
        self._marks.clear()
        return super().begin(plan, signature)

    def send_activation(self, stage: int, microbatch: int, message: Message) -> None:
        tensors, marks = self._transfers.send(message.tensors, self._devices[stage + 1])
        self._marks[stage + 1, microbatch, False] = marks
        super().send_activation(stage, microbatch, message._replace(tensors=tensors))

    def receive_activation(self, stage: int, microbatch: int) -> Message:
        message = super().receive_activation(stage, microbatch)
        marks = self._marks.pop((stage, microbatch, False))
        self._transfers.receive(message.tensors, marks, self._devices[stage])
        return message

    def send_gradient(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        gradients, marks = self._transfers.send(gradients, self._devices[stage - 1])
        self._marks[stage - 1, microbatch, True] = marks
        super().send_gradient(stage, microbatch, gradients)

    def receive_gradient(self, stage: int, microbatch: int) -> Gradients:
        gradients = super().receive_gradient(stage, microbatch)
        marks = self._marks.pop((stage, microbatch, True))
        self._transfers.receive(gradients, marks, self._devices[stage])
        return gradients

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        self._marks.clear()
        return super().abort(action, error)


def _unobserved(stage: int) -> AbstractContextManager[object]:
    return nullcontext()

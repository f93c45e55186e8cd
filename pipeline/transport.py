"""The interface of a transport, and the transport between stages of one process.

`EdgeTransport` is all that the engine knows of how tensors move; `ranks.distributed` serves processes. In one
process a transport is a set of mailboxes, one per edge, direction and micro-batch: with all stages on one
device the receiver works on the sender's tensor, else on a copy (`devices.Transfers`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .devices import Mark, Sent, Transfers
from .errors import ActionError, summary
from .plan.edges import Edge
from .plan.schedule import Action
from .stage.stage import Gradients
from .stage.trees import Message


class StepPlan(NamedTuple):
    """The facts that every process must know about a step before it begins."""

    examples: int  # in the mini-batch
    num_microbatches: int  # as many as the schedule has, or fewer
    training: bool  # or forwards only


class EdgeTransport(Protocol):
    """Carries activations along the edges between stages, and gradients back, in the schedule's order."""

    def begin(self, plan: StepPlan | None, signature: Hashable) -> StepPlan:
        """Starts a step: sends the plan from the first stage's process to all others. In steps with the same
        `signature`, which the first stage's process gives, messages have the same shapes and dtypes.
        """

    def send(self, edge: Edge, microbatch: int, message: Message) -> None:
        """Sends an output to the stage at the edge's end."""

    def receive(self, edge: Edge, microbatch: int) -> Message:
        """Receives the message of the stage at the edge's start."""

    def send_back(self, edge: Edge, microbatch: int, gradients: Gradients) -> None:
        """Sends the gradients of a received message to the stage at the edge's start."""

    def receive_back(self, edge: Edge, microbatch: int) -> Gradients:
        """Receives the gradients of a sent message."""

    @property
    def release(self) -> Callable[[int, int], None] | None:
        """Function of (stage, micro-batch) that says that its receive buffers may be overwritten, if any."""

    def send_loss(self, loss: Tensor) -> None:
        """Sends the last stage's loss to all processes, once all micro-batches are forward."""

    def finish(self) -> Tensor | None:
        """Ends a step; returns the loss of a training step, on all processes."""

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        """Ends a step that failed in `action` in all processes; returns the exception to raise."""


class InProcess:
    """All stages in this process, on one device, or with `devices` each on its own. With `copy` each stage
    gets a tensor of its own, as on separate devices; `observe_transfer`, given the receiving stage, is
    entered around the copy, so that a memory tracker can charge it to its owner.
    """

    release = None

    def __init__(
        self,
        *,
        copy: bool = False,
        observe_transfer: Callable[[int], AbstractContextManager[object]] | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self._copy, self._devices = copy, tuple(devices)
        self._observe_transfer = observe_transfer or nullcontext
        self._transfers = Transfers() if devices else None
        self._moves = copy or bool(devices)
        # By the source of the edge and the micro-batch; marks of when it is there also by whether it is a
        # gradient.
        self._activations: dict[tuple[int, int], Message] = {}
        self._gradients: dict[tuple[int, int], Gradients] = {}
        self._marks: dict[tuple[int, int, bool], tuple[Mark, ...]] = {}
        self._loss: Tensor | None = None

    def begin(self, plan: StepPlan | None, signature: Hashable) -> StepPlan:
        assert plan is not None
        return plan

    def send(self, edge: Edge, microbatch: int, message: Message) -> None:
        if self._moves:
            tensors = self._move(message.tensors, edge.target, (edge.source, microbatch, False))
            message = message._replace(tensors=tensors)
        self._activations[edge.source, microbatch] = message

    def receive(self, edge: Edge, microbatch: int) -> Message:
        message = self._activations.pop((edge.source, microbatch))
        if self._marks:
            self._arrive(message.tensors, edge.target, (edge.source, microbatch, False))
        return message

    def send_back(self, edge: Edge, microbatch: int, gradients: Gradients) -> None:
        if self._moves:
            gradients = self._move(gradients, edge.source, (edge.source, microbatch, True))
        self._gradients[edge.source, microbatch] = gradients

    def receive_back(self, edge: Edge, microbatch: int) -> Gradients:
        gradients = self._gradients.pop((edge.source, microbatch))
        if self._marks:
            self._arrive(gradients, edge.source, (edge.source, microbatch, True))
        return gradients

    def send_loss(self, loss: Tensor) -> None:
        self._loss = loss

    def finish(self) -> Tensor | None:
        assert not self._activations, "an output was sent that no action received"
        assert not self._gradients, "a gradient was sent that no action received"
        loss, self._loss = self._loss, None
        return loss

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        for kept in (self._activations, self._gradients, self._marks):
            kept.clear()
        self._loss = None
        return ActionError(action, summary(error))

    def _move(self, tensors: Sequence[Sent], receiver: int, key: tuple[int, int, bool]) -> tuple[Sent, ...]:
        """The tensors as stage `receiver` gets them."""
        if self._transfers is not None:
            sent, self._marks[key] = self._transfers.send(tensors, self._devices[receiver])
            return sent
        copies: list[Any] = []
        for tensor in tensors:
            with self._observe_transfer(receiver):
                copies.append(tensor if tensor is None else tensor.clone())
        return tuple(copies)

    def _arrive(self, tensors: Sequence[Tensor | None], receiver: int, key: tuple[int, int, bool]) -> None:
        assert self._transfers is not None
        self._transfers.receive(tensors, self._marks.pop(key), self._devices[receiver])

"""What the engine asks of a transport, the transport of stages that live in one process, and portals.

`EdgeTransport` is all that the engine knows of how tensors move; `ranks.distributed` serves processes. In one
process a transport is a set of mailboxes, one per edge, direction and micro-batch: with all stages on one
device the receiver works on the sender's tensor, else on a copy (`devices.Transfers`).

Portals are more edges than the chain's. What a stage with portals gives is taken apart: its output takes the
way to the next stage, each portal goes to the stages that pop it, once. What comes back is added up for the
stage that stashed, the last one that popped first, as in a plain backward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .devices import Mark, Sent, Transfers
from .errors import ActionError, summary
from .plan.edges import Edge, leaving
from .plan.schedule import Action
from .stage.stage import Gradients
from .stage.trees import Message, flatten, portal_changed, unflatten, version


class StepPlan(NamedTuple):
    """The facts that every process must know about a step before it begins."""

    examples: int  # in the mini-batch
    num_microbatches: int  # as many as the schedule has, or fewer
    training: bool  # or forwards only


class EdgeTransport(Protocol):
    """Carries activations along the edges between stages, and gradients back, in the schedule's order. An
    edge is one of the chain, from a stage to the next, or it is that of portals and has their names.
    """

    def begin(self, plan: StepPlan | None, signature: Hashable) -> StepPlan:
        """Starts a step; the process of the first stage brings the plan, all learn it. Under an equal
        `signature` (that of the first stage counts) all messages have the same shapes and dtypes.
        """

    def send(self, edge: Edge, microbatch: int, message: Message) -> None:
        """Hands an output, or portals, to the stage where the edge ends; portals are sent without a wait."""

    def receive(self, edge: Edge, microbatch: int) -> Message:
        """Returns the message of the stage where the edge begins; portals come in tensors of their own."""

    def send_back(self, edge: Edge, microbatch: int, gradients: Gradients) -> None:
        """Hands the gradients of what was received to the stage where the edge begins."""

    def receive_back(self, edge: Edge, microbatch: int) -> Gradients:
        """The gradients of what was sent."""

    @property
    def release(self) -> Callable[[int, int], None] | None:
        """Function of (stage, micro-batch) that says that its receive buffers may be overwritten, if any."""

    def send_loss(self, loss: Tensor) -> None:
        """Hands the last stage's loss of a training step to all, once all micro-batches are forward."""

    def finish(self) -> Tensor | None:
        """Ends a step; returns the loss of a training step, on all processes."""

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        """Ends a step that failed in `action`, everywhere; returns what to raise."""


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
        # By the number of the edge (in the chain that of its source) and the micro-batch; marks of when it is
        # there also by whether it is a gradient.
        self._activations: dict[tuple[int, int], Message] = {}
        self._gradients: dict[tuple[int, int], Gradients] = {}
        self._marks: dict[tuple[int, int, bool], tuple[Mark, ...]] = {}
        self._versions: dict[tuple[int, int], tuple[int, ...]] = {}  # of portals
        self._loss: Tensor | None = None

    def begin(self, plan: StepPlan | None, signature: Hashable) -> StepPlan:
        assert plan is not None
        return plan

    def send(self, edge: Edge, microbatch: int, message: Message) -> None:
        if self._moves:
            tensors = self._move(message.tensors, edge.target, (edge.number, microbatch, False))
            message = message._replace(tensors=tensors)
        self._activations[edge.number, microbatch] = message
        if edge.names:
            self._versions[edge.number, microbatch] = tuple(map(version, message.tensors))

    def receive(self, edge: Edge, microbatch: int) -> Message:
        message = self._activations.pop((edge.number, microbatch))
        if self._marks:
            self._arrive(message.tensors, edge.target, (edge.number, microbatch, False))
        if not edge.names:
            return message
        versions = self._versions.pop((edge.number, microbatch))
        for name, tensor, before in zip(edge.names, message.tensors, versions, strict=True):
            if version(tensor) != before:
                raise portal_changed(name)
        return message._replace(tensors=tuple([tensor.detach() for tensor in message.tensors]))

    def send_back(self, edge: Edge, microbatch: int, gradients: Gradients) -> None:
        if self._moves:
            gradients = self._move(gradients, edge.source, (edge.number, microbatch, True))
        self._gradients[edge.number, microbatch] = gradients

    def receive_back(self, edge: Edge, microbatch: int) -> Gradients:
        gradients = self._gradients.pop((edge.number, microbatch))
        if self._marks:
            self._arrive(gradients, edge.source, (edge.number, microbatch, True))
        return gradients

    def send_loss(self, loss: Tensor) -> None:
        self._loss = loss

    def finish(self) -> Tensor | None:
        assert not self._activations, "an output was sent that no action received"
        assert not self._gradients, "a gradient was sent that no action received"
        loss, self._loss = self._loss, None
        return loss

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        for kept in (self._activations, self._gradients, self._marks, self._versions):
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


class PortalTransport:
    """`inner` with the portals of `edges`, which are those of the whole pipeline: what is sent along the
    chain is taken apart, and what is received put together.
    """

    def __init__(self, inner: EdgeTransport, edges: Sequence[Edge]) -> None:
        self.inner = inner
        self.release, self.send_loss, self.finish = inner.release, inner.send_loss, inner.finish
        self._into: dict[int, list[Edge]] = {}
        self._out: dict[int, list[Edge]] = {}
        for edge in edges:  # by source and target
            self._into.setdefault(edge.target, []).append(edge)
            self._out.setdefault(edge.source, []).append(edge)
        self._leaving = {stage: leaving(edges, stage) for stage in self._out}
        # By stage and micro-batch: how many tensors the stage gave, and where its output and portals are.
        self._places: dict[tuple[int, int], tuple[int, tuple[int, ...], dict[str, int]]] = {}

    def begin(self, plan: StepPlan | None, signature: Hashable) -> StepPlan:
        self._places.clear()
        return self.inner.begin(plan, signature)

    def send(self, edge: Edge, microbatch: int, message: Message) -> None:
        stage = edge.source
        if stage not in self._out:
            self.inner.send(edge, microbatch, message)
            return
        given, needs_grad = message.tensors, message.needs_grad
        output, *stashed = unflatten(given, message.structure)
        place = {id(tensor): position for position, tensor in enumerate(given)}
        tensors, structure = flatten(output)
        of_output = tuple([place[id(tensor)] for tensor in tensors])
        named = {name: place[id(tensor)] for name, tensor in zip(self._leaving[stage], stashed, strict=True)}
        self._places[stage, microbatch] = len(given), of_output, named
        for line in self._out[stage]:
            positions = [named[name] for name in line.names]
            needed = tuple([needs_grad[i] for i in positions])
            self.inner.send(line, microbatch, Message(tuple([given[i] for i in positions]), None, needed))
        # After the portals: the send of an output may wait.
        needed = tuple([needs_grad[i] for i in of_output])
        aliases = tuple([i for i, place in enumerate(of_output) if place in message.aliases])
        self.inner.send(edge, microbatch, Message(tensors, structure, needed, aliases))

    def receive(self, edge: Edge, microbatch: int) -> Message:
        message = self.inner.receive(edge, microbatch)
        if edge.target not in self._into:
            return message
        found = [self.inner.receive(line, microbatch) for line in self._into[edge.target]]
        arrived = [tensor for portals in found for tensor in portals.tensors]
        needs_grad = [needed for portals in found for needed in portals.needs_grad]
        tensors, structure = flatten((unflatten(message.tensors, message.structure), *arrived))
        return Message(tensors, structure, (*message.needs_grad, *needs_grad), message.aliases)

    def send_back(self, edge: Edge, microbatch: int, gradients: Gradients) -> None:
        for line in reversed(self._into.get(edge.target, ())):
            count = len(line.names)
            gradients, of_portals = gradients[:-count], gradients[-count:]
            self.inner.send_back(line, microbatch, of_portals)
        self.inner.send_back(edge, microbatch, gradients)

    def receive_back(self, edge: Edge, microbatch: int) -> Gradients:
        gradients = self.inner.receive_back(edge, microbatch)
        if edge.source not in self._out:
            return gradients
        num_given, of_output, named = self._places.pop((edge.source, microbatch))
        found: list[Tensor | None] = [None] * num_given
        of_portals: Gradients = ()
        places = [named[name] for line in reversed(self._out[edge.source]) for name in line.names]
        for line in reversed(self._out[edge.source]):
            of_portals += self.inner.receive_back(line, microbatch)
        for place, gradient in zip((*places, *of_output), (*of_portals, *gradients), strict=True):
            if gradient is not None:
                before = found[place]
                found[place] = gradient if before is None else before + gradient
        return tuple(found)

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        self._places.clear()
        return self.inner.abort(action, error)

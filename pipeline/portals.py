"""Carries portals between stages, beside a transport that carries everything else.

To the engine this is a transport like any other. What a stage with portals gives is taken apart here: its
output takes the transport's way to the next stage, each portal goes to the stages that pop it, once. What
comes back is added up for the stage that stashed, the last one that popped first, as in a plain backward.
Pipelines without portals have nothing of this.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gpipe_bench.pipeline.errors import ActionError
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.portals import leaving
from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.stage.portals import changed
from gpipe_bench.pipeline.stage.stage import Gradients
from gpipe_bench.pipeline.stage.tensors import version
from gpipe_bench.pipeline.stage.trees import Message, flatten, unflatten
from gpipe_bench.pipeline.transfers import Mark, Sent, Transfers
from gpipe_bench.pipeline.transport import BetweenDevices, InProcess, Plan, Transport


class Arrived(NamedTuple):
    """The portals of a line: tensors, and which of them need a gradient."""

    tensors: tuple[Tensor, ...]
    needs_grad: tuple[bool, ...]


class Lines(Protocol):
    """Carries the messages of lines."""

    def begin(self) -> None:
        """Starts a step, after the transport."""

    def send(self, line: Edge, microbatch: int, message: Arrived) -> None:
        """Hands portals to the stage where the line ends; waits for nobody."""

    def receive(self, line: Edge, microbatch: int) -> Arrived:
        """The portals, in tensors that nothing else has."""

    def send_gradients(self, line: Edge, microbatch: int, gradients: Gradients) -> None:
        """Hands their gradients back."""

    def receive_gradients(self, line: Edge, microbatch: int) -> Gradients:
        """The gradients of portals that were sent."""

    def release(self, stage: int, microbatch: int) -> None:
        """The stage is done with the micro-batch."""

    def finish(self) -> None:
        """Ends a step, after the transport."""

    def abort(self) -> None:
        """Drops everything."""


class _Sent(NamedTuple):
    tensors: tuple[Tensor, ...]
    needs_grad: tuple[bool, ...]
    versions: tuple[int, ...]
    marks: tuple[Mark, ...]


class LinesInProcess:
    """Between stages of this process on these devices; `transport` says whether tensors are copied."""

    def __init__(self, transport: InProcess, stage_devices: Sequence[torch.device]) -> None:
        self._transport, self._devices = transport, tuple(stage_devices)
        self._transfers = Transfers() if isinstance(transport, BetweenDevices) else None
        self._portals: dict[tuple[Edge, int], _Sent] = {}
        self._gradients: dict[tuple[Edge, int], tuple[Gradients, tuple[Mark, ...]]] = {}

    def begin(self) -> None:
        self.abort()

    def send(self, line: Edge, microbatch: int, message: Arrived) -> None:
        found, marks = self._carry(message.tensors, line.target)
        tensors = tuple([tensor for tensor in found if tensor is not None])
        self._portals[line, microbatch] = _Sent(
            tensors, message.needs_grad, tuple(map(version, tensors)), marks
        )

    def receive(self, line: Edge, microbatch: int) -> Arrived:
        tensors, needs_grad, versions, marks = self._portals.pop((line, microbatch))
        for name, tensor, before in zip(line.names, tensors, versions, strict=True):
            if version(tensor) != before:
                raise changed(name)
        if self._transfers is not None:
            self._transfers.receive(tensors, marks, self._devices[line.target])
        return Arrived(tuple([tensor.detach() for tensor in tensors]), needs_grad)

    def send_gradients(self, line: Edge, microbatch: int, gradients: Gradients) -> None:
        self._gradients[line, microbatch] = self._carry(gradients, line.source)

    def receive_gradients(self, line: Edge, microbatch: int) -> Gradients:
        gradients, marks = self._gradients.pop((line, microbatch))
        if self._transfers is not None:
            self._transfers.receive(gradients, marks, self._devices[line.source])
        return gradients

    def release(self, stage: int, microbatch: int) -> None:
        pass

    def finish(self) -> None:
        assert not self._portals, "a portal was sent that no action received"
        assert not self._gradients, "a gradient of a portal was sent that no action received"

    def abort(self) -> None:
        self._portals.clear()
        self._gradients.clear()

    def _carry(
        self, tensors: Sequence[Sent], receiver: int
    ) -> tuple[tuple[Tensor | None, ...], tuple[Mark, ...]]:
        if self._transfers is not None:
            return self._transfers.send(tensors, self._devices[receiver])
        return self._transport.carry(tensors, receiver), ()


class _Places(NamedTuple):
    """Where, among the tensors that a stage gave, are those of its output and each portal."""

    given: int
    output: tuple[int, ...]
    portals: dict[str, int]


class PortalTransport:
    """`inner` with the portals of `lines`, which are those of the whole pipeline."""

    def __init__(self, inner: Transport, lines: Sequence[Edge], carrier: Lines) -> None:
        self.inner, self._carrier = inner, carrier
        self._into: dict[int, list[Edge]] = {}
        self._out: dict[int, list[Edge]] = {}
        for line in lines:  # by source and target
            self._into.setdefault(line.target, []).append(line)
            self._out.setdefault(line.source, []).append(line)
        self._leaving = {stage: leaving(lines, stage) for stage in self._out}
        self._places: dict[tuple[int, int], _Places] = {}

    def begin(self, plan: Plan | None, signature: Hashable) -> Plan:
        self._places.clear()
        plan = self.inner.begin(plan, signature)
        self._carrier.begin()
        return plan

    def send_activation(self, stage: int, microbatch: int, message: Message) -> None:
        lines = self._out.get(stage)
        if lines is not None:
            message, places = self._take_apart(stage, message)
            self._places[stage, microbatch] = places[0]
            # Before the output, whose sender may be made to wait.
            for line, portals in zip(lines, places[1], strict=True):
                self._carrier.send(line, microbatch, portals)
        self.inner.send_activation(stage, microbatch, message)

    def _take_apart(
        self, stage: int, message: Message
    ) -> tuple[Message, tuple[_Places, tuple[Arrived, ...]]]:
        given, needs_grad = message.tensors, message.needs_grad
        output, *stashed = unflatten(given, message.structure)
        place = {id(tensor): position for position, tensor in enumerate(given)}
        tensors, structure = flatten(output)
        of_output = tuple([place[id(tensor)] for tensor in tensors])
        named = {name: place[id(tensor)] for name, tensor in zip(self._leaving[stage], stashed, strict=True)}
        portals = []
        for line in self._out[stage]:
            positions = [named[name] for name in line.names]
            portals.append(
                Arrived(tuple([given[i] for i in positions]), tuple([needs_grad[i] for i in positions]))
            )
        main = Message(
            tensors,
            structure,
            tuple([needs_grad[i] for i in of_output]),
            tuple([i for i, place in enumerate(of_output) if place in message.aliases]),
        )
        return main, (_Places(len(given), of_output, named), tuple(portals))

    def receive_activation(self, stage: int, microbatch: int) -> Message:
        message = self.inner.receive_activation(stage, microbatch)
        lines = self._into.get(stage)
        if lines is None:
            return message
        found = [self._carrier.receive(line, microbatch) for line in lines]
        arrived = [tensor for portals in found for tensor in portals.tensors]
        needs_grad = [needed for portals in found for needed in portals.needs_grad]
        tree = (unflatten(message.tensors, message.structure), *arrived)
        tensors, structure = flatten(tree)
        return Message(tensors, structure, (*message.needs_grad, *needs_grad), message.aliases)

    def send_gradient(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        for line in reversed(self._into.get(stage, ())):
            count = len(line.names)
            gradients, of_portals = gradients[:-count], gradients[-count:]
            self._carrier.send_gradients(line, microbatch, of_portals)
        self.inner.send_gradient(stage, microbatch, gradients)

    def receive_gradient(self, stage: int, microbatch: int) -> Gradients:
        gradients = self.inner.receive_gradient(stage, microbatch)
        lines = self._out.get(stage)
        if lines is None:
            return gradients
        places = self._places.pop((stage, microbatch))
        found: list[Tensor | None] = [None] * places.given
        for line in reversed(lines):
            of_portals = self._carrier.receive_gradients(line, microbatch)
            for name, gradient in zip(line.names, of_portals, strict=True):
                _add(found, places.portals[name], gradient)
        for place, gradient in zip(places.output, gradients, strict=True):
            _add(found, place, gradient)
        return tuple(found)

    def release(self, stage: int, microbatch: int) -> None:
        self._carrier.release(stage, microbatch)
        self.inner.release(stage, microbatch)

    def send_loss(self, loss: Tensor) -> None:
        self.inner.send_loss(loss)

    def finish(self) -> Tensor | None:
        loss = self.inner.finish()
        self._carrier.finish()
        return loss

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        self._places.clear()
        self._carrier.abort()
        return self.inner.abort(action, error)


def _add(found: list[Tensor | None], place: int, gradient: Tensor | None) -> None:
    if gradient is not None:
        before = found[place]
        found[place] = gradient if before is None else before + gradient


def with_portals(
    transport: Transport, lines: Sequence[Edge], stage_devices: Sequence[torch.device]
) -> PortalTransport:
    """The transport of a pipeline that has these lines."""
    of_ranks: Lines | None = getattr(transport, "lines", None)
    if of_ranks is None:
        if not isinstance(transport, InProcess):
            raise ValueError(
                f"transport is a {type(transport).__name__}, which carries no portals, and portal "
                f"{lines[0].names[0]!r} leads from stage {lines[0].source} to stage {lines[0].target}; give "
                "an InProcess, or leave transport out"
            )
        of_ranks = LinesInProcess(transport, stage_devices)
    return PortalTransport(transport, lines, of_ranks)

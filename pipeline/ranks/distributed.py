"""The transport between processes: point-to-point, one process per worker, along the edges of its stages.

Receives are posted ahead. A send is waited for only when later messages that take memory have left on the
same edge (`ends`). What a rank sends to itself stays where it is. Which shapes travel the ranks learn from
the first real micro-batch: the model is never run on made-up data, which would move its batch-normalization
averages and need memory of its own. The first rank numbers the kinds of steps it meets (shapes, dtypes,
training or not) and tells the number before each step, so the other ranks need not see the batch.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..clock import Clock, conditions
from ..errors import ActionError
from ..plan.edges import Direction, Edge, chain, rings_of, turns
from ..plan.schedule import Action, Kind, Schedule, shortened
from ..plan.timeline import Event, Timeline
from ..plan.walk import channels
from ..stage.stage import Gradients
from ..stage.trees import Message, sizes
from ..transport import InProcess, StepPlan
from .connect import (
    MOST_TENSORS,
    Network,
    along,
    close,
    first_tag,
    header_chain,
    loss_route,
    open_connections,
    refuse_too_many,
)
from .ends import (
    FRAMES_AHEAD,
    Agreement,
    Agreements,
    Control,
    MessageSpec,
    ReceiveQueue,
    Receiver,
    Sender,
    changed,
    conform,
)
from .failure import FailureDetector
from .wire import ObjectCollectives, TensorSpec, flat

_LOSS_TAG = 2**29


class PointToPoint:
    """The transport of one worker in a network whose rank k runs the stages of worker k.

    With `share_memory`, ranks on one host exchange CPU tensors through memory; `detector` knows of failures
    of all processes that end with this one. After a failure the pipeline's own connections are closed on all
    ranks; the process group is not touched.
    """

    def __init__(
        self,
        network: Network,
        schedule: Schedule,
        device: torch.device,
        detector: FailureDetector,
        *,
        share_memory: bool,
    ) -> None:
        self._accelerated = network.is_accelerated(device)
        refuse_too_many(schedule)
        self.rank, self.size = network.rank, network.size
        self._detector, self._synchronize = detector, partial(network.synchronize, device)
        self._connections = open_connections(network, device, detector, schedule, share_memory=share_memory)
        # Dropped, or when the process ends; without an accelerator nothing is on its way then.
        self.close = weakref.finalize(self, close, network, device, detector)
        self.close.atexit = self._accelerated or detector.is_grid
        self._full, self._device = schedule, device
        self._chain = chain(schedule.num_stages)
        self._agreements, self._agreement = Agreements(), Agreement(())
        self._training = True
        self._bounded = False  # whether a sender waits for its oldest messages
        self._own = InProcess()  # what this rank sends to itself
        self._control = Control(self._connections.control)
        self._header = along(header_chain(schedule), self.rank)
        self._route = loss_route(schedule, self.rank, accelerated=self._accelerated)
        self._loss: Tensor | None = None
        for source in {self._header.source, self._route.source} - {None}:
            self._control.expect(source)  # type: ignore[arg-type]
        self._receivers: dict[Direction, Receiver] = {}
        self._take_ends(schedule)

    def _take_ends(self, schedule: Schedule) -> None:
        """Makes this rank's ends of all edges of the schedule."""
        self._schedule = schedule
        backward = (Kind.B, Kind.I)
        self._kinds = {(a.stage, a.microbatch): a.kind for a in schedule if a.kind in backward}
        rings = rings_of(schedule, self._accelerated)
        self._senders: dict[Direction, Sender] = {}
        self._receivers, self._queues = {}, list[ReceiveQueue]()
        self._tags: dict[Direction, list[int]] = {}
        self._names: dict[Direction, str] = {}  # of what goes along an edge and back, for people
        for edge in self._chain:
            self._names[edge.source, False] = f"output of stage {edge.source}"
            self._names[edge.source, True] = f"gradient of the input of stage {edge.target}"
            for back in (False, True):
                count = schedule.num_microbatches
                tags = [first_tag((edge.source, back), microbatch, count) for microbatch in range(count)]
                self._tags[edge.source, back] = tags

        for source, target, back in channels(schedule):
            connection = self._connections.by_heading[back, target > source]
            order = [(stage - (not back), back) for stage, _ in turns(schedule, target, source, back=back)]
            if self.rank == source:
                sender = Sender(connection, target)
                self._senders.update((direction, sender) for direction in order)
            elif self.rank == target:
                queue = ReceiveQueue(connection, source, back=back)
                for direction in dict.fromkeys(order):
                    self._receivers[direction] = Receiver(
                        queue, rings[direction], self._device, self._tags[direction]
                    )
                queue.order = [self._receivers[direction] for direction in order]
                self._queues.append(queue)

    def refresh(self) -> None:
        """Forgets what the ranks agreed on."""
        self._agreements.forget()

    @property
    def shared_bytes(self) -> int:
        """Size of the receive buffers that lie in memory shared by two processes."""
        return self._connections.control.shared_bytes

    # A step

    def begin(self, plan: StepPlan | None, signature: Hashable) -> StepPlan:
        self._detector.refuse()
        if plan is None:
            assert self._header.source is not None
            header = self._control.receive(self._header.source, "step")
        else:
            header = self._agreements.number(signature), tuple(plan)
        for target in self._header.targets:
            self._control.send(target, "step", header)
        number, sent = header
        found = StepPlan(*sent)
        self._training, schedule = found.training, self._full
        if found.num_microbatches != schedule.num_microbatches:
            schedule = shortened(schedule, found.num_microbatches)
        if schedule is not self._schedule:
            self._take_ends(schedule)
        agreement = self._agreements.found.get(number)
        # A receiver that knows no spec yet has posted nothing, and may wait for something else than it is
        # sent. Forwards alone have no rings to say that no two workers who send to each other both wait.
        self._bounded = agreement is not None and (self._training or not schedule.placement)
        if agreement is None:
            agreement = self._agreements.add(number, sizes(found.examples, found.num_microbatches))
        self._agreement = agreement
        for direction, receiver in self._receivers.items():
            receiver.begin(agreement.specs[direction], agreement.lengths, training=self._training)
        for queue in self._queues:
            queue.position = queue.calls = 0
            if self._training or not queue.back:
                queue.post()
        return found

    def send(self, edge: Edge, microbatch: int, message: Message) -> None:
        """Sends an output to the stage at the edge's end."""
        direction = edge.source, False
        sender = self._senders.get(direction)
        if sender is None:
            self._own.send(edge, microbatch, message)
            return
        length, target = self._agreement.lengths[microbatch], Action(edge.target, Kind.F, microbatch)
        specs = self._agreement.specs[direction]
        spec = specs.get(length)
        if spec is None:
            if len(message.tensors) > MOST_TENSORS:
                raise ValueError(
                    f"{len(message.tensors)} tensors leave stage {edge.source}; at most {MOST_TENSORS} can"
                )
            spec = specs[length] = MessageSpec.of(message, self._names[direction])
            self._control.send(sender.target, (direction, length), spec, target)
        else:
            new = message.structure != spec.structure
            if message.needs_grad != spec.needs_grad or (new and not spec.varies):
                raise changed(f"what the {self._names[direction]} consists of and what needs a gradient")
            if message.aliases and not set(message.aliases) <= set(spec.aliases):
                raise changed(f"which tensors of the {self._names[direction]} share memory")
            if spec.varies:
                told = message.structure if new else None
                self._control.send(sender.target, (direction, length), told, target)
                if new:
                    spec = specs[length] = spec._replace(structure=message.structure)
        tensors = conform(message.tensors, spec, self._device, self._names[direction])
        sender.send(tensors, self._tags[direction][microbatch], target, bounded=self._bounded)
        if self._accelerated:
            self._go_on()

    def receive(self, edge: Edge, microbatch: int) -> Message:
        """Receives the message of the stage at the edge's start."""
        direction = edge.source, False
        receiver = self._receivers.get(direction)
        if receiver is None:
            return self._own.receive(edge, microbatch)
        length, source = self._agreement.lengths[microbatch], Action(edge.source, Kind.F, microbatch)
        specs = self._agreement.specs[direction]
        spec = specs.get(length)
        if spec is None:
            spec = self._control.receive(receiver.queue.source, (direction, length), source)
            specs[length] = spec
            if spec.varies:
                self._control.expect(receiver.queue.source, FRAMES_AHEAD + len(self._agreement.lengths))
        elif spec.varies:
            told = self._control.receive(receiver.queue.source, (direction, length), source)
            if told is not None:
                spec = specs[length] = spec._replace(structure=told)
        tensors: Any = receiver.take(microbatch, source)
        return Message(tensors, spec.structure, spec.needs_grad, spec.aliases)

    def send_back(self, edge: Edge, microbatch: int, gradients: Gradients) -> None:
        """Sends the gradients of a received message to the stage at the edge's start."""
        direction = edge.source, True
        sender = self._senders.get(direction)
        if sender is None:
            self._own.send_back(edge, microbatch, gradients)
            return
        length = self._agreement.lengths[microbatch]
        target = Action(edge.source, self._kinds[edge.source, microbatch], microbatch)
        specs = self._agreement.specs[direction]
        spec = specs.get(length)
        if spec is None:
            spec = specs[length] = MessageSpec(
                tuple([None if g is None else TensorSpec.of(g) for g in gradients])
            )
            self._control.send(sender.target, (direction, length), spec, target)
        tensors = conform(gradients, spec, self._device, self._names[direction])
        sender.send(tensors, self._tags[direction][microbatch], target, bounded=self._bounded)
        if self._accelerated:
            self._go_on()

    def receive_back(self, edge: Edge, microbatch: int) -> Gradients:
        """Receives the gradients of a sent message."""
        direction = edge.source, True
        receiver = self._receivers.get(direction)
        if receiver is None:
            return self._own.receive_back(edge, microbatch)
        length = self._agreement.lengths[microbatch]
        source = Action(edge.target, self._kinds[edge.target, microbatch], microbatch)
        specs = self._agreement.specs[direction]
        if length not in specs:
            specs[length] = self._control.receive(receiver.queue.source, (direction, length), source)
        return receiver.take(microbatch, source)

    def release(self, stage: int, microbatch: int) -> None:
        if self._accelerated:
            self._go_on()
        for direction in ((stage - 1, False), (stage, True)):
            if direction in self._receivers:
                self._receivers[direction].release(microbatch)

    def _go_on(self) -> None:
        """Counts a call; the time of some receives may have come."""
        self._detector.device_waits.note()
        for queue in self._queues:
            queue.calls += 1
            if self._training or not queue.back:
                queue.post()

    def send_loss(self, loss: Tensor) -> None:
        """Where the host waits for messages, the loss leaves at once, though backwards are still to come: in
        a V the last stage is on the first rank, whose row is the longest. On accelerators it needs all
        actions of its rank, and passes along when all else is done.
        """
        known, self._loss = self._agreement.loss, loss
        if known is not None:
            conform((loss,), MessageSpec((known,)), self._device, "loss")  # raises if it is another
        elif not self._accelerated:
            self._agreement.loss = TensorSpec.of(loss)
        if not self._accelerated and self._route.targets:
            content = tuple(loss.shape), loss.item(), loss.dtype
            for target in self._route.targets:
                self._control.send(target, "loss", content)

    def finish(self) -> Tensor | None:
        """When this returns, all sends are gone, or given to an accelerator, which `close` waits for."""
        loss, self._loss = self._loss, None
        if self._training and self._accelerated:
            loss = self._pass_on(loss)
        elif self._training and self._route.source is not None:
            shape, value, dtype = self._control.receive(self._route.source, "loss")
            loss = torch.full(shape, value, dtype=dtype, device=self._device)
        for sender in self._senders.values():
            sender.finish()
        self._control.finish()
        if self._accelerated:
            self._detector.device_waits.note()
        if self._detector.noticed:
            self._detector.refuse()  # or garbage would reach the optimizer
        return loss

    def _pass_on(self, loss: Tensor | None) -> Tensor:
        """The loss of a training step, from accelerator to accelerator."""
        (source, targets), known, connection = self._route, self._agreement.loss, self._connections.loss
        if source is None:
            assert loss is not None
            spec = known or TensorSpec.of(loss)
        else:
            spec = known or self._control.receive(source, "loss")
            buffer = connection.buffer(spec, source, self._device)
            connection.wait(connection.receive(buffer, source, _LOSS_TAG), None, source)
            loss = buffer.tensor
        self._agreement.loss = spec
        for target in targets:
            if known is None:
                self._control.send(target, "loss", spec)
            sender = Sender(connection, target)
            sender.send([flat(loss)], _LOSS_TAG)
            sender.finish()
        return loss

    # Outside of a step

    @contextmanager
    def collectives(self) -> Iterator[ObjectCollectives]:
        """For what all ranks do outside of a step; a rank that is missing there ends the pipeline as in one.

        Waits for the device, so that whatever it does after a failure elsewhere has been noticed.
        """
        try:
            self._synchronize()
            self._detector.refuse()
            yield self._connections.collectives
        except Exception as error:
            if isinstance(error, ActionError) or not self.is_let_down(error):
                raise
            raise self.abort(None, error) from error
        except BaseException as error:  # an interrupt: the others must not wait
            self.abort(None, error)
            raise

    @contextmanager
    def collectives_of_all(self) -> Iterator[ObjectCollectives]:
        """Same as `collectives`, but for all processes of the job."""
        with self.collectives():
            yield self._detector.object_collectives()

    def is_let_down(self, error: BaseException) -> bool:
        """Whether an error means that another rank is missing."""
        return self._detector.peer_error(error) is not None

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        return self._detector.end(action, error)


def gather_timeline(
    collectives: ObjectCollectives, clock: Clock, device: torch.device, schedule: Schedule
) -> Timeline:
    """The latest step of all ranks on one time axis; the clocks of hosts are used as they are."""
    # Actions are timed by a clock that never goes back; where it stands on the one that tells the time.
    offset_ns = time.time_ns() - time.perf_counter_ns()
    mine = (clock.events(offset_ns), f"{socket.gethostname()} {device}", conditions())
    ranks: list[tuple[tuple[Event, ...], str, dict[str, str]]] = collectives.gather(mine)
    return Timeline.of(
        [event for rank in ranks for event in rank[0]],
        schedule.num_stages,
        devices=[ranks[schedule.worker(stage)][1] for stage in range(schedule.num_stages)],
        conditions={name: "; ".join(dict.fromkeys(rank[2][name] for rank in ranks)) for name in ranks[0][2]},
        placement=schedule.placement,
    )

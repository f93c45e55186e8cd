"""How tensors move between processes: point-to-point, one process per worker.

Receives are posted ahead (`ring`), sends are not waited for until later messages that take memory have left
by the same way, and what goes there and back in a step is in `exchange`. Which shapes travel the ranks learn
from the first real micro-batch (`agreement`): the model is never run on made-up data, which would move its
batch-normalization averages and need memory of its own. The first rank numbers the kinds of steps it meets
(shapes, dtypes, training or not) and tells the number before each step, so the other ranks need not see the
batch.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe_bench.pipeline.errors import ActionError, PeerError, StoreError
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.schedule import Action, Schedule
from gpipe_bench.pipeline.ranks.connecting.network import Network, network_of
from gpipe_bench.pipeline.ranks.connecting.opening import open_connections
from gpipe_bench.pipeline.ranks.connecting.ties import Ties
from gpipe_bench.pipeline.ranks.exchange import Exchange
from gpipe_bench.pipeline.ranks.failures.job import Job
from gpipe_bench.pipeline.ranks.messages.agreement import Agreement, Agreements
from gpipe_bench.pipeline.ranks.messages.control import Header
from gpipe_bench.pipeline.ranks.messages.loss import Loss
from gpipe_bench.pipeline.ranks.messages.sharing import Shared, Sharing
from gpipe_bench.pipeline.ranks.portals import LinesBetweenRanks, refuse_portals
from gpipe_bench.pipeline.ranks.routes import loss_route
from gpipe_bench.pipeline.ranks.together import Together
from gpipe_bench.pipeline.stage.trees import sizes
from gpipe_bench.pipeline.transport import Plan, rows_for


class PointToPoint(Exchange):
    """The transport of one worker in a process group whose rank k runs the stages of worker k.

    `timeout_s` bounds every wait for another rank; with `share_memory`, ranks on one host exchange CPU
    tensors through memory; `portals` are the lines between all stages; `job` are all processes of the grid
    that the pipeline is a part of; `is_own` as in `rows_for`. After a failure the pipeline's own
    connections are closed on all ranks; `group` itself is not touched.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Network,
        schedule: Schedule,
        device: torch.device,
        *,
        timeout_s: float,
        share_memory: bool = True,
        portals: Sequence[Edge] = (),
        job: Job | None = None,
        is_own: bool = False,
    ) -> None:
        network = network_of(group)
        refuse_portals(portals, schedule, accelerated=network.is_accelerated(device))
        self.size = network.size
        ties = self._ties = Ties(network, device, timeout_s=timeout_s, job=job)
        accelerated = ties.is_accelerated
        try:
            control, self._together, ways, loss, of_portals = open_connections(
                ties, schedule, portals, share_memory=share_memory
            )
        except (PeerError, StoreError) as error:
            raise self.abort(None, error) from error
        except Exception as error:
            self.abort(None, error)  # the other ranks must not wait
            raise
        # Dropped, or when the process ends; without an accelerator nothing is on its way then.
        self.close = weakref.finalize(self, ties.close)
        self.close.atexit = accelerated or ties.job.is_grid
        super().__init__(
            network.rank, schedule, device, ways, control, accelerated=accelerated, portals=portals
        )
        self._full, self._is_own = schedule, is_own
        self._agreements = Agreements()
        self.lines: LinesBetweenRanks | None = None
        if portals:
            self.lines = LinesBetweenRanks(
                of_portals, self._control, portals, schedule, self.rank, device, self._gate
            )
        route = loss_route(schedule, self.rank, accelerated=accelerated)
        self._loss = Loss(loss, self._control, route, device, early=not accelerated)
        self._sharing = Sharing(self._control)
        _present.add(self)

    def follow(self, schedule: Schedule) -> None:
        """From the next step on, other rows for the same stages, on every rank: the connections stay."""
        assert schedule.placement == self._schedule.placement
        assert schedule.num_microbatches == self._full.num_microbatches
        self._full = schedule
        self._lay_out(schedule)

    def _lay_out(self, schedule: Schedule) -> None:
        for receiver in (*self._inputs.values(), *self._output_gradients.values()):
            receiver.close()
        self._schedule = schedule
        self._take_ends()
        if self.lines is not None:
            self.lines.follow(schedule, self._gate)

    def refresh(self) -> None:
        """Forgets what the ranks agreed on."""
        self._agreements.forget()

    @property
    def shared_bytes(self) -> int:
        """Of the buffers that messages come into, where these are memory that two processes map."""
        return self._ties.shared_bytes

    # A step

    def begin(self, plan: Plan | None, signature: Hashable) -> Plan:
        self._ties.refuse_after_failure()
        self._ties.refuse_after_notice()
        if plan is not None:
            number, shared = -1, Shared.NOTHING
            if plan.num_microbatches == self._full.num_microbatches or not self._is_own:
                number = self._agreements.number(signature)
                shared = self._sharing.announce(plan.shared)
            header = Header(number, plan.examples, plan.num_microbatches, plan.training, shared)
        else:
            header = self._control.receive_header()
        self._control.send_header(header, bounded=self._patient)
        number, examples, num_microbatches, self._training, told = header
        found = Plan(examples, num_microbatches, self._training)
        schedule = rows_for(self._full, found, is_own=self._is_own)
        if schedule is not self._schedule:
            self._lay_out(schedule)
        message = self._sharing.pass_on(Shared(told), plan and plan.shared, bounded=self._patient)
        agreement = self._agreements.find(number)
        self._patient = agreement is not None
        if agreement is None:
            lengths = sizes(examples, num_microbatches)
            agreement = self._agreements.add(Agreement(lengths, self._schedule.stages_of(self.rank)))
        self._agreement = agreement
        self._own.clear()
        if self._gate is not None:
            self._gate.begin(training=self._training)
        for turn in self._turns:
            turn.begin()
        for stage, receiver in self._inputs.items():
            outlines = agreement.of_stage[stage].activations
            receiver.begin(outlines, agreement.lengths, training=self._training)
        if self._training:
            for stage, receiver in self._output_gradients.items():
                receiver.begin(agreement.of_stage[stage].gradients, agreement.lengths, training=True)
            self._loss.post(agreement.loss)
        self._news.begin(agreement)
        if self.lines is not None:
            self.lines.take_up(agreement, training=self._training)
        return found._replace(shared=message)

    def send_loss(self, loss: Tensor) -> None:
        self._loss.send(loss, self._agreement)

    def finish(self) -> Tensor | None:
        """When this returns, all sends are gone if the host waits for messages; on an accelerator all are
        given to the device, which `close` waits for before the process may exit.
        """
        loss = self._loss.settle(self._agreement) if self._training else None
        for sender in self._senders.values():
            sender.finish()
        self._control.finish()
        self._news.finish()
        self._ties.refuse_after_notice()  # or garbage would reach the optimizer
        return loss

    @contextmanager
    def together(self) -> Iterator[Together]:
        """For what all ranks do outside of a step; a rank that is missing there ends the pipeline as in one.

        Waits for the device, so that whatever it does after a failure elsewhere has been noticed.
        """
        self._ties.refuse_after_failure()
        self._ties.synchronize()
        try:
            self._ties.refuse_after_notice()
            yield self._together
        except (RuntimeError, StoreError) as error:
            if isinstance(error, ActionError) or not self.is_let_down(error):
                raise
            raise self.abort(None, error) from error

    @contextmanager
    def all_together(self) -> Iterator[Together]:
        """The same for all processes of the job."""
        job = self._ties.job
        with self.together():
            try:
                yield job.together(self._ties.timeout_s)
            except PeerError as error:
                raise error.numbered(job.ranks) from error

    def is_let_down(self, error: BaseException) -> bool:
        """Whether an error says that another rank is missing."""
        return self._ties.let_down(error) is not None

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        return self._ties.abort(action, error)


_present: weakref.WeakSet[PointToPoint] = weakref.WeakSet()
_left: list[Ties] = []


def _leave_to_parent() -> None:
    """In a process that was forked, such as the worker of a `DataLoader`: the pipelines are its parent's."""
    for transport in tuple(_present):
        ties, close = transport._ties, transport.close
        close.detach()
        ties.leave()
        _left.append(ties)  # for ever: gloo would end by waiting for threads that are not there
        transport.__dict__ = {"_ties": ties, "close": close}  # the rest holds the memory of messages


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)

"""The discrete events of a step: which action ends next, and what that allows to start.

`replay` says what the arguments mean and checks them; here is the state of one simulation and the rules by
which it moves on, in the order of time. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from types import MappingProxyType

from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.links import FREE, Between, Link
from gpipe_bench.pipeline.plan.reductions import Bucket, Gather
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.timeline import Event, Span, Timeline


class _Worker:
    """Where a worker is in its row: it is running, waiting for a message, or through."""

    __slots__ = ("events", "free_s", "index", "next", "reduced_s", "rest", "running")

    def __init__(self, index: int, row: Sequence[Action], free_s: float) -> None:
        self.index = index
        self.rest = iter(row)
        self.next = next(self.rest, None)
        self.running = False  # an action has been started, and its end is in the heap
        self.free_s = free_s
        self.reduced_s: float = 0  # the end of its last reduction
        self.events: list[Event] = []


class _Stage:
    """What has been done on a stage, and what has arrived for it."""

    __slots__ = (
        "done", "gradients_s", "index", "inputs_s", "is_first", "is_last", "lines_in", "lines_out",
        "portals_s", "worker",
    )  # fmt: skip

    def __init__(self, index: int, num_stages: int, worker: _Worker) -> None:
        self.index, self.worker = index, worker
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.inputs_s: dict[int, float] = {}  # arrival by micro-batch
        self.gradients_s: dict[int, float] = {}
        self.done: dict[int, Kind] = {}  # the last action done on each micro-batch
        self.lines_in: list[Edge] = []
        self.lines_out: list[Edge] = []
        # Arrivals of what comes past stages, by line, micro-batch and whether it is gradients.
        self.portals_s: dict[tuple[int, int, bool], float] = {}


class Simulation:
    """The state of one replay; `duration_s` is of an action, the sequences are per boundary or per stage."""

    def __init__(
        self,
        schedule: Schedule,
        duration_s: Callable[[Action], float],
        link: Between,
        activation_bytes: Sequence[float],
        gradient_bytes: Sequence[float],
        setup_s: Sequence[float],
        update_s: Sequence[float],
        early_recompute: bool,
        gathers: Sequence[Sequence[Gather]] = (),
        reductions: Sequence[Sequence[Bucket]] = (),
        portals: Mapping[Edge, tuple[float, float]] = MappingProxyType({}),
    ) -> None:
        self.schedule, self.duration_s, self.link = schedule, duration_s, link
        self.early_recompute = early_recompute
        self.setup_s, self.update_s = setup_s, update_s
        self.workers = [
            _Worker(index, row, sum(setup_s[stage] for stage in schedule.stages_of(index)) if setup_s else 0)
            for index, row in enumerate(schedule.actions)
        ]
        self.stages = [
            _Stage(index, schedule.num_stages, self.workers[schedule.worker(index)])
            for index in range(schedule.num_stages)
        ]
        self.recomputed = schedule.recomputed
        self.heap: list[tuple[float, int]] = []
        self.messages: list[Span] = []
        # How long a message takes a link, by boundary; when the link from worker to worker is free: one for
        # each direction, or one for both.
        self.links: dict[tuple[int, int], Link] = {}
        ahead = [self._link(self.stages[each], self.stages[each + 1]) for each in range(len(self.stages) - 1)]
        back = [self._link(self.stages[each + 1], self.stages[each]) for each in range(len(self.stages) - 1)]
        self.activations_take_s = [
            a.occupied_s(size) for a, size in zip(ahead, activation_bytes, strict=True)
        ]
        self.gradients_take_s = [b.occupied_s(size) for b, size in zip(back, gradient_bytes, strict=True)]
        self.free_s: dict[tuple[int, int], float] = {}
        # How long the message of a line takes, there and back.
        self.lines_take_s = {
            line: (
                self._link(self.stages[line.source], self.stages[line.target]).occupied_s(there),
                self._link(self.stages[line.target], self.stages[line.source]).occupied_s(again),
            )
            for line, (there, again) in portals.items()
        }
        for line in portals:
            self.stages[line.source].lines_out.append(line)
            self.stages[line.target].lines_in.append(line)
        self.collectives = self._gathered(gathers)
        # Of the first forward of a stage: the share at which it needs what was fetched when.
        self.needs: dict[Action, list[tuple[float, float]]] = {}
        for stage, fetched in enumerate(gathers):
            first = next((action for action in schedule.row(stage) if action.kind is Kind.F), None)
            ends = [span.end_s for span in self.collectives if span.stage == stage]
            if first is not None and fetched:
                needed = [each.needed for each in fetched]
                self.needs[first] = list(zip(needed, ends, strict=True))
        # The last action of a stage that makes gradients of parameters, and what leaves inside it.
        self.buckets: dict[Action, Sequence[Bucket]] = {
            action: buckets for stage, buckets in enumerate(reductions) for action in schedule.row(stage)[-1:]
        }

    def run(self) -> Timeline:
        """`ValueError` where an action cannot start or takes no time that can be."""
        workers, heap = self.workers, self.heap
        for worker in workers:
            self._go_on(worker)
        while heap:
            worker = workers[heappop(heap)[1]]
            worker.running = False
            self._hand_over(self.stages[worker.events[-1].action.stage], worker.events[-1])
            self._go_on(worker)
        self._check_finished()
        events = [event for worker in workers for event in worker.events]
        events.sort(key=attrgetter("start_s"))  # equal starts stay ordered by worker
        return Timeline(
            tuple(events),
            self.schedule.num_stages,
            provenance="replayed",
            conditions=self._conditions(),
            work=self._work(),
            messages=tuple(self.messages),
            placement=self.schedule.placement,
            collectives=tuple(self.collectives),
        )

    def _go_on(self, worker: _Worker) -> None:
        """Start the worker's next action if all it needs is known; the start may lie ahead."""
        action = worker.next
        if action is None or worker.running:
            return
        stage, kind, microbatch = self.stages[action.stage], action.kind, action.microbatch
        arrival_s: float | None = 0
        if kind is Kind.F:
            if not stage.is_first:
                arrival_s = stage.inputs_s.get(microbatch)
        else:
            if kind is Kind.W:
                before = Kind.I
            else:
                again = kind is not Kind.R and microbatch in self.recomputed[action.stage]
                before = Kind.R if again else Kind.F
            if stage.done.get(microbatch) is not before:  # the stage's own work comes first
                return
            if not stage.is_last and (
                kind is Kind.B or kind is Kind.I or (kind is Kind.R and not self.early_recompute)
            ):
                arrival_s = stage.gradients_s.get(microbatch)
        if kind is not Kind.W and kind is not Kind.R and (stage.lines_in or stage.lines_out):
            arrival_s = self._with_portals(stage, kind, microbatch, arrival_s)
        if arrival_s is None:
            return
        duration_s = self.duration_s(action)
        if not 0 <= duration_s < inf:
            raise ValueError(f"{action} takes {duration_s} s; a duration must be finite and not negative")
        start_s = worker.free_s if worker.free_s > arrival_s else arrival_s
        end_s = start_s + duration_s
        if action in self.needs:
            end_s = self._fetched(self.needs[action], start_s, duration_s)
        worker.free_s = end_s
        worker.events.append(Event(action, start_s, end_s))
        worker.next = next(worker.rest, None)
        worker.running = True
        heappush(self.heap, (end_s, worker.index))

    def _hand_over(self, stage: _Stage, event: Event) -> None:
        """The action has ended: its message enters the link as soon as that is free."""
        action, end_s = event.action, event.end_s
        kind, microbatch = action.kind, action.microbatch
        stage.done[microbatch] = kind
        if action in self.buckets:
            self._reduce(stage, event)
        if kind is Kind.F:
            for line in stage.lines_out:  # before the output
                self._send_portals(line, stage, self.stages[line.target], event)
        elif kind is Kind.B or kind is Kind.I:
            for line in reversed(stage.lines_in):
                self._send_portals(line, stage, self.stages[line.source], event)
        if kind is Kind.F and not stage.is_last:
            target = self.stages[stage.index + 1]
            boundary, take_s, arrivals_s = stage.index, self.activations_take_s, target.inputs_s
        elif (kind is Kind.B or kind is Kind.I) and not stage.is_first:
            target = self.stages[stage.index - 1]
            boundary, take_s, arrivals_s = target.index, self.gradients_take_s, target.gradients_s
        else:
            return
        if self.link is FREE or target.worker is stage.worker:
            arrivals_s[microbatch] = end_s
        else:
            arrivals_s[microbatch] = self._arrival_s(stage, target, event, take_s[boundary])
        self._go_on(target.worker)

    def _link(self, stage: _Stage, target: _Stage) -> Link:
        """Between the workers of two stages; what stays on a worker takes no time."""
        if isinstance(self.link, Link):
            return self.link
        ends = (stage.worker.index, target.worker.index)
        if ends not in self.links:
            self.links[ends] = FREE if ends[0] == ends[1] else self.link(*ends)
        return self.links[ends]

    def _conditions(self) -> dict[str, str]:
        links = [self.link] if isinstance(self.link, Link) else [*self.links.values()]
        names = dict.fromkeys(link.name for link in links if link != FREE)
        return {"link": ", ".join(names)} if names else {}

    def _arrival_s(self, stage: _Stage, target: _Stage, event: Event, takes_s: float) -> float:
        """When a message that the action makes arrives: it enters the link as soon as that is free."""
        ends, link = (stage.worker.index, target.worker.index), self._link(stage, target)
        if link.shares_directions and ends[0] > ends[1]:
            ends = (ends[1], ends[0])
        free_s, end_s = self.free_s.get(ends, 0), event.end_s
        start_s = free_s if free_s > end_s else end_s
        free_s = self.free_s[ends] = start_s + takes_s
        arrival_s = free_s + link.latency_s
        self.messages.append(Span(f"{event.action}->{target.index}", stage.index, start_s, arrival_s))
        return arrival_s

    def _send_portals(self, line: Edge, stage: _Stage, target: _Stage, event: Event) -> None:
        """What goes past stages, or its gradient, has been made."""
        back = target.index == line.source
        if self.link is FREE or target.worker is stage.worker:
            arrival_s = event.end_s
        else:
            arrival_s = self._arrival_s(stage, target, event, self.lines_take_s[line][back])
        target.portals_s[line.number, event.action.microbatch, back] = arrival_s
        self._go_on(target.worker)

    @staticmethod
    def _with_portals(stage: _Stage, kind: Kind, microbatch: int, arrival_s: float | None) -> float | None:
        """When all is there that the action needs; None if something has yet to be made."""
        back = kind is not Kind.F
        for line in stage.lines_out if back else stage.lines_in:
            portal_s = stage.portals_s.get((line.number, microbatch, back))
            if portal_s is None or arrival_s is None:
                return None
            arrival_s = portal_s if portal_s > arrival_s else arrival_s
        return arrival_s

    def _reduce(self, stage: _Stage, event: Event) -> None:
        """The stage's buckets have left inside its last backward: one by one, as each was there."""
        worker = stage.worker
        for number, bucket in enumerate(self.buckets[event.action]):
            ready_s = event.start_s + bucket.ready * event.duration_s
            start_s = ready_s if ready_s > worker.reduced_s else worker.reduced_s
            worker.reduced_s = start_s + bucket.takes_s
            self.collectives.append(Span(f"reduce {number}", stage.index, start_s, worker.reduced_s))

    def _gathered(self, gathers: Sequence[Sequence[Gather]]) -> list[Span]:
        """What the stages fetch from the beginning of the step on, one after the other on each worker."""
        found = []
        for worker in self.workers if gathers else ():
            end_s: float = 0
            for stage in self.schedule.stages_of(worker.index):
                for number, gather in enumerate(gathers[stage]):
                    start_s, end_s = end_s, end_s + gather.takes_s
                    found.append(Span(f"gather {number}", stage, start_s, end_s))
        return found

    @staticmethod
    def _fetched(needs: Sequence[tuple[float, float]], start_s: float, duration_s: float) -> float:
        """The end of an action that waits inside for what it needs at each share of it."""
        late_s: float = 0
        for share, there_s in needs:
            at_s = start_s + late_s + share * duration_s
            if there_s > at_s:
                late_s += there_s - at_s
        return start_s + late_s + duration_s

    def _work(self) -> tuple[Span, ...]:
        found = []
        for worker in self.workers:
            before_s: float = 0
            after_s = worker.free_s if worker.free_s > worker.reduced_s else worker.reduced_s
            for stage in self.schedule.stages_of(worker.index):
                if self.setup_s:
                    found.append(Span("setup", stage, before_s, before_s + self.setup_s[stage]))
                    before_s = found[-1].end_s
                if self.update_s:
                    found.append(Span("update", stage, after_s, after_s + self.update_s[stage]))
                    after_s = found[-1].end_s
        found.sort(key=attrgetter("name"))  # set-ups first
        return tuple(span for span in found if span.duration_s)

    def _check_finished(self) -> None:
        stuck = [str(worker.next) for worker in self.workers if worker.next is not None]
        if stuck:
            raise ValueError(
                f"schedule {self.schedule.name!r} deadlocks: {', '.join(stuck)} wait for work that is never "
                "done; plan.validate says what is missing"
            )

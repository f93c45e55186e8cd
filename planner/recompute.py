"""Recompute only what must be: the choice that makes the shortest step under a cap of memory.

All or nothing wastes time where memory is short on one worker, for some of the time, only. Under 1F1B on K
stages, stage k holds K - k micro-batches, so what the first stage must recompute the last one may keep:

    nothing     stage 0 | F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3              3 graphs
    adaptive    stage 0 | F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 R2 B2 B2 .  B3 B3              2 graphs
    everything  stage 0 | F0 F1 F2 R0 .  .  .  .  B0 B0 F3 R1 B1 B1 R2 .  B2 B2 R3 .  B3 B3  1 graph

The choice does two things. A recomputation more makes no step shorter (the rows stay in their order, and what
waits for what is the same), and it frees the graph's bytes from F to R. So the shortest step is found from
the other end: everything is kept, and at the first action that holds too much, one of the graphs that are
alive there has to go; whichever is tried, the step with it is a bound for all choices that follow. Taking the
least bound first, the first choice that fits is the best one. For large schedules there are too many of them.
Then the graphs that fit are packed where a recomputation would cost most, and a bound says how far from the
best the result may be.

A choice is judged by sums, because a search judges many. A micro-batch waits for its backward as a graph or
as the inputs alone; all else in an action is there anyway. So the bytes of an action are a sum over the
micro-batches that wait, and a choice is judged by going once through a row:

    row of a stage      F0     F1     F2     R0     B0      ...        1 and 2 keep their graphs
    inputs that wait     0      i      i      i      0
    graphs that wait     0      0      g     2g     2g      beside what each action adds of its own

R stands right before its backward, so the others wait in R as they do in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, recomputed
from gpipe_bench.pipeline.plan.timeline import Timeline

if TYPE_CHECKING:
    from gpipe_bench.pipeline.memory.stage_bytes import StageBytes

EFFORT = 200_000
"""Actions that a search lays out, which takes seconds."""
_ROUNDS = 3  # of packing by the costs that the last choice has shown

Unit = tuple[int, int]
"""A stage and a micro-batch."""


@dataclass(frozen=True)
class Adapted:
    """The choice that was found.

    Args:
        schedule: the rows with the recomputations, `schedule.remat` is the choice.
        step_s: its replayed time.
        bound_s: no choice under the cap takes less; equal to `step_s` where this one is proved the best.
    """

    schedule: Schedule
    step_s: float
    bound_s: float


def adaptive(
    schedule: Schedule,
    lay_out: Callable[[Schedule], Timeline],
    held: Held,
    cap_bytes: float | Sequence[float],
    *,
    effort: int = EFFORT,
) -> Adapted:
    """What to recompute of `schedule`, so that no worker holds more than `cap_bytes` and a step is shortest.

    Args:
        schedule: its rows without recomputation (`remat="never"`).
        lay_out: the replayed step of a schedule with the same rows and recomputations right before backwards,
            such as `partial(replay, action_s=times, link=link)`. More recomputations must never make a step
            shorter, which holds for `replay` unless both directions share the link.
        held: the bytes on the workers.
        cap_bytes: of all workers, or of each.
        effort: actions to lay out before the best choice so far is taken.

    Raises:
        ValueError: nothing fits, with the worker that holds too much, or the schedule recomputes already.
    """
    return _Search(schedule, lay_out, held, cap_bytes, effort).run()


@dataclass(frozen=True)
class Held:
    """Bytes on the workers of one schedule.

    Args:
        inputs: of each stage, what a micro-batch without a graph takes while it waits.
        graphs: of each stage, the same with a graph.
        own: `own(action, recomputed)` is the most that the action's worker holds in it beside the inputs and
            graphs of other micro-batches that wait for B or I; whether its micro-batch is recomputed makes a
            difference in F, and R is asked for only then.
        at_rest: of each worker, the most outside of actions, as in the optimizer's step.
    """

    inputs: Sequence[float]
    graphs: Sequence[float]
    own: Callable[[Action, bool], float]
    at_rest: Sequence[float]


def held_by(
    stages: Sequence[StageBytes], schedule: Schedule, optimizer: str = "rmsprop", *, receive_ahead: int = 1
) -> Held:
    """The bytes of ``schedule``, which has no recomputation, for any choice of what to recompute: from the
    model of a whole step, once with all graphs kept and once with everything recomputed.

    Arguments and errors are those of `workers.peak_bytes`. ``receive_ahead`` is a number here: in one process
    when a message comes depends on what is recomputed.
    """
    from gpipe_bench.pipeline.memory.workers import action_bytes, workers_of

    stages = [each.shadowed() for each in stages]  # as if each recomputed something, which is little
    inputs = [
        (0 if stage == 0 else each.input_bytes) + each.changing_buffer_bytes
        for stage, each in enumerate(stages)
    ]
    graphs = [
        each.saved_bytes + (0 if stage == 0 else each.kept_input_bytes) for stage, each in enumerate(stages)
    ]
    again = recomputed(schedule, "always")
    kept = _own(schedule, graphs, action_bytes(stages, schedule, optimizer, receive_ahead=receive_ahead))
    free = _own(again, inputs, action_bytes(stages, again, optimizer, receive_ahead=receive_ahead))

    def own(action: Action, is_recomputed: bool) -> int:
        return (free if is_recomputed else kept)[action]

    workers = workers_of(stages, schedule, optimizer, receive_ahead)
    return Held(inputs, graphs, own, [worker.update().peak for worker in workers])


def _own(schedule: Schedule, each: Sequence[int], num_bytes: Mapping[Action, int]) -> dict[Action, int]:
    """The bytes of each action without those of the other micro-batches that wait for their backward."""
    found = {}
    for row in schedule.actions:
        waiting = 0
        for action in row:
            stage, kind = action.stage, action.kind
            if kind is Kind.R:  # its own waits no longer, as in the backward behind it
                found[action] = num_bytes[action] - waiting + each[stage]
                continue
            if kind in (Kind.B, Kind.I):
                waiting -= each[stage]
            found[action] = num_bytes[action] - waiting
            if kind is Kind.F:
                waiting += each[stage]
    return found


class _Search:
    """What has been found so far."""

    def __init__(
        self,
        schedule: Schedule,
        lay_out: Callable[[Schedule], Timeline],
        held: Held,
        cap_bytes: float | Sequence[float],
        effort: int,
    ) -> None:
        self.schedule, self.lay_out = schedule, lay_out
        number = schedule.num_workers
        caps = [*cap_bytes] if isinstance(cap_bytes, Sequence) else [cap_bytes] * number
        if len(caps) != number:
            raise ValueError(f"cap_bytes has {len(caps)} entries for {number} workers; give one per worker")
        self.caps = ", ".join(f"{cap:,.0f}" for cap in dict.fromkeys(caps))
        self.ledgers = [Ledger(schedule, worker, held, cap) for worker, cap in enumerate(caps)]
        self.units = frozenset(
            (stage, m) for stage in range(schedule.num_stages) for m in range(schedule.num_microbatches)
        )
        self.steps_left = effort // sum(map(len, schedule.actions))
        self.best: tuple[float, frozenset[Unit]] | None = None

    def run(self) -> Adapted:
        for ledger in self.ledgers:
            ledger.refuse()
        kept = self._step(frozenset())
        if self.best is not None:
            return self._result(kept.makespan_s)
        costs = _Costs(self.schedule, self._step(self.units))
        bound_s = max(kept.makespan_s, costs.bound_s(kept, self.ledgers))
        self._pack(costs, kept, bound_s)
        if self.best is None or self.best[0] > bound_s:
            bound_s = max(bound_s, self._branch(kept.makespan_s, costs.unhidden(kept)))
        if self.best is None:
            raise ValueError(
                f"no choice of what to recompute was found that fits under {self.caps} bytes; give a larger "
                "cap, or a larger effort"
            )
        return self._result(min(bound_s, self.best[0]))

    def _result(self, bound_s: float) -> Adapted:
        assert self.best is not None
        step_s, again = self.best
        return Adapted(recomputed(self.schedule, self._remat(again)), step_s, bound_s)

    def _remat(self, again: Set[Unit]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.schedule.num_stages)]
        for stage, microbatch in again:
            found[stage].append(microbatch)
        return found

    def _step(self, again: frozenset[Unit]) -> Timeline:
        """The step in which those are recomputed; the best one that fits is remembered."""
        self.steps_left -= 1
        timeline = self.lay_out(recomputed(self.schedule, self._remat(again)))
        is_better = self.best is None or (timeline.makespan_s, len(again)) < (self.best[0], len(self.best[1]))
        if is_better and all(ledger.excess(again) is None for ledger in self.ledgers):
            self.best = timeline.makespan_s, again
        return timeline

    def _pack(self, costs: _Costs, kept: Timeline, bound_s: float) -> None:
        """Keeps what fits, by what recomputations cost: equally much, or as they would in a step without any,
        and then as they do in the step that comes of it, and again.
        """
        last = self.schedule.num_microbatches - 1
        self._step(frozenset(unit for unit in self.units if unit[1] != last))
        # Those first that must spend most seconds on recomputations.
        order = sorted(self.ledgers, key=lambda ledger: (-costs.fewest_s(ledger), ledger.worker))
        tried: set[frozenset[Unit]] = set()
        for weights in (dict.fromkeys(self.units, 0.0), costs.unhidden(kept)):
            for _ in range(_ROUNDS):
                again = self._packed(order, weights, costs)
                if again in tried:
                    break
                tried.add(again)
                weights = costs.unhidden(self._step(again))
                if self.best is not None and self.best[0] <= bound_s:
                    return

    def _packed(
        self, order: Sequence[Ledger], weights: Mapping[Unit, float], costs: _Costs
    ) -> frozenset[Unit]:
        """What is recomputed where the workers pack one after another, those first that keep least, and each
        keeps rather what they keep: only a micro-batch that no stage recomputes passes without delay.
        """
        votes = [0.0] * self.schedule.num_microbatches
        again = self.units
        for ledger in order:
            own = {
                (stage, m): weights[stage, m] + votes[m]
                for stage in ledger.stages
                for m in range(self.schedule.num_microbatches)
            }
            found = ledger.packed(own)
            again -= found
            for _, microbatch in found:
                votes[microbatch] += costs.mean_s / self.schedule.num_stages
        return again

    def _branch(self, kept_s: float, weights: Mapping[Unit, float]) -> float:
        """Looks through the choices, those of the least bound first; returns the least bound left."""
        order = count()
        nodes = [(kept_s, next(order), frozenset[Unit](), frozenset[Unit]())]
        while nodes:
            least_s, _, again, settled = nodes[0]
            if self.steps_left <= 0 or (self.best is not None and least_s >= self.best[0]):
                return least_s
            heappop(nodes)
            alive = next(found for ledger in self.ledgers if (found := ledger.excess(again)) is not None)
            for unit in sorted(set(alive) - settled, key=lambda unit: (weights[unit], unit)):
                if self.steps_left <= 0:
                    return least_s
                more = again | {unit}
                bound_s = self._step(more).makespan_s
                if self.best is None or bound_s < self.best[0]:
                    heappush(nodes, (bound_s, -next(order), more, settled))
                settled |= {unit}
        return inf if self.best is None else self.best[0]


class _Costs:
    """What recomputations cost in a step, from the step that recomputes everything."""

    def __init__(self, schedule: Schedule, everything: Timeline) -> None:
        self.schedule = schedule
        self.again_s = {
            (event.action.stage, event.action.microbatch): event.duration_s
            for event in everything.events
            if event.action.kind is Kind.R
        }
        self.mean_s = sum(self.again_s.values()) / len(self.again_s)

    def fewest_s(self, ledger: Ledger) -> float:
        """No fewer seconds of recomputations does the worker need."""
        quickest_s = min(seconds for (stage, _), seconds in self.again_s.items() if stage in ledger.stages)
        return ledger.fewest_recomputed() * quickest_s

    def unhidden(self, timeline: Timeline) -> dict[Unit, float]:
        """Of each recomputation, done or not, the seconds that would not pass while the worker waits for the
        gradient anyway.
        """
        ends_s = {event.action: event.end_s for event in timeline.events}
        found = {}
        for worker in range(self.schedule.num_workers):
            free_s = 0.0
            for event in timeline.of_worker(worker):
                stage, kind, microbatch = event.action.stage, event.action.kind, event.action.microbatch
                if kind is Kind.R:
                    continue
                if kind in (Kind.B, Kind.I):
                    sent_s = max(
                        ends_s.get(Action(stage + 1, Kind.I, microbatch), 0.0),
                        ends_s.get(Action(stage + 1, Kind.B, microbatch), 0.0),
                    )
                    unit = (stage, microbatch)
                    found[unit] = max(0.0, self.again_s[unit] - max(0.0, sent_s - free_s))
                free_s = event.end_s
        return found

    def bound_s(self, kept: Timeline, ledgers: Sequence[Ledger]) -> float:
        """No step takes less: each worker begins no earlier than where nothing is recomputed, has its actions
        and so many recomputations to do, and after its last gradient the stages before have theirs.
        """
        chains_s = self._chains(kept)
        bounds_s = []
        for ledger in ledgers:
            row = kept.of_worker(ledger.worker)
            last = max(i for i, event in enumerate(row) if event.action.kind in (Kind.B, Kind.I))
            until_s = row[0].start_s + sum(event.duration_s for event in row[: last + 1])
            until_s += self.fewest_s(ledger)
            after_s = sum(event.duration_s for event in row[last + 1 :])
            bounds_s.append(until_s + max(after_s, chains_s[row[last].action]))
        return max(bounds_s)

    def _chains(self, kept: Timeline) -> dict[Action, float]:
        """Seconds of the backwards of the stages before, by the backward that they follow."""
        backwards = sorted(
            (event.action.stage, event.action, event.duration_s)
            for event in kept.events
            if event.action.kind in (Kind.B, Kind.I)
        )
        longest: dict[Unit, float] = {}  # with its own
        found = {}
        for stage, action, seconds in backwards:
            found[action] = longest.get((stage - 1, action.microbatch), 0.0)
            longest[stage, action.microbatch] = found[action] + seconds
        return found


class Ledger:
    """The row of one worker with its bytes and its cap.

    A micro-batch that waits for its backward is an interval of the row, as wide as its graph's bytes (`extra`
    beyond its inputs), from its F (`first`) to its B or I (`last`). `recomputed` and `kept` are the room for
    graphs of other micro-batches in each action, where all others are recomputed, if its own is or is not.
    """

    def __init__(self, schedule: Schedule, worker: int, held: Held, cap_bytes: float) -> None:
        self.worker, self.held, self.cap_bytes = worker, held, cap_bytes
        self.row = schedule.actions[worker]
        self.stages = schedule.stages_of(worker)
        self.extra = {stage: held.graphs[stage] - held.inputs[stage] for stage in self.stages}
        self.first: dict[Unit, int] = {}
        self.last: dict[Unit, int] = {}
        self.recomputed: list[float] = []
        self.kept: list[float] = []
        waiting = 0.0
        for position, action in enumerate(self.row):
            unit = (action.stage, action.microbatch)
            if action.kind in (Kind.B, Kind.I):
                self.last[unit] = position
                waiting -= held.inputs[action.stage]
            room = cap_bytes - waiting
            self.kept.append(room - held.own(action, False))
            own = held.own(action, True)
            if action.kind is Kind.F:
                self.first[unit] = position
                waiting += held.inputs[action.stage]
            elif action.kind is not Kind.W:
                own = max(own, held.own(Action(action.stage, Kind.R, action.microbatch), True))
            self.recomputed.append(room - own)

    def refuse(self) -> None:
        """`ValueError` where there is too much whatever is recomputed, with the worst moment."""
        most, when = self.held.at_rest[self.worker], "outside of its actions"
        waiting = 0.0
        for action in self.row:
            least = min(self.held.inputs[action.stage], self.held.graphs[action.stage])
            if action.kind in (Kind.B, Kind.I):
                waiting -= least
            num_bytes = waiting + min(self.held.own(action, False), self.held.own(action, True))
            if num_bytes > most:
                most, when = num_bytes, f"at {action}"
            if action.kind is Kind.F:
                waiting += least
        if most > self.cap_bytes:
            raise ValueError(
                f"worker {self.worker} holds at least {most:,.0f} bytes {when}, whatever is recomputed, and "
                f"the cap is {self.cap_bytes:,.0f}; use more stages or micro-batches, or a larger cap"
            )

    def excess(self, again: Set[Unit]) -> tuple[Unit, ...] | None:
        """The graphs that wait in the first action that holds too much if those are recomputed, or are made
        by it: unless one of them is recomputed, it stays too much. None where all fit.
        """
        for num_bytes, alive in self._walk(again):
            if num_bytes > self.cap_bytes:
                return tuple(alive)
        return None

    def peak_bytes(self, again: Set[Unit]) -> float:
        """Most bytes if those are recomputed."""
        most = max(num_bytes for num_bytes, _ in self._walk(again))
        return max(most, self.held.at_rest[self.worker])

    def _walk(self, again: Set[Unit]) -> Iterator[tuple[float, Mapping[Unit, None]]]:
        """The bytes of each action and the micro-batches that keep their graphs, its own in F."""
        inputs, graphs, own, waiting = self.held.inputs, self.held.graphs, self.held.own, 0.0
        alive: dict[Unit, None] = {}
        for action in self.row:
            stage, kind = action.stage, action.kind
            unit = (stage, action.microbatch)
            recomputed = unit in again
            if kind is Kind.F:
                if not recomputed:
                    alive[unit] = None
                yield own(action, recomputed) + waiting, alive
                waiting += (inputs if recomputed else graphs)[stage]
                continue
            if kind is not Kind.W:
                waiting -= (inputs if recomputed else graphs)[stage]
                alive.pop(unit, None)
                if recomputed:
                    before = Action(stage, Kind.R, action.microbatch)
                    yield own(before, True) + waiting, alive
            yield own(action, recomputed) + waiting, alive

    def packed(self, weights: Mapping[Unit, float]) -> frozenset[Unit]:
        """The micro-batches that can keep their graphs under the cap: those that cannot be recomputed, then
        the dearest, of equally dear ones those whose backward comes first.
        """
        room = [*self.recomputed]
        found = set()

        def rank(unit: Unit) -> tuple[bool, float, int]:
            last = self.last[unit]
            return self.recomputed[last] >= 0, -weights[unit], last

        for unit in sorted(self.last, key=rank):
            first, last, extra = self.first[unit], self.last[unit], self.extra[unit[0]]
            change = self.kept[first] - self.recomputed[first]
            if room[first] + change < 0 or min(room[first + 1 : last], default=inf) < extra:
                continue
            found.add(unit)
            room[first] += change
            room[last] += self.kept[last] - self.recomputed[last]
            for position in range(first + 1, last):
                room[position] -= extra
        return frozenset(found)

    def fewest_recomputed(self) -> int:
        """No fewer of the worker's micro-batches must be recomputed under its cap: where all intervals are
        equally wide and equally dear, taking the one that ends first keeps as many as can be kept.
        """
        extra = min(self.extra.values())
        if extra <= 0:
            return 0
        room = [max(pair) for pair in zip(self.recomputed, self.kept, strict=True)]
        number = 0
        for unit in sorted(self.last, key=self.last.__getitem__):
            first, last = self.first[unit], self.last[unit]
            if self.kept[first] < 0 or min(room[first + 1 : last], default=inf) < extra:
                number += 1
                continue
            for position in range(first + 1, last):
                room[position] -= extra
        return number

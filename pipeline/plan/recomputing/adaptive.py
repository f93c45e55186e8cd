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
best the result may be. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

from gpipe_bench.pipeline.plan.recomputing.held import Held, Ledger, Unit
from gpipe_bench.pipeline.plan.recomputing.packing import fewest_recomputed, packed
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, recomputed
from gpipe_bench.pipeline.plan.timeline import Event, Timeline

EFFORT = 200_000
"""Actions that a search lays out, which takes seconds."""
_ROUNDS = 3  # of packing by the costs that the last choice has shown


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

    @property
    def is_best(self) -> bool:
        """Whether no choice is known to be possible that takes less."""
        return self.step_s <= self.bound_s


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


def _remat(schedule: Schedule, again: Set[Unit]) -> tuple[tuple[int, ...], ...]:
    """The choice per stage."""
    found: list[list[int]] = [[] for _ in range(schedule.num_stages)]
    for stage, microbatch in again:
        found[stage].append(microbatch)
    return tuple(tuple(sorted(each)) for each in found)


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
        if is_better and not any(ledger.excess(again) for ledger in self.ledgers):
            self.best = timeline.makespan_s, again
        return timeline

    def _pack(self, costs: _Costs, kept: Timeline, bound_s: float) -> None:
        """Keeps what fits, by what recomputations cost: equally much, or as they would in a step without any,
        and then as they do in the step that comes of it, and again.
        """
        last = self.schedule.num_microbatches - 1
        self._step(frozenset(unit for unit in self.units if unit[1] != last))
        order = costs.by_need(self.ledgers)
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
            found = packed(ledger, own)
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
            excess = next(found for ledger in self.ledgers if (found := ledger.excess(again)))
            for unit in sorted(set(excess.alive) - settled, key=lambda unit: (weights[unit], unit)):
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

    def by_need(self, ledgers: Sequence[Ledger]) -> list[Ledger]:
        """Those first that must spend most seconds on recomputations."""
        return sorted(ledgers, key=lambda ledger: (-self._fewest_s(ledger), ledger.worker))

    def _fewest_s(self, ledger: Ledger) -> float:
        """No fewer seconds of recomputations does the worker need."""
        quickest_s = min(seconds for (stage, _), seconds in self.again_s.items() if stage in ledger.stages)
        return fewest_recomputed(ledger) * quickest_s

    def unhidden(self, timeline: Timeline) -> dict[Unit, float]:
        """Of each recomputation, done or not, the seconds that would not pass while the worker waits for the
        gradient anyway.
        """
        ends_s = {event.action: event.end_s for event in timeline.events}
        found = {}
        for row in self._rows(timeline):
            free_s = 0.0
            for event in row:
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
        for row, ledger in zip(self._rows(kept), ledgers, strict=True):
            last = max(i for i, event in enumerate(row) if event.action.kind in (Kind.B, Kind.I))
            until_s = row[0].start_s + sum(event.duration_s for event in row[: last + 1])
            until_s += self._fewest_s(ledger)
            after_s = sum(event.duration_s for event in row[last + 1 :])
            bounds_s.append(until_s + max(after_s, chains_s[row[last].action]))
        return max(bounds_s)

    def _rows(self, timeline: Timeline) -> list[list[Event]]:
        rows: list[list[Event]] = [[] for _ in range(self.schedule.num_workers)]
        for event in timeline.events:
            rows[self.schedule.worker(event.action.stage)].append(event)
        return rows

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

"""The schedule for times that somebody has measured: split or whole, by what a step takes with either.

What a split backward gains depends on the model: on large layers I and W together cost what B costs, on small
ones a good deal more. So both kinds of schedules are generated, halves that need not be apart are joined, and
the replay of the measured times decides. Every candidate takes the micro-batches of a stage in order, so
whatever is chosen, the gradients have the same bits. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf
from statistics import median

from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.remat import Remat, of_stages
from gpipe_bench.pipeline.plan.replay import SLOTS, ActionTimes, duration_of, replay
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.schedules.fusing import fused
from gpipe_bench.pipeline.plan.schedules.generator import generate, most_alive_of
from gpipe_bench.pipeline.plan.timeline import Event, Timeline

NAME = "auto"


def automatic(
    placement: Sequence[int],
    num_microbatches: int,
    action_s: ActionTimes,
    *,
    link_s: float = 0.0,
    remat: Remat = "never",
    most_alive: int | None = None,
) -> Schedule:
    """The shortest schedule that is found for these times.

    Args:
        placement: the worker of each stage.
        num_microbatches: M.
        action_s: seconds by kind, or by stage and kind, as for `replay`: of F; of R on stages that recompute;
            of B, of I and W, or of all three, and then it is chosen between them.
        link_s: seconds of a message between two workers.
        remat: which micro-batches are recomputed.
        most_alive: as for `generate`.

    Raises:
        ValueError: a size or a time that cannot be, a kind without a time, or a cap that is too tight.
    """
    link = Link("measured", latency_s=link_s)
    place, times = tuple(placement), _table(placement, num_microbatches, action_s, remat)
    kinds = {kind for _, kind in times}
    candidates = [
        generate(
            place, num_microbatches, times, link,
            remat=remat, split=split, most_alive=most_alive, in_order=True, name=NAME,
        )
        for split in (True, False)
        if ({Kind.I, Kind.W} if split else {Kind.B}) <= kinds
    ]  # fmt: skip
    if {Kind.I, Kind.W, Kind.B} <= kinds:
        candidates[0] = fused(candidates[0], times, link)

    def merit(schedule: Schedule) -> tuple[float, int]:
        return replay(schedule, times, link).makespan_s, max(map(most_alive_of, schedule.actions))

    return min(candidates, key=merit)


def first_of_all(
    placement: Sequence[int], num_microbatches: int, *, split: bool, remat: Remat, most_alive: int | None
) -> Schedule:
    """What to run while nothing has been measured: the schedule for equal stages, under the same cap."""
    return generate(
        placement, num_microbatches, SLOTS,
        remat=remat, split=split, most_alive=most_alive, in_order=True, name=NAME,
    )  # fmt: skip


def times_of(timelines: Iterable[Timeline]) -> dict[tuple[int, Kind], float]:
    """Seconds of each kind of action on each stage: the median of all that were measured."""
    found: dict[tuple[int, Kind], list[float]] = {}
    for timeline in timelines:
        for event in timeline.events:
            found.setdefault((event.action.stage, event.action.kind), []).append(event.duration_s)
    return {key: median(seconds) for key, seconds in found.items()}


def link_s_of(timelines: Iterable[Timeline]) -> float:
    """Seconds of a message between two workers: how much later than its sender's action one starts for which
    a worker was waiting, the median of all such; 0 where nobody has waited.
    """
    waits = [wait_s for timeline in timelines for wait_s in _waits(timeline)]
    return max(0.0, median(waits)) if waits else 0.0


def _waits(timeline: Timeline) -> Iterator[float]:
    ends = {event.action: event.end_s for event in timeline.events}
    for worker in range(timeline.num_workers):
        mine = timeline.stages_of(worker)
        for before, event in pairwise(timeline.of_worker(worker)):
            sources = [s for s in _senders(event, timeline.num_stages) if s.stage not in mine and s in ends]
            if sources and ends[sources[0]] > before.end_s:
                yield event.start_s - ends[sources[0]]


def _senders(event: Event, num_stages: int) -> list[Action]:
    """The actions that may have sent what the event's action waits for."""
    stage, kind, microbatch = event.action.stage, event.action.kind, event.action.microbatch
    if kind is Kind.F and stage:
        return [Action(stage - 1, Kind.F, microbatch)]
    if kind in (Kind.B, Kind.I) and stage + 1 < num_stages:
        return [Action(stage + 1, other, microbatch) for other in (Kind.B, Kind.I)]
    return []


def _table(
    placement: Sequence[int], num_microbatches: int, action_s: ActionTimes, remat: Remat
) -> dict[tuple[int, Kind], float]:
    """What is known, by stage and kind; ValueError if it is not enough."""
    duration_s, stages = duration_of(action_s), range(len(placement))
    again = of_stages(remat, len(placement), num_microbatches)
    required = [(s, Kind.F) for s in stages] + [(s, Kind.R) for s in stages if again[s]]
    found = {(stage, kind): duration_s(Action(stage, kind, 0)) for stage, kind in required}
    ways: list[ValueError] = []
    for kinds in ((Kind.I, Kind.W), (Kind.B,)):
        try:
            found.update({(s, kind): duration_s(Action(s, kind, 0)) for s in stages for kind in kinds})
        except ValueError as error:
            ways.append(error)
    if len(ways) == 2:
        raise ways[1]
    for (stage, kind), seconds in found.items():
        if not 0 <= seconds < inf:
            action = Action(stage, kind, 0)
            raise ValueError(f"{action} takes {seconds} s; a duration must be finite and not negative")
    return found

"""The schedule for times that somebody has measured: split or whole, by what a step takes with either.

What a split backward gains depends on the model: on large layers I and W together cost what B costs, on small
ones a good deal more. So both kinds of schedules are generated, halves that need not be apart are joined, and
the replay of the measured times decides. Every candidate takes the micro-batches of a stage in order, so
whatever is chosen, or when, the gradients have the same bits.

A pipeline with `schedule="auto"` measures the times itself (`Calibration`), in steps that train: no layer
runs on made-up data, or once more, so nothing of the model moves that would not have moved anyway, and no
step is lost. The first steps split their backwards, the next ones do not, so both are known. Then the first
rank chooses and tells all others.

    step      0         1     2      3      4      5 ...
    backward  split     split split  whole  whole  as chosen
              warm-up   timed timed  timed  timed

Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from statistics import median

from gpipe_bench.pipeline.plan.generate import fused, generate, most_alive_of
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.remat import Remat, of_stages
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import SLOTS, ActionTimes, duration_of, replay
from gpipe_bench.pipeline.plan.timeline import Timeline

NAME = "auto"
WARM_UP_STEPS = 1
TIMED_STEPS = 2  # of each kind of backward


class Calibration:
    """Which schedule the next step takes, until there are times enough to choose one.

    `link_s` is given where it need not be measured; `most_alive` as for `generate`. While nothing has been
    measured, the schedules are those for equal stages, under the same cap.
    """

    def __init__(
        self,
        placement: tuple[int, ...],
        num_microbatches: int,
        remat: Remat,
        *,
        link_s: float | None = None,
        most_alive: int | None = None,
    ) -> None:
        self._placement, self._num_microbatches, self._remat = placement, num_microbatches, remat
        self._link_s, self._most_alive = link_s, most_alive
        split, whole = [
            generate(
                placement, num_microbatches, SLOTS,
                remat=remat, split=split, most_alive=most_alive, in_order=True, name=NAME,
            )
            for split in (True, False)
        ]  # fmt: skip
        self._steps = [split] * (WARM_UP_STEPS + TIMED_STEPS) + [whole] * TIMED_STEPS
        self._timelines: list[Timeline] = []
        self.is_due = False  # a step was taken that has not been noted

    @property
    def schedule(self) -> Schedule:
        """What the next step takes."""
        return self._steps[len(self._timelines)]

    def note(self, timeline: Timeline) -> bool:
        """Keeps what a step took; whether that was the last one to be timed."""
        self.is_due = False
        self._timelines.append(timeline)
        return len(self._timelines) == len(self._steps)

    def choose(self) -> Schedule:
        """The schedule for the times of all steps but the warm-up."""
        timed = self._timelines[WARM_UP_STEPS:]
        return automatic(
            self._placement,
            self._num_microbatches,
            times_of(timed),
            link_s=link_s_of(timed) if self._link_s is None else self._link_s,
            remat=self._remat,
            most_alive=self._most_alive,
        )


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
    waits = []
    for timeline in timelines:
        events, last = {event.action: event for event in timeline.events}, timeline.num_stages - 1
        for worker in range(timeline.num_workers):
            mine = timeline.stages_of(worker)
            for before, event in pairwise(timeline.of_worker(worker)):
                stage, kind, microbatch = event.action
                if kind is Kind.F and stage:
                    sender, kinds = stage - 1, [Kind.F]
                elif kind in (Kind.B, Kind.I) and stage < last:
                    sender, kinds = stage + 1, [Kind.B, Kind.I]
                else:
                    continue
                sources = (events.get(Action(sender, each, microbatch)) for each in kinds)
                source = next(filter(None, sources), None)
                if sender not in mine and source is not None and source.end_s > before.end_s:
                    waits.append(event.start_s - source.end_s)
    return max(0.0, median(waits)) if waits else 0.0

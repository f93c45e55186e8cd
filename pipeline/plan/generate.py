"""The shortest schedule that is found for measured times, a placement, a link and a memory cap.

Finding the best schedule is a hard problem, and integer programs that solve it take minutes for sizes of
interest. A list scheduler (`list_scheduler`) takes milliseconds, so a few of them with different preferences
are run, and the named schedules of the same placement are candidates too: what comes out is never longer than
any of them, and shorter where stages are uneven. All candidates are replayed over the real link; the shortest
one that keeps to the memory cap is taken (`generate`).

What a split backward gains depends on the model: on large layers I and W together cost what B costs, on small
ones a good deal more. So `automatic` generates both kinds of schedules, joins halves that need not be apart,
and lets the replay decide. Its candidates take the micro-batches of a stage in order, so whatever is chosen,
or when, the gradients have the same bits. A pipeline with `schedule="auto"` measures the times itself
(`Calibration`), in steps that train: no layer runs on made-up data, or once more, so nothing of the model
moves that would not have moved anyway, and no step is lost. Then the first rank chooses and tells all others.

    step      0         1     2      3      4      5 ...
    backward  split     split split  whole  whole  as chosen
              warm-up   timed timed  timed  timed

Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import inf
from statistics import median

from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.list_scheduler import Policy, StuckError, Work, rows
from gpipe_bench.pipeline.plan.named import NAMED, named
from gpipe_bench.pipeline.plan.remat import Remat, of_stages
from gpipe_bench.pipeline.plan.schedule import (
    Action,
    Kind,
    Schedule,
    begins_of,
    check_sizes,
    ends_of,
    validate,
)
from gpipe_bench.pipeline.plan.simulate import SLOTS, ActionTimes, duration_of, replay
from gpipe_bench.pipeline.plan.timeline import Timeline

WARM_UP_STEPS = 1
TIMED_STEPS = 2  # of each kind of backward


def generate(
    placement: Sequence[int],
    num_microbatches: int,
    action_s: ActionTimes = SLOTS,
    link: Link = FREE,
    *,
    remat: Remat = "never",
    split: bool = True,
    most_alive: int | None = None,
    activation_bytes: Sequence[float] = (),
    gradient_bytes: Sequence[float] = (),
    in_order: bool = False,
    name: str = "generated",
) -> Schedule:
    """A valid schedule for these circumstances.

    Args:
        placement: the worker of each stage, such as `vee(4)`.
        num_microbatches: M.
        action_s: seconds of F, R, I and W (or B) of each stage, as for `replay`.
        link: what is between any two workers.
        remat: which micro-batches are recomputed: "never", "always" or "except_last", or one choice per stage
            (`plan.remat`).
        split: whether the backward is I and W, or else B.
        most_alive: graphs of a stage and a micro-batch that a worker may hold at a time, from F, or R where
            the micro-batch is recomputed, to the end of the backward; None for any number.
        activation_bytes: of one micro-batch over each boundary, as for `replay`.
        gradient_bytes: the same for the way back; as many as forward if not given.
        in_order: whether each stage has to take the micro-batches in their order, so that gradients have the
            bits of `1f1b`; without, a schedule that drains in reverse may come out.
        name: of the schedule.

    Raises:
        ValueError: a size, a placement or a duration that cannot be, or no schedule under the cap is found.
    """
    place = tuple(placement)
    check_sizes(len(place), num_microbatches, remat)
    missing = set(range(max(place) + 1)) - set(place)
    if min(place) < 0 or missing:
        raise ValueError(f"the placement {place} has gaps; workers count from 0, and each holds a stage")
    if most_alive is not None and most_alive < 1:
        raise ValueError(f"most_alive is {most_alive}; a worker holds at least 1 graph")
    duration_s, stages = duration_of(action_s), range(len(place))
    kinds = [Kind.F, *((Kind.I, Kind.W) if split else (Kind.B,))]
    seconds = {kind: [duration_s(Action(stage, kind, 0)) for stage in stages] for kind in kinds}
    again = of_stages(remat, len(place), num_microbatches)
    if any(again):
        seconds[Kind.R] = [duration_s(Action(stage, Kind.R, 0)) if again[stage] else 0.0 for stage in stages]
    messages = [activation_bytes or [0.0] * (len(place) - 1)]
    messages.append(gradient_bytes or messages[0])
    ahead_s, back_s = [[link.latency_s + link.occupied_s(each) for each in sizes] for sizes in messages]
    work = Work(place, num_microbatches, remat, split, seconds, ahead_s, back_s)
    best: tuple[float, int] | None = None
    found: Schedule | None = None
    for candidate in _candidates(work, name, most_alive):
        alive = max(map(most_alive_of, candidate.actions))
        if (in_order and not _in_order(candidate)) or (most_alive is not None and alive > most_alive):
            continue
        timeline = replay(
            candidate, action_s, link, activation_bytes=activation_bytes, gradient_bytes=gradient_bytes
        )
        if best is None or (timeline.makespan_s, alive) < best:
            best, found = (timeline.makespan_s, alive), candidate
    if found is None:
        raise ValueError(
            f"no schedule found in which a worker holds at most {most_alive} graphs; give a larger "
            f"most_alive, at least {max(place.count(worker) for worker in place)}, one per stage of a worker"
        )
    validate(found)
    return found


def _candidates(work: Work, name: str, most_alive: int | None) -> Iterator[Schedule]:
    """The named schedules of the same placement and kinds of actions, then those of the list scheduler."""
    place, number = work.placement, work.num_microbatches
    num_workers = max(place) + 1
    per_worker, over = divmod(len(place), num_workers)
    for known, (_, fixed) in NAMED.items():
        if over or fixed not in (None, per_worker):
            continue
        schedule = named(known, num_workers, number, remat=work.remat, stages_per_worker=per_worker)
        homes = schedule.placement or tuple(range(num_workers))
        if homes == place and {action.kind for action in schedule} <= set(work.seconds):
            yield replace(schedule, name=name)
    # Preferences that win somewhere: the lead of 1F1B, with and without groups, both orders, patient fillers
    # or none.
    alive = None if most_alive is None else (most_alive,) * num_workers
    groups = (num_workers, None) if len(place) > num_workers else (None,)
    lead = tuple(place.count(worker) * (num_workers - worker) for worker in range(num_workers))
    policies = [Policy(alive=alive, lead=lead, patience=patience) for patience in (1.0, 0.0)]
    policies += [
        Policy(alive=alive, group=group, forwards_first=forwards_first, patience=patience)
        for group, forwards_first, patience in product(groups, (False, True), (1.0, 0.0))
    ]
    for policy in policies:
        try:
            actions = rows(work, policy)
        except StuckError:
            continue
        yield Schedule(name, len(place), number, work.remat, actions, place)


def _in_order(schedule: Schedule) -> bool:
    """Whether every stage takes each kind of action, and ends its backwards, in the micro-batches' order."""
    for stage in range(schedule.num_stages):
        row = schedule.row(stage)
        orders = [[a for a in row if a.kind is kind] for kind in (Kind.F, Kind.R, Kind.W)]
        orders += [[a for a in row if a.kind in (Kind.B, Kind.I)], ends_of(row)]
        if any(order != sorted(order, key=lambda a: a.microbatch) for order in orders):
            return False
    return True


def most_alive_of(row: tuple[Action, ...]) -> int:
    """Graphs that a worker holds at a time, of a stage and a micro-batch each: from F, or from R where the
    micro-batch is recomputed, to the end of the backward.
    """
    begins, ends = set(begins_of(row)), set(ends_of(row))
    alive = most = 0
    for action in row:
        alive += action in begins
        most = max(most, alive)
        alive -= action in ends
    return most


def fused(schedule: Schedule, action_s: ActionTimes, link: Link = FREE) -> Schedule:
    """`schedule` with B for I and W of a stage wherever these are neighbours and the step gets no longer.

    I and W cost a little more together than B does, on small layers a good deal. Where nobody waits for the
    gradient that I sends, as on the first stage, or where it comes early enough anyway, a W right behind its
    I gains nothing: `0I2 0W2 0I3 0W3` becomes `0B2 0B3`. What it gains the replay of measured times decides.

    `action_s` are the seconds of all kinds that occur and of B, as for `replay`. Stages are looked at one by
    one, from the first: it has nobody to send a gradient to. What a worker keeps at a time stays the same.
    """
    makespan_s = replay(schedule, action_s, link).makespan_s
    for stage in range(schedule.num_stages):
        worker = schedule.worker(stage)
        row: list[Action] = []
        for action in schedule.actions[worker]:
            if (
                action.kind is Kind.W
                and action.stage == stage
                and row[-1:] == [Action(stage, Kind.I, action.microbatch)]
            ):
                row[-1] = Action(stage, Kind.B, action.microbatch)
            else:
                row.append(action)
        if len(row) == len(schedule.actions[worker]):
            continue
        actions = (*schedule.actions[:worker], tuple(row), *schedule.actions[worker + 1 :])
        candidate = replace(schedule, actions=actions)
        candidate_s = replay(candidate, action_s, link).makespan_s
        if candidate_s <= makespan_s:
            schedule, makespan_s = candidate, candidate_s
    return schedule


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
            remat=remat, split=split, most_alive=most_alive, in_order=True, name="auto",
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
                remat=remat, split=split, most_alive=most_alive, in_order=True, name="auto",
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

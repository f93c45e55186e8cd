"""The shortest schedule that is found for measured times, a placement, a link and a memory cap.

Finding the best schedule is a hard problem, and integer programs that solve it take minutes for sizes of
interest. A list scheduler (`listing`) takes milliseconds, so a few of them with different preferences are
run, and the named schedules of the same placement are candidates too: what comes out is never longer than any
of them, and shorter where stages are uneven. All candidates are replayed over the real link; the shortest one
that keeps to the memory cap is taken. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.remat import Remat, of_stages
from gpipe_bench.pipeline.plan.replay import SLOTS, ActionTimes, duration_of, replay
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, check_sizes, ends_of
from gpipe_bench.pipeline.plan.schedules.known import NAMED, named
from gpipe_bench.pipeline.plan.schedules.listing import Policy, StuckError, Work, rows
from gpipe_bench.pipeline.plan.validate import validate


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
        placement: the worker of each stage, such as `placement.vee(4)`.
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
    work = _work(place, num_microbatches, action_s, link, remat, split, activation_bytes, gradient_bytes)
    best: tuple[float, int] | None = None
    found: Schedule | None = None
    for candidate in _candidates(work, name, most_alive):
        if in_order and not _in_order(candidate):
            continue
        timeline = replay(
            candidate, action_s, link, activation_bytes=activation_bytes, gradient_bytes=gradient_bytes
        )
        alive = max(map(most_alive_of, candidate.actions))
        if (most_alive is None or alive <= most_alive) and (
            best is None or (timeline.makespan_s, alive) < best
        ):
            best, found = (timeline.makespan_s, alive), candidate
    if found is None:
        raise ValueError(
            f"no schedule found in which a worker holds at most {most_alive} graphs; give a larger "
            f"most_alive, at least {max(place.count(worker) for worker in place)}, one per stage of a worker"
        )
    validate(found)
    return found


def _work(
    place: tuple[int, ...],
    num_microbatches: int,
    action_s: ActionTimes,
    link: Link,
    remat: Remat,
    split: bool,
    activation_bytes: Sequence[float],
    gradient_bytes: Sequence[float],
) -> Work:
    duration_s, stages = duration_of(action_s), range(len(place))
    kinds = [Kind.F, *((Kind.I, Kind.W) if split else (Kind.B,))]
    again = of_stages(remat, len(place), num_microbatches)
    boundaries = len(place) - 1
    forward = list(activation_bytes) or [0.0] * boundaries
    backward = list(gradient_bytes) or forward
    seconds = {kind: [duration_s(Action(stage, kind, 0)) for stage in stages] for kind in kinds}
    if any(again):
        seconds[Kind.R] = [duration_s(Action(stage, Kind.R, 0)) if again[stage] else 0.0 for stage in stages]
    return Work(
        place,
        num_microbatches,
        remat,
        split,
        seconds,
        [link.latency_s + link.occupied_s(num_bytes) for num_bytes in forward],
        [link.latency_s + link.occupied_s(num_bytes) for num_bytes in backward],
    )


def _candidates(work: Work, name: str, most_alive: int | None) -> Iterator[Schedule]:
    num_workers = max(work.placement) + 1
    for known in NAMED:
        per_worker, over = divmod(len(work.placement), num_workers)
        if over or NAMED[known].stages_per_worker not in (None, per_worker):
            continue
        schedule = named(
            known,
            num_workers,
            work.num_microbatches,
            remat=work.remat,
            stages_per_worker=per_worker,
        )
        placement = schedule.placement or tuple(range(num_workers))
        if placement == work.placement and _kinds(schedule) <= set(work.seconds):
            yield Schedule(
                name,
                schedule.num_stages,
                work.num_microbatches,
                work.remat,
                schedule.actions,
                schedule.placement,
            )
    for policy in _policies(work.placement, num_workers, most_alive):
        try:
            actions = rows(work, policy)
        except StuckError:
            continue
        yield Schedule(name, len(work.placement), work.num_microbatches, work.remat, actions, work.placement)


def _kinds(schedule: Schedule) -> set[Kind]:
    return {action.kind for row in schedule.actions for action in row}


def _in_order(schedule: Schedule) -> bool:
    """Whether every stage takes each kind of action in the order of the micro-batches."""
    latest: dict[tuple[int, Kind], int] = {}
    for action in schedule:
        key = (action.stage, Kind.I if action.kind is Kind.B else action.kind)
        if latest.get(key, -1) > action.microbatch:
            return False
        latest[key] = action.microbatch
    ends: dict[int, int] = {}
    for action in (end for row in schedule.actions for end in ends_of(row)):
        if ends.get(action.stage, -1) > action.microbatch:
            return False
        ends[action.stage] = action.microbatch
    return True


def _policies(placement: tuple[int, ...], num_workers: int, most_alive: int | None) -> Iterator[Policy]:
    """Preferences that win somewhere: with and without groups, both orders, patient fillers or none, and the
    lead of 1F1B.
    """
    alive = None if most_alive is None else (most_alive,) * num_workers
    groups = (num_workers, None) if len(placement) > num_workers else (None,)
    lead = tuple(placement.count(worker) * (num_workers - worker) for worker in range(num_workers))
    yield Policy(alive=alive, lead=lead, patience=1.0)
    yield Policy(alive=alive, lead=lead)
    for group, forwards_first, patience in product(groups, (False, True), (1.0, 0.0)):
        yield Policy(alive=alive, group=group, forwards_first=forwards_first, patience=patience)


def most_alive_of(row: tuple[Action, ...]) -> int:
    """Graphs that a worker holds at a time, of a stage and a micro-batch each: from F, or from R where the
    micro-batch is recomputed, to the end of the backward.
    """
    again = {(a.stage, a.microbatch) for a in row if a.kind is Kind.R}
    halved = {(a.stage, a.microbatch) for a in row if a.kind is Kind.W}
    alive = most = 0
    for action in row:
        key = (action.stage, action.microbatch)
        alive += action.kind is (Kind.R if key in again else Kind.F)
        most = max(most, alive)
        alive -= action.kind is (Kind.W if key in halved else Kind.B)
    return most

"""The shortest schedule that is found for measured times, a placement, a link and a memory cap.

Finding the best schedule is a hard problem, and integer programs that solve it take minutes for sizes of
interest. A list scheduler (`list_scheduler`) takes milliseconds, so a few of them with different preferences
are run, and the named schedules of the same placement are candidates too: what comes out is never longer than
any of them, and shorter where stages are uneven. All candidates are replayed over the real link; the shortest
one that keeps to the memory cap is taken (`generate`).

The times are given: `planner` chooses schedule, cut and re-materialization for a model and machines. Only the
standard library is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from .links import FREE, Link
from .list_scheduler import Policy, StuckError, Work, rows
from .named import NAMED, named
from .remat import Remat, of_stages
from .schedule import Action, Kind, Schedule, begins_of, check_sizes, ends_of, validate
from .simulate import SLOTS, ActionTimes, duration_of, replay


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
    name: str = "generated",
) -> Schedule:
    """A valid schedule for these circumstances.

    Args:
        placement: the worker of each stage, such as `vee(4)`.
        num_microbatches: M.
        action_s: seconds of F, R, I and W (or B) of each stage, as for `replay`.
        link: what is between any two workers.
        remat: which micro-batches are recomputed: "never", "always" or "except_last", or one name for
            each stage.
        split: whether the backward is I and W, or else B.
        most_alive: graphs of a stage and a micro-batch that a worker may hold at a time, from F, or R where
            the micro-batch is recomputed, to the end of the backward; None for any number.
        activation_bytes: of one micro-batch over each boundary, as for `replay`.
        gradient_bytes: the same for the way back; as many as forward if not given.
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
        if most_alive is not None and alive > most_alive:
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

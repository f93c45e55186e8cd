"""All named schedules by their names, as functions of the numbers of workers and micro-batches.

Schedules with one stage per worker, and those whose stages go round the workers in a loop, are made here,
those in a V in `vee`. With v stages each, a worker waits v times less for its first and its last micro-batch
than with one stage of the same layers: the bubble is (W - 1)(F + B) / v for W workers. The price is v times
as many messages. Nobody waits for the gradients of the weights, so where the backward is split (arXiv
2401.10241), W may fill what would be idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from .names import suggestion
from .remat import Remat
from .schedule import Action, Kind, Schedule, check_sizes, recomputed
from .vee import check_workers, dualpipe_v, v_half, v_min, zb_v


def named(
    name: str,
    num_workers: int,
    num_microbatches: int,
    *,
    remat: Remat = "never",
    stages_per_worker: int | None = None,
) -> Schedule:
    """The schedule of that name, with a recomputation right before the backward where `remat` says so.

    Args:
        num_workers: processes or devices.
        num_microbatches: M.
        remat: "never", "always" or "except_last", or one of them for each stage.
        stages_per_worker: of schedules that allow any number; 2 if not given.

    Raises:
        ValueError: an unknown name, a size below 1, or a number of stages that the schedule does not have.
    """
    if name not in NAMED:
        close = suggestion(str(name), NAMED)
        raise ValueError(f"schedule is {name!r}{close}; choose one of {', '.join(NAMED)}")
    check_workers(num_workers)
    make, fixed = NAMED[name]
    if fixed is None:
        schedule = make(num_workers, num_microbatches, stages_per_worker or 2)
    elif stages_per_worker not in (None, fixed):
        raise ValueError(
            f"schedule {name!r} has {fixed} stage{'s' * (fixed > 1)} per worker, not {stages_per_worker}; "
            f"leave stages_per_worker out, or choose one of "
            f"{', '.join(each for each, known in NAMED.items() if known.stages_per_worker is None)}"
        )
    else:
        schedule = make(num_workers, num_microbatches)
    return schedule if remat == "never" else recomputed(schedule, remat)


def naive(num_stages: int, num_microbatches: int = 1, remat: Remat = "never") -> Schedule:
    """Model parallelism without a pipeline: one micro-batch is anywhere in the model at any time.

    With one micro-batch, the paper's naive baseline; with more, they go through end to end one after another.
    """
    check_sizes(num_stages, num_microbatches, remat)
    rows = [
        [Action(s, kind, m) for m in range(num_microbatches) for kind in (Kind.F, Kind.B)]
        for s in range(num_stages)
    ]
    return recomputed(_schedule("naive", num_microbatches, rows), remat)


def gpipe(num_stages: int, num_microbatches: int, remat: Remat = "always") -> Schedule:
    """GPipe (paper section 2.3): all forwards, then all backwards in reverse order of the micro-batches.

    The reverse drain is what lets the last micro-batch keep its activations (`except_last`): its backward
    follows its own forward on the last stage at once.
    """
    check_sizes(num_stages, num_microbatches, remat)
    rows = []
    for s in range(num_stages):
        row = [Action(s, Kind.F, m) for m in range(num_microbatches)]
        rows.append([*row, *(Action(s, Kind.B, m) for m in reversed(range(num_microbatches)))])
    return recomputed(_schedule("gpipe", num_microbatches, rows), remat)


def one_f_one_b(num_stages: int, num_microbatches: int, remat: Remat = "never") -> Schedule:
    """One forward, one backward (PipeDream-flush): at most K - k micro-batches are in flight on stage k.

    Stage k warms up with as many forwards as there are stages behind it, then alternates; M < K is legal.
    """
    check_sizes(num_stages, num_microbatches, remat)
    return recomputed(_in_turn("1f1b", num_stages, num_microbatches), remat)


def zb_h1(num_workers: int, num_microbatches: int) -> Schedule:
    """The memory of 1F1B, K micro-batches on every worker, and a third of its bubble: (K - 1)(F + I - W).

    1F1B with I in the place of B, and W later: on worker k as many micro-batches later as the worker holds
    fewer forwards than the first one does. So every worker keeps as many activations as the first.

    3 workers, M = 4:

        stage 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return _in_turn("zb-h1", num_workers, num_microbatches, late=range(num_workers))


def zb_h2(num_workers: int, num_microbatches: int) -> Schedule:
    """No bubble but the skew: the forwards lead twice as far, so that no worker waits between its first and
    its last action, for 2K - 1 micro-batches on every worker. With fewer of them, as far as they go.

    3 workers, M = 5:

        stage 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        stage 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        stage 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    further = max(0, min(num_workers - 1, num_microbatches - num_workers))
    late = [worker + min(worker, further) for worker in range(num_workers)]
    return _in_turn("zb-h2", num_workers, num_microbatches, lead=2, late=late)


def _in_turn(
    name: str, num_workers: int, num_microbatches: int, *, lead: int = 1, late: Sequence[int] | None = None
) -> Schedule:
    """F as far ahead as `lead` per worker behind, then F and a backward in turn; the backward whole, or I
    with W `late` micro-batches later, by worker.
    """
    check_sizes(num_workers, num_microbatches, "never")
    rows = []
    for worker in range(num_workers):
        warm_up = min(num_microbatches, lead * (num_workers - 1 - worker))
        row = [Action(worker, Kind.F, m) for m in range(warm_up)]
        for m in range(num_microbatches):
            if m + warm_up < num_microbatches:
                row.append(Action(worker, Kind.F, m + warm_up))
            row.append(Action(worker, Kind.B if late is None else Kind.I, m))
            if late is not None and m >= late[worker]:
                row.append(Action(worker, Kind.W, m - late[worker]))
        if late is not None:
            left = range(max(0, num_microbatches - late[worker]), num_microbatches)
            row += [Action(worker, Kind.W, m) for m in left]
        rows.append(row)
    return _schedule(name, num_microbatches, rows)


def loop(num_workers: int, stages_per_worker: int) -> tuple[int, ...]:
    """The worker of each stage when the stages go round the workers. `ValueError` for sizes below 1."""
    check_workers(num_workers, stages_per_worker)
    return tuple(range(num_workers)) * stages_per_worker


def interleaved(num_workers: int, num_microbatches: int, stages_per_worker: int = 2) -> Schedule:
    """Megatron's interleaved 1F1B (arXiv 2104.04473, section 2.2): groups of micro-batches go through all
    stages of a worker before the next group comes.

    A group has as many micro-batches as there are workers, so that the first of a group is back when the last
    has left. Where M is no multiple, the first groups take what is over, one each or more.

    2 workers with stages 0 2 and 1 3, M = 3, which is one group:

        worker 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   2B0 2B0 .   2B1 2B1 .   2B2 2B2 0B0 0B0 0B1 0B1 0B2 0B2
        worker 1 | .   1F0 1F1 1F2 3F0 3B0 3B0 3F1 3B1 3B1 3F2 3B2 3B2 1B0 1B0 1B1 1B1 1B2 1B2
    """
    check_sizes(num_workers, num_microbatches, "never")
    placement, turns = loop(num_workers, stages_per_worker), range(stages_per_worker)
    num_groups = max(1, num_microbatches // num_workers)
    size, over = divmod(num_microbatches, num_groups)
    forwards: list[tuple[int, int]] = []  # (turn, micro-batch)
    backwards: list[tuple[int, int]] = []
    first = 0
    for group in range(num_groups):
        microbatches = range(first, first + size + (group < over))
        forwards += [(turn, m) for turn in turns for m in microbatches]
        backwards += [(turn, m) for turn in reversed(turns) for m in microbatches]
        first = microbatches.stop
    largest = size + (over > 0)
    rows = []
    for worker in range(num_workers):
        warm_up = 2 * (num_workers - 1 - worker) + (stages_per_worker - 1) * largest
        taken = [(Kind.F, *each) for each in forwards[:warm_up]]
        for position, backward in enumerate(backwards):
            taken += [(Kind.F, *each) for each in forwards[warm_up + position : warm_up + position + 1]]
            taken.append((Kind.B, *backward))
        rows.append([Action(turn * num_workers + worker, kind, m) for kind, turn, m in taken])
    return _schedule("interleaved", num_microbatches, rows, placement)


def breadth_first(num_workers: int, num_microbatches: int, stages_per_worker: int = 2) -> Schedule:
    """Breadth-first (arXiv 2211.05953): all micro-batches through a worker's first stage, then all through
    its second, and back in reverse order. GPipe in a loop: the bubble of `interleaved`, the activations of
    GPipe; a stage's weights are wanted in two runs, which is what sharded parameters ask for.

    2 workers with stages 0 2 and 1 3, M = 2:

        worker 0 | 0F0 0F1 2F0 2F1 .   .   .   2B1 2B1 2B0 2B0 0B1 0B1 0B0 0B0
        worker 1 | .   1F0 1F1 3F0 3F1 3B1 3B1 3B0 3B0 1B1 1B1 1B0 1B0
    """
    check_sizes(num_workers, num_microbatches, "never")
    placement = loop(num_workers, stages_per_worker)
    rows = []
    for worker in range(num_workers):
        stages = range(worker, len(placement), num_workers)
        there = [Action(stage, Kind.F, m) for stage in stages for m in range(num_microbatches)]
        rows.append([*there, *(Action(stage, Kind.B, m) for stage, _, m in reversed(there))])
    return _schedule("breadth-first", num_microbatches, rows, placement)


def _schedule(
    name: str, num_microbatches: int, rows: Sequence[Sequence[Action]], placement: tuple[int, ...] = ()
) -> Schedule:
    actions = tuple(map(tuple, rows))
    return Schedule(name, len(placement or rows), num_microbatches, "never", actions, placement)


SCHEDULES: dict[str, Callable[..., Schedule]] = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}
"""Schedules with one stage per worker and a whole backward, which every experiment can run."""


class Named(NamedTuple):
    """A schedule's rows for numbers of workers and micro-batches, without recomputation; `stages_per_worker`
    is None where any number will do.
    """

    make: Callable[..., Schedule]
    stages_per_worker: int | None


NAMED: dict[str, Named] = {
    **{name: Named(partial(make, remat="never"), 1) for name, make in SCHEDULES.items()},
    "interleaved": Named(interleaved, None),
    "breadth-first": Named(breadth_first, None),
    "zb-h1": Named(zb_h1, 1),
    "zb-h2": Named(zb_h2, 1),
    "zb-v": Named(zb_v, 2),
    "v-half": Named(v_half, 2),
    "v-min": Named(v_min, 2),
    "dualpipe-v": Named(dualpipe_v, 2),
}

"""All named schedules by their names, as functions of the number of workers.

`plan.schedule.SCHEDULES` holds those that give a worker one stage and do not split the backward, which every
experiment can run; here are all, for whoever says how many workers there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from gpipe_bench.pipeline.plan.remat import Remat
from gpipe_bench.pipeline.plan.schedule import SCHEDULES, Kind, Schedule, derived
from gpipe_bench.pipeline.plan.schedules.controllable import v_half, v_min
from gpipe_bench.pipeline.plan.schedules.loops import breadth_first, interleaved
from gpipe_bench.pipeline.plan.schedules.recomputed import recomputed
from gpipe_bench.pipeline.plan.schedules.vees import dualpipe_v, zb_v
from gpipe_bench.pipeline.plan.schedules.zero_bubble import zb_h1, zb_h2


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
        remat: "never", "always" or "except_last", or one choice per stage (`plan.remat`).
        stages_per_worker: of schedules that allow any number; 2 if not given.

    Raises:
        ValueError: an unknown name, a size below 1, or a number of stages that the schedule does not have.
    """
    if name not in NAMED:
        raise ValueError(f"schedule is {name!r}; choose one of {', '.join(NAMED)}")
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}; a pipeline has at least 1 worker")
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


@derived
def shortened(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The named schedule for fewer micro-batches, on the same workers; of a list of micro-batches that a
    stage recomputes, those that there are. What was made for measured times ("auto") keeps its rows, without
    the micro-batches that there are not.
    """
    remat = schedule.remat
    if not isinstance(remat, str):
        remat = tuple(
            choice if isinstance(choice, str) else tuple(m for m in choice if m < num_microbatches)
            for choice in remat
        )
    if schedule.name in NAMED:
        per_worker = schedule.num_stages // schedule.num_workers
        return named(
            schedule.name, schedule.num_workers, num_microbatches, remat=remat, stages_per_worker=per_worker
        )
    rows = tuple(
        tuple(a for a in row if a.microbatch < num_microbatches and a.kind is not Kind.R)
        for row in schedule.actions
    )
    rest = replace(schedule, num_microbatches=num_microbatches, remat="never", actions=rows)
    return recomputed(rest, remat)

"""Any schedule with re-materialization: R as early as its place in the row allows.

R needs nothing from another worker, so it stands right before the backward for which it builds the graph,
and starts while the worker waits for the gradient. Where the backward is split, the graph lives until W: as
many graphs are alive as a schedule puts off weights, and all other micro-batches keep their inputs alone.

ZB-H1 on 3 workers, M = 3, two slots of bubble instead of the eight of 1F1B that recomputes late:

    stage 0 | F0 F1 F2 R0 .  .  I0 W0 R1 I1 W1 R2 I2 W2
    stage 1 | .  F0 F1 R0 .  I0 F2 R1 I1 W0 R2 I2 W1 W2
    stage 2 | .  .  F0 R0 I0 F1 R1 I1 F2 R2 I2 W0 W1 W2
"""

from __future__ import annotations

from dataclasses import replace

from gpipe_bench.pipeline.plan.remat import Remat, of_stages
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, check_sizes


def recomputed(schedule: Schedule, remat: Remat) -> Schedule:
    """`schedule`, which has no recomputation, with one wherever `remat` recomputes a stage's micro-batch.

    `ValueError` for a schedule that has recomputations already, or a `remat` that there is not.
    """
    check_sizes(schedule.num_stages, schedule.num_microbatches, remat)
    if schedule.remat != "never":
        raise ValueError(
            f"schedule {schedule.name!r} recomputes already (remat={schedule.remat!r}); give one with "
            "remat='never'"
        )
    again = of_stages(remat, schedule.num_stages, schedule.num_microbatches)
    rows = []
    for row in schedule.actions:
        found: list[Action] = []
        for action in row:
            if action.kind in (Kind.B, Kind.I) and action.microbatch in again[action.stage]:
                found.append(Action(action.stage, Kind.R, action.microbatch))
            found.append(action)
        rows.append(tuple(found))
    return replace(schedule, remat=remat, actions=tuple(rows))

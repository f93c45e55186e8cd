"""Whether a schedule can be executed, asked before anything runs.

A schedule may come from a file or from a user's own function. A mistake in it would show as a gradient that
is missing or as processes that wait for each other, far from its cause; here it is an error that names the
actions.
"""

from __future__ import annotations

from collections import Counter

from gpipe_bench.pipeline.plan.order import execution_order
from gpipe_bench.pipeline.plan.remat import choice_of
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, channels, check_sizes, derived


@derived
def validate(schedule: Schedule) -> None:
    """`ValueError` with the offending actions unless the schedule can be executed.

    Checked: a placement of all stages on workers; a row per worker that holds only its own stages' actions;
    every micro-batch once forward and once backward (B, or I and W) on every stage, recomputed exactly where
    `remat` says so; messages of one direction between two workers leave in the order in which they are needed
    (a channel is a queue, as in MPI and NCCL); and no deadlock when every worker takes its row in order. The
    buffers that messages wait for (`ring`) are as many as a schedule needs, so that they add none.
    """
    check_sizes(schedule.num_stages, schedule.num_microbatches, schedule.remat)
    _validate_placement(schedule)
    if len(schedule.actions) != schedule.num_workers:
        holders = "workers" if schedule.placement else "stages"
        raise ValueError(
            f"{len(schedule.actions)} rows of actions for {schedule.num_workers} {holders}; give one per "
            f"{holders[:-1]}"
        )
    for worker, row in enumerate(schedule.actions):
        _validate_row(schedule, worker, row)
    _validate_channels(schedule)
    execution_order(schedule)


def _validate_placement(schedule: Schedule) -> None:
    placement = schedule.placement
    if not placement:
        return
    if len(placement) != schedule.num_stages:
        raise ValueError(
            f"the placement has {len(placement)} workers for {schedule.num_stages} stages; give the worker "
            "of each stage"
        )
    if min(placement) < 0:
        raise ValueError(f"the placement {placement} has worker {min(placement)}; workers count from 0")
    idle = sorted(set(range(min(max(placement), len(placement)) + 1)) - set(placement))
    if idle:
        raise ValueError(
            f"worker {idle[0]} holds no stage in the placement {placement}; workers count from 0 without gaps"
        )


def _validate_row(schedule: Schedule, worker: int, row: tuple[Action, ...]) -> None:
    stages = schedule.stages_of(worker)
    strangers = [
        str(a) for a in row if a.stage not in stages or not 0 <= a.microbatch < schedule.num_microbatches
    ]
    if strangers:
        home = f"worker {worker}" if schedule.placement else f"stage {worker}"
        raise ValueError(
            f"the row of {home} holds {', '.join(strangers)}, outside stage {', '.join(map(str, stages))} or "
            f"outside micro-batches 0..{schedule.num_microbatches - 1}"
        )
    taken: dict[int, list[Action]] = {stage: [] for stage in stages}
    for action in row:
        taken[action.stage].append(action)
    for stage, actions in taken.items():
        _validate_stage(schedule, stage, actions)


def _validate_stage(schedule: Schedule, stage: int, actions: list[Action]) -> None:
    repeated = sorted(str(action) for action, times in Counter(actions).items() if times > 1)
    if repeated:
        raise ValueError(f"stage {stage} takes {', '.join(repeated)} more than once")
    present = set(actions)
    for microbatch in range(schedule.num_microbatches):
        kinds = {kind for kind in Kind if Action(stage, kind, microbatch) in present}
        again = {Kind.R} if schedule.recomputes(microbatch, stage) else set()
        if kinds - again not in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}) or not again <= kinds:
            have = " ".join(sorted(kind.value for kind in kinds)) or "nothing"
            want = "F R B" if again else "F B"
            raise ValueError(
                f"stage {stage} takes micro-batch {microbatch} through {have}; with remat="
                f"{choice_of(schedule.remat, stage)!r} it needs {want}, where B may be split into I W"
            )


def _validate_channels(schedule: Schedule) -> None:
    position = {action: i for row in schedule.actions for i, action in enumerate(row)}
    for (source, target, _), messages in channels(schedule).items():
        leaving = sorted(messages, key=lambda message: position[message.source])
        for made, wanted in zip(leaving, messages, strict=True):
            if made != wanted:
                home = "worker" if schedule.placement else "stage"
                raise ValueError(
                    f"{home} {source} sends {made.source} to {home} {target}, which waits for "
                    f"{wanted.source} first; the messages between two {home}s travel in one queue, so their "
                    "orders must agree"
                )

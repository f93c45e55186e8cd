"""Whether a schedule can be executed, asked before anything runs.

A schedule may come from a file or from a user's own function. A mistake in it would show as a gradient that
is missing or as processes that wait for each other, far from its cause; here it is an error that names the
actions.
"""

from __future__ import annotations

from collections import Counter

from gpipe_bench.pipeline.plan.schedule import (
    Action,
    Kind,
    Schedule,
    check_sizes,
    execution_order,
    transfers,
)


def validate(schedule: Schedule) -> None:
    """`ValueError` with the offending actions unless the schedule can be executed.

    Checked: a row per stage that holds only its own stage's actions; every micro-batch once forward and once
    backward (B, or I and W) on every stage, recomputed exactly where `remat` says so; messages between two
    stages leave in the order in which they are needed (a channel is a queue, as in MPI and NCCL); and no
    deadlock when every stage takes its row in order.
    """
    check_sizes(schedule.num_stages, schedule.num_microbatches, schedule.remat)
    if len(schedule.actions) != schedule.num_stages:
        raise ValueError(
            f"{len(schedule.actions)} rows of actions for {schedule.num_stages} stages; give one per stage"
        )
    for stage, row in enumerate(schedule.actions):
        _validate_row(schedule, stage, row)
    _validate_channels(schedule)
    execution_order(schedule)


def _validate_row(schedule: Schedule, stage: int, row: tuple[Action, ...]) -> None:
    strangers = [str(a) for a in row if a.stage != stage or not 0 <= a.microbatch < schedule.num_microbatches]
    if strangers:
        raise ValueError(
            f"the row of stage {stage} holds {', '.join(strangers)}, outside stage {stage} or outside "
            f"micro-batches 0..{schedule.num_microbatches - 1}"
        )
    repeated = sorted(str(action) for action, times in Counter(row).items() if times > 1)
    if repeated:
        raise ValueError(f"stage {stage} takes {', '.join(repeated)} more than once")
    present = set(row)
    for microbatch in range(schedule.num_microbatches):
        kinds = {kind for kind in Kind if Action(stage, kind, microbatch) in present}
        again = {Kind.R} if schedule.recomputes(microbatch) else set()
        if kinds - again not in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}) or not again <= kinds:
            have = " ".join(sorted(kind.value for kind in kinds)) or "nothing"
            want = "F R B" if again else "F B"
            raise ValueError(
                f"stage {stage} takes micro-batch {microbatch} through {have}; with remat="
                f"{schedule.remat!r} it needs {want}, where B may be split into I W"
            )


def _validate_channels(schedule: Schedule) -> None:
    sent: dict[tuple[int, int], list[Action]] = {}
    needed: dict[tuple[int, int], list[Action]] = {}
    position = {action: i for row in schedule.actions for i, action in enumerate(row)}
    for transfer in transfers(schedule):
        channel = (transfer.source.stage, transfer.target.stage)
        sent.setdefault(channel, []).append(transfer.source)
        needed.setdefault(channel, []).append(transfer.source)
    for (source, target), messages in sent.items():
        messages.sort(key=position.__getitem__)
        for made, wanted in zip(messages, needed[source, target], strict=True):
            if made != wanted:
                raise ValueError(
                    f"stage {source} sends {made} to stage {target}, which waits for {wanted} first; the "
                    f"messages between two stages travel in one queue, so their orders must agree"
                )

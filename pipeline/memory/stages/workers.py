"""Peak bytes of every worker of any schedule, where a worker may hold several stages."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.pipeline.memory.stages.footprint import Footprint, footprint
from gpipe_bench.pipeline.memory.stages.peaks import StageMemory, rule_of, stage_memory
from gpipe_bench.pipeline.memory.stages.rows.messages import Ahead, all_received_apart
from gpipe_bench.pipeline.memory.stages.rows.row import PortalWaits, Row, check_number, walk
from gpipe_bench.pipeline.memory.stages.ties import SharedWeight, counted_once, with_sums
from gpipe_bench.pipeline.memory.story import LayerProfile
from gpipe_bench.pipeline.plan.schedule import Action, Schedule


def peak_bytes(
    stages: Sequence[Footprint],
    schedule: Schedule,
    optimizer: str = "rmsprop",
    *,
    receive_ahead: Ahead = None,
) -> tuple[int, ...]:
    """Most bytes that each worker holds in a training step, in the order of the workers.

    Args:
        stages: what each stage of ``schedule`` holds, as `stage_footprints` gives it from layer profiles at
            the micro-batch's size; those of ``Profiler(split_backward=True)`` if it splits backwards.
        schedule: any that `validate` accepts; its ``remat`` counts.
        optimizer: "sgd", "rmsprop" or "adam".
        receive_ahead: a `Transport`, where each worker is a process of its own: the buffers of its rings and
            what it has sent are counted, as the engine has them. None: messages wait from the moment that
            they are sent, the workers taking turns as in one process. A number, such as 1, of messages of
            each direction for which a stage has receives posted beyond the one in use: for what is asked of
            no transport in particular.

    Raises:
        ValueError: an unknown optimizer, another number of stages than the schedule's, or I and W for stages
            whose profiles know nothing of them.
    """
    return tuple([fullest.peak for fullest in memories(stages, schedule, optimizer, receive_ahead)])


def action_bytes(
    stages: Sequence[Footprint],
    schedule: Schedule,
    optimizer: str = "rmsprop",
    *,
    receive_ahead: Ahead = None,
) -> dict[Action, int]:
    """Most bytes that the worker of each action holds while it takes it; arguments and errors as of
    `peak_bytes`, which these never exceed. The optimizer's step may.
    """
    return walk(stages, schedule, optimizer, receive_ahead)[1]


def at_rest_bytes(stages: Sequence[Footprint], schedule: Schedule, optimizer: str) -> tuple[int, ...]:
    """Most bytes that each worker holds in the optimizer's step; arguments and errors as of `peak_bytes`."""
    check_number(stages, schedule)
    rule = rule_of(optimizer)
    workers = [Row(schedule, number, stages, rule, 0) for number in range(schedule.num_workers)]
    return tuple([worker.fullest.peak for worker in workers])


def stage_footprints(
    layers: Sequence[LayerProfile], loss: LayerProfile, stages: Sequence[range]
) -> tuple[Footprint, ...]:
    """What each stage holds of a micro-batch where ``layers`` are cut into ``stages``; equal stages are added
    up once.
    """
    last = len(stages) - 1
    known: dict[tuple[int, ...], Footprint] = {}
    found = []
    for index, stage in enumerate(stages):
        parts = [layers[layer] for layer in stage]
        key = (*map(id, parts), index == last)
        if key not in known:
            known[key] = footprint(parts, loss if index == last else None)
        found.append(known[key])
    return tuple(found)


def pipeline_memory(
    layers: Sequence[LayerProfile],
    loss: LayerProfile,
    stages: Sequence[range],
    schedule: Schedule,
    optimizer: str = "rmsprop",
    *,
    receive_ahead: Ahead = 0,
    ties: Sequence[SharedWeight] = (),
) -> tuple[StageMemory, ...]:
    """The fullest moment of each worker when ``layers`` are cut into ``stages``; arguments and errors as of
    `peak_bytes`.

    ``ties`` are weights that several layers use (`stages.ties.shared_weights`); without them each counts as
    the layer's own. Over processes their gradients are summed when the last backward is over.
    ``receive_ahead`` is a `Transport` over processes and None in one. There gpipe and naive use every message
    as it comes, as 0 has it; under 1f1b one may wait, and the peak is between that for 0 and that for 1.
    """
    check_number(stages, schedule)
    footprints = counted_once(stage_footprints(layers, loss, stages), stages, schedule, ties)
    if not isinstance(receive_ahead, int) or schedule.placement:
        found = memories(footprints, schedule, optimizer, receive_ahead)
    else:
        found = tuple(
            stage_memory(stage, row, optimizer, is_first=index == 0, receive_ahead=receive_ahead)
            for index, (stage, row) in enumerate(zip(footprints, schedule.actions, strict=True))
        )
    if not receive_ahead or not ties:
        return found
    apart = all_received_apart(footprints, schedule, receive_ahead)
    return with_sums(found, apart, stages, schedule, optimizer, ties)


def memories(
    stages: Sequence[Footprint],
    schedule: Schedule,
    optimizer: str,
    receive_ahead: Ahead,
    portals: PortalWaits | None = None,
) -> tuple[StageMemory, ...]:
    """The fullest moment of each worker; arguments and errors as of `peak_bytes`. `portals` are known in one
    process alone.
    """
    return walk(stages, schedule, optimizer, receive_ahead, portals)[0]

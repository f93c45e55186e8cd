"""Peak bytes of every worker, where a worker holds several stages.

The stages of a worker are full at different times: while one is in a backward, another keeps what waits for
its own. So the worker's row is walked once, and at every action what its stages hold then is added up; the
sum of their peaks would be too much.

    worker 0 of two, interleaved, M = 2    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    graphs of stage 0                       1   2   2   2   2   2   2   1
    graphs of stage 2                       0   0   1   2   2   1   0   0      at most 4 together
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from gpipe_bench.pipeline.memory.footprint import Footprint, footprint
from gpipe_bench.pipeline.memory.peaks import (
    Optimizer,
    StageMemory,
    Walk,
    memory_at,
    optimizer_state,
    rule_of,
)
from gpipe_bench.pipeline.memory.story import LayerProfile
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule


def worker_memory(
    layers: Sequence[LayerProfile],
    loss: LayerProfile,
    stages: Sequence[range],
    schedule: Schedule,
    optimizer: str = "rmsprop",
    *,
    receive_ahead: int = 0,
) -> tuple[StageMemory, ...]:
    """Peak of each worker; arguments as of `peaks.pipeline_memory`, whose numbers these are where every
    worker has one stage.

    What a worker sends to itself waits as a message of its own. ``receive_ahead`` is of messages from other
    workers. Raises ValueError for an unknown optimizer, a schedule with another number of stages, and split
    backwards.
    """
    if len(stages) != schedule.num_stages:
        raise ValueError(f"{len(stages)} stages given for a schedule of {schedule.num_stages} stages")
    last = len(stages) - 1
    footprints = [
        footprint([layers[layer] for layer in stage], loss if index == last else None)
        for index, stage in enumerate(stages)
    ]
    rule = rule_of(optimizer)
    return tuple(
        _fullest(schedule, worker, footprints, rule, receive_ahead) for worker in range(schedule.num_workers)
    )


def _fullest(
    schedule: Schedule, worker: int, footprints: Sequence[Footprint], rule: Optimizer, receive_ahead: int
) -> StageMemory:
    mine, last = schedule.stages_of(worker), schedule.num_stages - 1
    number = schedule.num_microbatches
    states = {stage: optimizer_state(footprints[stage], rule) for stage in mine}
    fullest = _sum(
        [
            memory_at(footprints[stage], None, rule, states[stage], number, is_first=stage == 0)
            for stage in mine
        ],
        # One parameter is updated at a time, whichever stage it is of.
        shared=True,
    )
    walks = {stage: Walk(schedule.row(stage), receive_ahead) for stage in mine}
    waiting = 0  # bytes of what the worker has sent to itself
    for action in schedule.actions[worker]:
        stage, kind = action.stage, action.kind
        if kind is Kind.F and stage - 1 in mine:
            waiting -= footprints[stage].input_bytes
        if kind is Kind.B and stage + 1 in mine:
            waiting -= footprints[stage].output_gradient_bytes
        demand = walks[stage].take(action)
        now = memory_at(footprints[stage], demand, rule, states[stage], number, is_first=stage == 0)
        others = [
            _at_rest(footprints[other], walks[other], states[other], number, is_first=other == 0)
            for other in mine
            if other != stage
        ]
        candidate = _sum([now, *others], transients=waiting)
        if candidate.peak > fullest.peak:
            fullest = candidate
        if kind is Kind.F and stage < last and stage + 1 in mine:
            waiting += footprints[stage + 1].input_bytes
        if kind is Kind.B and stage and stage - 1 in mine:
            waiting += footprints[stage - 1].output_gradient_bytes
    return fullest


def _at_rest(
    stage: Footprint, walk: Walk, state: int, num_microbatches: int, *, is_first: bool
) -> StageMemory:
    """What a stage holds while another one of its worker works."""
    received, kept = (0, 0) if is_first else (stage.input_bytes, stage.kept_input_bytes)
    user_bytes = num_microbatches * (stage.target_bytes + (stage.input_bytes if is_first else 0))
    return StageMemory(
        parameters=stage.parameter_bytes,
        buffers=stage.buffer_bytes,
        gradients=stage.gradient_bytes if walk.backwards else 0,
        optimizer_state=state,
        boundary=user_bytes + walk.whole * received + walk.graphs * kept,
        activations=walk.graphs * stage.saved_bytes,
        transients=walk.inputs_ahead * received
        + (walk.gradients_ahead * stage.output_gradient_bytes if walk.backwards else 0),
        when="",
    )


def _sum(parts: Sequence[StageMemory], transients: int = 0, *, shared: bool = False) -> StageMemory:
    """Of the stages of a worker at one moment, which the first one names; of ``shared`` transients there is
    one at a time.
    """
    sums = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in fields(StageMemory)
        if field.name != "when"
    }
    if shared:
        sums["transients"] = max(part.transients for part in parts)
    sums["transients"] += transients
    return StageMemory(**sums, when=parts[0].when)

"""What lies between the stages of a probe: bytes of a micro-batch, and seconds of messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import torch

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, transfers
from gpipe_bench.pipeline.plan.timeline import Event
from gpipe_bench.pipeline.stage.microbatch import flatten, split
from gpipe_bench.planner.bench import Bench


def receives(action: Action, last: int) -> bool:
    """Whether an action waits for another stage."""
    if action.kind is Kind.F:
        return action.stage > 0
    return action.kind in (Kind.B, Kind.I) and action.stage < last


def messages(
    schedule: Schedule, events: Sequence[Event], boundary_bytes: Sequence[float]
) -> list[tuple[float, float]]:
    """Bytes and seconds of the messages whose receivers were waiting when they were sent."""
    times = {event.action: event for event in events}
    free_s = {
        after: times[before].end_s for row in schedule.actions for before, after in pairwise(row)
    }  # when the worker could have begun
    return [
        (
            boundary_bytes[min(message.source.stage, message.target.stage)],
            times[message.target].start_s - times[message.source].end_s,
        )
        for message in transfers(schedule)
        if free_s.get(message.target, -inf) < times[message.source].end_s
    ]


def boundaries(bench: Bench, size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes of one micro-batch behind each layer but the last: distinct tensors; those with a gradient."""
    value = split(bench.job.subject.batch(size, str(bench.device))[0], 1)[0]
    forward, back = [], []
    was_training = [layer.training for layer in bench.layers]
    try:
        for layer in bench.layers:
            layer.eval()  # must not move batch normalization's averages
        with torch.no_grad():
            for layer in bench.layers[:-1]:
                value = layer(value)
                tensors, _ = flatten(value)
                forward.append(float(sum(tensor.nbytes for tensor in tensors)))
                back.append(float(sum(t.nbytes for t in tensors if t.is_floating_point())))
    finally:
        for layer, training in zip(bench.layers, was_training, strict=True):
            layer.train(training)
    return tuple(forward), tuple(back)

"""What the workers hold by what is recomputed, to the byte, for the search of the best choice.

A choice is judged by sums (`plan.recomputing.held`), because a search judges many. The parts of the sums are
taken from the model of a whole step: once with all graphs kept, once with everything recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpipe_bench.pipeline.memory.stages.copies import shadowed
from gpipe_bench.pipeline.memory.stages.footprint import Footprint
from gpipe_bench.pipeline.memory.stages.workers import action_bytes, at_rest_bytes
from gpipe_bench.pipeline.plan.recomputing.held import Held
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, recomputed


def held_by(
    stages: Sequence[Footprint], schedule: Schedule, optimizer: str = "rmsprop", *, receive_ahead: int = 1
) -> Held:
    """The bytes of ``schedule``, which has no recomputation, for any choice of what to recompute.

    Arguments and errors are those of `workers.peak_bytes`. ``receive_ahead`` is a number here: in one process
    when a message comes depends on what is recomputed.
    """
    stages = [shadowed(each) for each in stages]  # as if each recomputed something, which is little
    inputs = [
        (0 if stage == 0 else each.input_bytes) + each.changing_buffer_bytes
        for stage, each in enumerate(stages)
    ]
    graphs = [
        each.saved_bytes + (0 if stage == 0 else each.kept_input_bytes) for stage, each in enumerate(stages)
    ]
    again = recomputed(schedule, "always")
    kept = _own(schedule, graphs, action_bytes(stages, schedule, optimizer, receive_ahead=receive_ahead))
    free = _own(again, inputs, action_bytes(stages, again, optimizer, receive_ahead=receive_ahead))

    def own(action: Action, is_recomputed: bool) -> int:
        return (free if is_recomputed else kept)[action]

    return Held(inputs, graphs, own, at_rest_bytes(stages, schedule, optimizer))


def _own(schedule: Schedule, each: Sequence[int], num_bytes: Mapping[Action, int]) -> dict[Action, int]:
    """The bytes of each action without those of the other micro-batches that wait for their backward."""
    found = {}
    for row in schedule.actions:
        waiting = 0
        for action in row:
            stage, kind = action.stage, action.kind
            if kind is Kind.R:  # its own waits no longer, as in the backward behind it
                found[action] = num_bytes[action] - waiting + each[stage]
                continue
            if kind in (Kind.B, Kind.I):
                waiting -= each[stage]
            found[action] = num_bytes[action] - waiting
            if kind is Kind.F:
                waiting += each[stage]
    return found

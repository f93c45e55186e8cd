"""The rows of all workers, walked action by action with what their stages hold.

The stages of a worker are full at different times: while one is in a backward, another keeps what waits for
its own. So at every action what its stages hold then is added up; the sum of their peaks would be too much.

    worker 0 of two, interleaved, M = 2    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    graphs of stage 0                       1   2   2   2   2   2   2   1
    graphs of stage 2                       0   0   1   2   2   1   0   0      at most 4 together

In one process messages wait with their receiver. When they come depends on the other workers, so all rows are
walked together, in the order in which one process takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Protocol

from gpipe_bench.pipeline.memory.stages.copies import Counts, shadowed
from gpipe_bench.pipeline.memory.stages.copies import held as held_copies
from gpipe_bench.pipeline.memory.stages.demands import Demand, Walk
from gpipe_bench.pipeline.memory.stages.footprint import Footprint
from gpipe_bench.pipeline.memory.stages.peaks import (
    Optimizer,
    StageMemory,
    memory_at,
    optimizer_state,
    rule_of,
)
from gpipe_bench.pipeline.memory.stages.rows.messages import (
    Ahead,
    Sends,
    Transport,
    all_received_apart,
)
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, execution_order


class PortalWaits(Protocol):
    """What portals add to the messages of neighbours (`portals.Waits`)."""

    def received(self, stage: int, num_bytes: int, *, gradients: bool) -> int:
        """All that a stage has been sent for an action, whose message is `num_bytes` with its portals."""

    def main(self, stage: int, num_bytes: int, *, gradients: bool) -> int:
        """What of it comes from the stage beside it."""

    def sent(self, stage: int, *, gradients: bool) -> Iterable[tuple[int, int]]:
        """Where an action of a stage sends portals or their gradients, and how many bytes."""


def walk(
    stages: Sequence[Footprint],
    schedule: Schedule,
    optimizer: str,
    receive_ahead: Ahead,
    portals: PortalWaits | None = None,
) -> tuple[tuple[StageMemory, ...], dict[Action, int]]:
    """The fullest moment of each worker, and bytes in each action."""
    check_number(stages, schedule)
    rule = rule_of(optimizer)
    apart = all_received_apart(stages, schedule, receive_ahead)
    if isinstance(receive_ahead, Transport):
        sends = [Sends(schedule, number, stages) for number in range(schedule.num_workers)]
        ahead, counts_all = None, False
    else:
        sends, ahead, counts_all = None, receive_ahead, receive_ahead is None
    workers = [
        Row(schedule, number, apart, rule, ahead, None if sends is None else sends[number])
        for number in range(schedule.num_workers)
    ]
    home = [workers[schedule.worker(stage)] for stage in range(schedule.num_stages)]
    last = schedule.num_stages - 1
    held: dict[Action, int] = {}
    for action in execution_order(schedule) if counts_all else schedule:
        stage, kind = action.stage, action.kind
        worker = home[stage]
        if kind is Kind.F:
            source, target = stage - 1, stage + 1
        elif kind is Kind.B or kind is Kind.I:
            source, target = stage + 1, stage - 1
        else:
            source = target = -1
        if 0 <= source <= last and (counts_all or home[source] is worker):
            num_bytes = worker.message_bytes(stage, kind)
            if portals is not None:
                num_bytes = portals.received(stage, num_bytes, gradients=kind is not Kind.F)
            worker.waiting -= num_bytes
        held[action] = worker.take(action)
        if 0 <= target <= last and (counts_all or home[target] is worker):
            num_bytes = home[target].message_bytes(target, kind)
            if portals is not None:
                num_bytes = portals.main(target, num_bytes, gradients=kind is not Kind.F)
            home[target].waiting += num_bytes
        if portals is not None and kind in (Kind.F, Kind.B, Kind.I):
            for end, num_bytes in portals.sent(stage, gradients=kind is not Kind.F):
                home[end].waiting += num_bytes
    return tuple([worker.fullest for worker in workers]), held


def check_number(stages: Sequence[object], schedule: Schedule) -> None:
    if len(stages) != schedule.num_stages:
        raise ValueError(f"{len(stages)} stages given for a schedule of {schedule.num_stages} stages")


class Row:
    """A worker whose actions go by: what its stages hold at rest, what waits for them, its fullest moment."""

    def __init__(
        self,
        schedule: Schedule,
        number: int,
        footprints: Sequence[Footprint],
        rule: Optimizer,
        receive_ahead: int | None,
        sends: Sends | None = None,
    ) -> None:
        self._sends = sends
        mine = schedule.stages_of(number)
        self._rule, self._num_microbatches = rule, schedule.num_microbatches
        self._stages = {
            stage: shadowed(footprints[stage]) if _recomputes(schedule.row(stage)) else footprints[stage]
            for stage in mine
        }
        self._states = {stage: optimizer_state(footprints[stage], rule) for stage in mine}
        self._walks = {stage: Walk(schedule.row(stage), receive_ahead) for stage in mine}
        self.waiting = 0  # bytes of messages that wait for its stages
        # One parameter is updated at a time, whichever stage it is of.
        self.fullest = summed([self._at(stage, None) for stage in mine], shared=True)
        self._at_rest = {stage: self._rest(stage) for stage in mine}
        self._resting = sum(rest.peak for rest in self._at_rest.values())
        self._most = self.fullest.peak

    def message_bytes(self, stage: int, kind: Kind) -> int:
        """What an action of a stage receives, where this worker does not hold it anyway."""
        received = self._stages[stage]
        if kind is not Kind.F:
            return received.output_gradient_bytes
        return 0 if received.messages.apart else received.input_bytes

    def take(self, action: Action) -> int:
        """Most bytes in the next action of the row; the message that it needs no longer waits."""
        stage = action.stage
        before = self._at_rest[stage]
        demand = self._walks[stage].take(action)
        now = self._at(stage, demand)
        others, messages = self._resting - before.peak, self.waiting
        if self._sends is not None:
            messages += self._sends.take(action, is_first_backward=not demand.after_first_backward)
        most = others + messages + now.peak
        if most > self._most:
            rests = [rest for other, rest in self._at_rest.items() if other != stage]
            self.fullest = summed([now, *rests], transients=messages)
            self._most = most
        after = self._at_rest[stage] = self._rest(stage)
        self._resting = others + after.peak
        return most

    def _at(self, stage: int, demand: Demand | None) -> StageMemory:
        return memory_at(
            self._stages[stage], demand, self._rule, self._states[stage], self._num_microbatches,
            is_first=stage == 0,
        )  # fmt: skip

    def _rest(self, index: int) -> StageMemory:
        """What a stage holds while another one of its worker works."""
        return at_rest(
            self._stages[index], self._walks[index], self._states[index], self._num_microbatches, index
        )


def _recomputes(row: Sequence[Action]) -> bool:
    return any(action.kind is Kind.R for action in row)


class Held(Counts, Protocol):
    """How many micro-batches a stage holds (`demands.Walk`)."""

    @property
    def whole(self) -> int: ...
    @property
    def graphs(self) -> int: ...
    @property
    def halves(self) -> int: ...
    @property
    def inputs_ahead(self) -> int: ...
    @property
    def gradients_ahead(self) -> int: ...
    @property
    def after_first_backward(self) -> bool: ...
    @property
    def after_first_inputs(self) -> bool: ...


def at_rest(stage: Footprint, walk: Held, state: int, num_microbatches: int, index: int) -> StageMemory:
    is_apart = index == 0 or stage.messages.apart
    received, kept = (0, 0) if is_apart else (stage.input_bytes, stage.kept_input_bytes)
    user_bytes = num_microbatches * (stage.target_bytes + (stage.input_bytes if index == 0 else 0))
    halves = stage.halves
    done = walk.after_first_inputs if halves is not None and halves.whole else walk.after_first_backward
    waits = 0 if halves is None or is_apart else halves.kept_input_bytes
    copies = held_copies(stage, walk, is_apart=is_apart)
    return StageMemory(
        parameters=stage.parameter_bytes,
        buffers=stage.buffer_bytes + copies.buffers,
        gradients=stage.gradient_bytes if done else 0,
        optimizer_state=state,
        boundary=user_bytes
        + stage.messages.buffer_bytes
        + walk.whole * received
        + walk.graphs * kept
        + walk.halves * waits
        + copies.boundary,
        activations=copies.activations
        + walk.graphs * stage.saved_bytes
        + (walk.halves * halves.saved_bytes if halves is not None else 0),
        transients=walk.inputs_ahead * received
        + (walk.gradients_ahead * stage.output_gradient_bytes if walk.after_first_inputs else 0),
        when="",
    )


def summed(parts: Sequence[StageMemory], transients: int = 0, *, shared: bool = False) -> StageMemory:
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

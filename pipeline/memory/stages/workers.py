"""Peak bytes of every worker of any schedule, where a worker may hold several stages.

The stages of a worker are full at different times: while one is in a backward, another keeps what waits for
its own. So the worker's row is walked once, and at every action what its stages hold then is added up; the
sum of their peaks would be too much.

    worker 0 of two, interleaved, M = 2    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    graphs of stage 0                       1   2   2   2   2   2   2   1
    graphs of stage 2                       0   0   1   2   2   1   0   0      at most 4 together

Messages wait with their receiver, what a worker sends to itself too. When they come depends on the other
workers, so all rows are walked together, in the order in which one process takes them; or each stage has
posted a number of receives ahead, as over processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from gpipe_bench.pipeline.memory.signature import Same
from gpipe_bench.pipeline.memory.stages.copies import Counts, shadowed
from gpipe_bench.pipeline.memory.stages.copies import held as held_copies
from gpipe_bench.pipeline.memory.stages.demands import Demand, Walk
from gpipe_bench.pipeline.memory.stages.footprint import Footprint, footprint
from gpipe_bench.pipeline.memory.stages.peaks import (
    Optimizer,
    StageMemory,
    memory_at,
    optimizer_state,
    rule_of,
    stage_memory,
)
from gpipe_bench.pipeline.memory.stages.ties import SharedWeight, counted_once, with_sums
from gpipe_bench.pipeline.memory.story import LayerProfile
from gpipe_bench.pipeline.plan.order import execution_order
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule


def peak_bytes(
    stages: Sequence[Footprint],
    schedule: Schedule,
    optimizer: str = "rmsprop",
    *,
    receive_ahead: int | None = None,
) -> tuple[int, ...]:
    """Most bytes that each worker holds in a training step, in the order of the workers.

    Args:
        stages: what each stage of ``schedule`` holds, as `stage_footprints` gives it from layer profiles at
            the micro-batch's size; those of ``Profiler(split_backward=True)`` if it splits backwards.
        schedule: any that `validate` accepts; its ``remat`` counts.
        optimizer: "sgd", "rmsprop" or "adam".
        receive_ahead: messages of each direction for which a stage has posted receives beyond the one in use,
            such as 1 over torch.distributed. None: messages wait from the moment that they are sent, the
            workers taking turns as in one process.

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
    receive_ahead: int | None = None,
) -> dict[Action, int]:
    """Most bytes that the worker of each action holds while it takes it; arguments and errors as of
    `peak_bytes`, which these never exceed. The optimizer's step may.
    """
    return _walk(stages, schedule, optimizer, receive_ahead)[1]


def at_rest_bytes(stages: Sequence[Footprint], schedule: Schedule, optimizer: str) -> tuple[int, ...]:
    """Most bytes that each worker holds in the optimizer's step; arguments and errors as of `peak_bytes`."""
    _check_number(stages, schedule)
    rule = rule_of(optimizer)
    workers = [_Worker(schedule, number, stages, rule, 0) for number in range(schedule.num_workers)]
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
    receive_ahead: int | None = 0,
    ties: Sequence[SharedWeight] = (),
) -> tuple[StageMemory, ...]:
    """The fullest moment of each worker when ``layers`` are cut into ``stages``; arguments and errors as of
    `peak_bytes`.

    ``ties`` are weights that several layers use (`stages.ties.shared_weights`); without them each counts as
    the layer's own. Over processes their gradients are summed when the last backward is over.
    ``receive_ahead`` is 1 over torch.distributed and None in one process. There gpipe and naive use every
    message as it comes, as 0 has it; under 1f1b one may wait, and the peak is between that for 0 and that
    for 1.
    """
    _check_number(stages, schedule)
    footprints = counted_once(stage_footprints(layers, loss, stages), stages, schedule, ties)
    if receive_ahead is None or schedule.placement:
        found = memories(footprints, schedule, optimizer, receive_ahead)
    else:
        found = tuple(
            stage_memory(stage, row, optimizer, is_first=index == 0, receive_ahead=receive_ahead)
            for index, (stage, row) in enumerate(zip(footprints, schedule.actions, strict=True))
        )
    if not receive_ahead or not ties:
        return found
    return with_sums(found, footprints, stages, schedule, optimizer, ties)


def memories(
    stages: Sequence[Footprint],
    schedule: Schedule,
    optimizer: str,
    receive_ahead: int | None,
    portals: PortalWaits | None = None,
) -> tuple[StageMemory, ...]:
    """The fullest moment of each worker; arguments and errors as of `peak_bytes`. `portals` are known in one
    process alone.
    """
    return _walk(stages, schedule, optimizer, receive_ahead, portals)[0]


class PortalWaits(Protocol):
    """What portals add to the messages of neighbours (`portals.Waits`)."""

    def received(self, stage: int, num_bytes: int, *, gradients: bool) -> int:
        """All that a stage has been sent for an action, whose message is `num_bytes` with its portals."""

    def main(self, stage: int, num_bytes: int, *, gradients: bool) -> int:
        """What of it comes from the stage beside it."""

    def sent(self, stage: int, *, gradients: bool) -> Iterable[tuple[int, int]]:
        """Where an action of a stage sends portals or their gradients, and how many bytes."""


def _walk(
    stages: Sequence[Footprint],
    schedule: Schedule,
    optimizer: str,
    receive_ahead: int | None,
    portals: PortalWaits | None = None,
) -> tuple[tuple[StageMemory, ...], dict[Action, int]]:
    """The fullest moment of each worker, and bytes in each action."""
    _check_number(stages, schedule)
    rule = rule_of(optimizer)
    workers = [
        _Worker(schedule, number, stages, rule, receive_ahead) for number in range(schedule.num_workers)
    ]
    home = [workers[schedule.worker(stage)] for stage in range(schedule.num_stages)]
    last, counts_all = schedule.num_stages - 1, receive_ahead is None
    held: dict[Action, int] = {}
    for action in _order(Same(schedule)) if counts_all else schedule:
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


def _check_number(stages: Sequence[object], schedule: Schedule) -> None:
    if len(stages) != schedule.num_stages:
        raise ValueError(f"{len(stages)} stages given for a schedule of {schedule.num_stages} stages")


@lru_cache(maxsize=16)
def _order(same: Same) -> tuple[Action, ...]:
    return execution_order(same.value)


class _Worker:
    """A worker whose actions go by: what its stages hold at rest, what waits for them, its fullest moment."""

    def __init__(
        self,
        schedule: Schedule,
        number: int,
        footprints: Sequence[Footprint],
        rule: Optimizer,
        receive_ahead: int | None,
    ) -> None:
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
        self.fullest = _sum([self._at(stage, None) for stage in mine], shared=True)
        self._at_rest = {stage: self._rest(stage) for stage in mine}
        self._resting = sum(rest.peak for rest in self._at_rest.values())
        self._most = self.fullest.peak

    def message_bytes(self, stage: int, kind: Kind) -> int:
        """What an action of a stage receives."""
        received = self._stages[stage]
        return received.input_bytes if kind is Kind.F else received.output_gradient_bytes

    def take(self, action: Action) -> int:
        """Most bytes in the next action of the row; the message that it needs no longer waits."""
        stage = action.stage
        before = self._at_rest[stage]
        now = self._at(stage, self._walks[stage].take(action))
        others = self._resting - before.peak
        most = others + self.waiting + now.peak
        if most > self._most:
            rests = [rest for other, rest in self._at_rest.items() if other != stage]
            self.fullest = _sum([now, *rests], transients=self.waiting)
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
        return _at_rest(
            self._stages[index], self._walks[index], self._states[index], self._num_microbatches, index
        )


def _recomputes(row: Sequence[Action]) -> bool:
    return any(action.kind is Kind.R for action in row)


class _Counts(Counts, Protocol):
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


def _at_rest(stage: Footprint, walk: _Counts, state: int, num_microbatches: int, index: int) -> StageMemory:
    received, kept = (0, 0) if index == 0 else (stage.input_bytes, stage.kept_input_bytes)
    user_bytes = num_microbatches * (stage.target_bytes + (stage.input_bytes if index == 0 else 0))
    halves = stage.halves
    done = walk.after_first_inputs if halves is not None and halves.whole else walk.after_first_backward
    waits = 0 if halves is None or index == 0 else halves.kept_input_bytes
    copies = held_copies(stage, walk, is_first=index == 0)
    return StageMemory(
        parameters=stage.parameter_bytes,
        buffers=stage.buffer_bytes + copies.buffers,
        gradients=stage.gradient_bytes if done else 0,
        optimizer_state=state,
        boundary=user_bytes
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


class _Held(NamedTuple):
    """`_Counts` of one moment."""

    whole: int
    graphs: int
    halves: int
    inputs_ahead: int
    gradients_ahead: int
    after_first_backward: bool
    after_first_inputs: bool
    unrecomputed: int
    again_graphs: int
    again_halves: int
    stays: bool


class WorkerMoment(NamedTuple):
    """An action of a worker with several stages, without sizes: what it finds, what the other stages hold,
    and which messages from one of them to another wait.
    """

    stage: int
    demand: Demand
    others: tuple[tuple[int, _Held], ...]
    waiting: tuple[tuple[int, Kind], ...]


def worker_moments(
    schedule: Schedule, number: int, row: Sequence[Action], receive_ahead: int
) -> tuple[WorkerMoment, ...]:
    """The different moments of one worker, whose receives are posted ahead, when it takes `row`.

    A long row repeats itself: hundreds of actions find the same numbers of micro-batches as ones before.
    """
    mine = schedule.stages_of(number)
    walks = {stage: Walk([a for a in row if a.stage == stage], receive_ahead) for stage in mine}
    waiting: list[tuple[int, Kind]] = []
    found: dict[tuple[object, ...], WorkerMoment] = {}
    for action in row:
        stage, kind = action.stage, action.kind
        forward = kind is Kind.F
        moves = forward or kind is Kind.B or kind is Kind.I
        way = Kind.F if forward else Kind.B
        if moves and (stage, way) in waiting:
            waiting.remove((stage, way))
        others = tuple([(other, _counts(walk)) for other, walk in walks.items() if other != stage])
        demand = walks[stage].take(action)
        key = (stage, replace(demand, when=""), others, tuple(sorted(waiting)))
        if key not in found:
            found[key] = WorkerMoment(stage, demand, others, tuple(waiting))
        target = stage + 1 if forward else stage - 1
        if moves and target in walks:
            waiting.append((target, way))
    return tuple(found.values())


def _counts(walk: Walk) -> _Held:
    return _Held(
        walk.whole, walk.graphs, walk.halves, walk.inputs_ahead, walk.gradients_ahead,
        walk.after_first_backward, walk.after_first_inputs, walk.unrecomputed, walk.again_graphs,
        walk.again_halves, walk.stays,
    )  # fmt: skip


def worker_memory(
    moments: Sequence[WorkerMoment],
    held: Mapping[int, Footprint],
    rests: Mapping[int, Footprint],
    num_microbatches: int,
    optimizer: str,
) -> StageMemory:
    """The fullest moment of one worker, whatever the others hold.

    A search asks this of a worker whose other workers are not cut yet, for hundreds of cuts.

    Args:
        moments: of the worker, as `worker_moments` finds them.
        held: its stages by their numbers, in the actions of a step.
        rests: the same in the optimizer's step.
        num_microbatches: M.
        optimizer: "sgd", "rmsprop" or "adam".
    """
    rule = rule_of(optimizer)
    again = {moment.stage for moment in moments if moment.demand.recomputed}
    held, rests = (
        {stage: shadowed(each) if stage in again else each for stage, each in given.items()}
        for given in (held, rests)
    )
    states = {stage: optimizer_state(each, rule) for stage, each in rests.items()}
    fullest = _sum(
        [
            memory_at(each, None, rule, states[stage], num_microbatches, is_first=stage == 0)
            for stage, each in rests.items()
        ],
        shared=True,
    )
    most = fullest.peak
    at: tuple[StageMemory, list[StageMemory], int] | None = None
    known: dict[tuple[int, _Held], StageMemory] = {}
    for moment in moments:
        stage = moment.stage
        now = memory_at(
            held[stage], moment.demand, rule, states[stage], num_microbatches, is_first=stage == 0
        )
        others = []
        for other, counts in moment.others:
            if (other, counts) not in known:
                known[other, counts] = _at_rest(held[other], counts, states[other], num_microbatches, other)
            others.append(known[other, counts])
        waiting = sum(
            [
                held[target].input_bytes if kind is Kind.F else held[target].output_gradient_bytes
                for target, kind in moment.waiting
            ]
        )
        peak = now.peak + waiting + sum([each.peak for each in others])
        if peak > most:
            most, at = peak, (now, others, waiting)
    if at is not None:
        now, others, waiting = at
        return _sum([now, *others], transients=waiting)
    return fullest

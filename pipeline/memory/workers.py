"""The peak memory of every worker under any schedule, also where a worker holds several stages.

Where each worker is its own process, messages take memory by the engine's rules:

    received    buffers of the rings of `plan.edges`, counted with their receiver at every moment, an upper
                estimate; no input or gradient that a stage works on adds to them
    sent        outputs and gradients until their sender has waited for them: the latest of each way
                between two workers, or all of a step's where they are small; an output counts twice
                while the sender's graph holds it, too, so without recomputation that is an upper estimate

A weight that several layers of a worker share counts once, with one optimizer state and, in the optimizer's
step, one gradient; in the other actions each use counts a gradient, an upper estimate. Workers that share a
weight have a copy each, and at the end of a step one gradient more: another owner's, which they add
(`mesh.gradients`).

A stage's peak is no sum over its layers. So `StagePeaks` searches the cut whose largest peak is smallest, or
that fits at all, over the modelled peaks of all stages that may occur.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import nn

from ..plan.edges import is_one_too_many, rings_of
from ..plan.partition import Partition, fills, partition_by
from ..plan.schedule import Action, Kind, Schedule, derived
from ..plan.walk import execution_order
from .peaks import NOWHERE, Moment, Optimizer, Place, Placed, StageMemory, Step, Worker, row_moments, steps
from .stage_bytes import StageBytes, stage_bytes
from .trace import LayerProfile


@dataclass(frozen=True)
class Transport:
    """Messages between workers in processes of their own."""

    accelerated: bool = False  # between devices (NCCL), not between hosts' memories


Ahead = int | Transport | None
"""How messages are counted (`peak_bytes`)."""


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
    """The moment of peak memory of each worker when ``layers`` are cut into ``stages``; arguments and errors
    are those of `peak_bytes`.

    ``ties`` are weights that several layers use (`shared_weights`); without them each layer counts its own.
    In one process, gpipe and naive use every message as it comes (``receive_ahead=0``); under 1f1b one
    message may wait, and the peak lies between those for 0 and 1.
    """
    if len(stages) != schedule.num_stages:
        raise ValueError(f"{len(stages)} stages given for a schedule of {schedule.num_stages} stages")
    found, sent_bytes = _counted_once(bytes_of_stages(layers, loss, stages), stages, schedule, ties)
    memory = [*memories(found, schedule, optimizer, receive_ahead)]
    # Gradients of shared weights are summed in turn, after all backwards.
    for number in [worker for worker, size in enumerate(sent_bytes) if size] if receive_ahead else ():
        worker = workers_of(found, schedule, optimizer, receive_ahead)[number]
        summed = sum(found[stage].summed_gradient_bytes for stage in schedule.stages_of(number))
        sums = summing(worker, summed, sent_bytes[number])
        memory[number] = max(memory[number], sums, key=lambda each: each.peak)
    return tuple(memory)


def bytes_of_stages(
    layers: Sequence[LayerProfile], loss: LayerProfile, stages: Sequence[range]
) -> tuple[StageBytes, ...]:
    """The bytes of each stage for one micro-batch where ``layers`` are cut into ``stages``."""
    ends = [*[None] * (len(stages) - 1), loss]
    return tuple(
        stage_bytes([layers[layer] for layer in stage], end) for stage, end in zip(stages, ends, strict=True)
    )


def peak_bytes(
    stages: Sequence[StageBytes],
    schedule: Schedule,
    optimizer: str = "rmsprop",
    *,
    receive_ahead: Ahead = None,
) -> tuple[int, ...]:
    """Peak bytes of each worker in a training step, in the order of the workers.

    Args:
        stages: what each stage of ``schedule`` holds, as `bytes_of_stages` gives it from layer profiles at
            the micro-batch's size; those of ``Profiler(split_backward=True)`` if it splits backwards.
        any that `validate` accepts; its ``remat`` is applied.
        optimizer: "sgd", "rmsprop" or "adam".
        receive_ahead: a `Transport`: each worker is its own process; the buffers of its rings and its sends
            in progress count. None: one process; messages wait from the moment they are sent. A number: no
            particular transport; the receives that a stage has posted in each direction beyond the one in
            use.

    Raises:
        ValueError: an unknown optimizer, another number of stages than the schedule's, or I and W for stages
            without profiles of a split backward.
    """
    return tuple([each.peak for each in memories(stages, schedule, optimizer, receive_ahead)])


def memories(
    stages: Sequence[StageBytes],
    schedule: Schedule,
    optimizer: str,
    receive_ahead: Ahead,
) -> tuple[StageMemory, ...]:
    """The moment of peak memory of each worker; arguments and errors are those of `peak_bytes`."""
    workers = workers_of(stages, schedule, optimizer, receive_ahead)
    found: list[list[Moment]] = [[] for _ in workers]
    for moment in _moments(stages, schedule, receive_ahead):
        found[schedule.worker(moment.step.action.stage)].append(moment)
    return tuple([worker.fullest(mine) for worker, mine in zip(workers, found, strict=True)])


def action_bytes(
    stages: Sequence[StageBytes],
    schedule: Schedule,
    optimizer: str = "rmsprop",
    *,
    receive_ahead: Ahead = None,
) -> dict[Action, int]:
    """Peak bytes of the worker of each action while it runs; arguments and errors are those of `peak_bytes`.
    The optimizer's step, which is no action, may need more.
    """
    workers = workers_of(stages, schedule, optimizer, receive_ahead)
    return {
        moment.step.action: workers[schedule.worker(moment.step.action.stage)].bytes(moment)
        for moment in _moments(stages, schedule, receive_ahead)
    }


def workers_of(
    stages: Sequence[StageBytes],
    schedule: Schedule,
    optimizer: str,
    receive_ahead: Ahead,
) -> list[Worker]:
    """The workers with their stages; arguments and errors are those of `peak_bytes`."""
    if len(stages) != schedule.num_stages:
        raise ValueError(f"{len(stages)} stages given for a schedule of {schedule.num_stages} stages")
    rule, all_places = Optimizer.named(optimizer), places(stages, schedule, receive_ahead)
    placed = [
        Placed(
            stage,
            rule,
            schedule.num_microbatches,
            is_first=index == 0,
            recomputes=any(a.kind is Kind.R for a in schedule.row(index)),
            stays=isinstance(receive_ahead, int) and receive_ahead > 0,
            place=all_places[index],
        )
        for index, stage in enumerate(stages)
    ]
    return [
        Worker({stage: placed[stage] for stage in schedule.stages_of(number)})
        for number in range(schedule.num_workers)
    ]


def _moments(stages: Sequence[StageBytes], schedule: Schedule, receive_ahead: Ahead) -> Iterator[Moment]:
    if receive_ahead is None:
        # When a message arrives depends on other workers: all rows in the order of one process.
        homes = {s: schedule.stages_of(schedule.worker(s)) for s in range(schedule.num_stages)}
        return row_moments(execution_order(schedule), None, homes)
    if isinstance(receive_ahead, int):
        return chain.from_iterable(row_moments(row, receive_ahead) for row in schedule.actions)
    found = chain.from_iterable(row_moments(row, None) for row in schedule.actions)
    return _with_sent(found, stages, schedule)


def stage_memory(
    stage: StageBytes,
    actions: tuple[Action, ...],
    optimizer: str = "rmsprop",
    *,
    is_first: bool,
    receive_ahead: int = 0,
) -> StageMemory:
    """The moment of peak memory of one stage that executes ``actions``, alone on its worker."""
    found = steps(actions, receive_ahead)
    placed = Placed(
        stage,
        Optimizer.named(optimizer),
        sum([action.kind is Kind.F for action in actions]),
        is_first=is_first,
        recomputes=any(step.recomputed for step in found),
        stays=receive_ahead > 0,
    )
    return Worker({found[0].action.stage: placed}).fullest(map(Moment, found))


# Messages between processes


def places(stages: Sequence[StageBytes], schedule: Schedule, receive_ahead: Ahead) -> list[Place]:
    """Where each stage receives its messages: between processes, in buffers that are kept."""
    if not isinstance(receive_ahead, Transport):
        return [NOWHERE] * len(stages)
    found, rings = [], rings_of(schedule, receive_ahead.accelerated)
    for index, stage in enumerate(stages):
        comes, num_bytes = [False, False], 0
        for back, size in enumerate((stage.input_bytes, stage.output_gradient_bytes)):
            other = index + 1 if back else index - 1
            if 0 <= other < len(stages) and schedule.worker(other) != schedule.worker(index):
                ring = rings[index if back else index - 1, bool(back)]
                comes[back] = True
                num_bytes += ring.of(size).num_slots * size
        inputs, gradients = comes
        if not inputs and index and not any(action.kind is Kind.R for action in schedule.row(index - 1)):
            # The stage before may have the input in its graph, which outlives this one's.
            inputs = stages[index - 1].of_graph_bytes == stage.input_bytes > 0
        found.append(Place(inputs, gradients, num_bytes))
    return found


def _with_sent(found: Iterable[Moment], stages: Sequence[StageBytes], schedule: Schedule) -> Iterator[Moment]:
    """Each action, with the bytes its worker has sent and not waited for; each message counts, even if the
    sender's graph holds it, too.
    """
    ways: dict[tuple[int, int, bool], deque[tuple[int, int]]] = {}  # sizes at receiver and sender
    held_bytes = [0] * schedule.num_workers
    for moment in found:
        action = moment.step.action
        worker, target = schedule.worker(action.stage), schedule.receiver(action)
        yield moment._replace(sent_bytes=held_bytes[worker])
        if target is None or schedule.worker(target) == worker:
            continue
        back, mine = action.kind is not Kind.F, stages[action.stage]
        size = stages[target].output_gradient_bytes if back else stages[target].input_bytes
        way = ways.setdefault((worker, schedule.worker(target), back), deque())
        way.append((size, mine.sent_back_bytes if back else mine.sent_bytes))
        held_bytes[worker] += way[-1][1]
        if is_one_too_many(len(way), way[0][0]):
            held_bytes[worker] -= way.popleft()[1]


# Weights that several layers of a worker share, counted once


@dataclass(frozen=True)
class SharedWeight:
    """A parameter that several layers use."""

    num_bytes: int
    trained: bool  # whether it gets a gradient
    layers: tuple[int, ...]  # indices of the layers that use it, in order


def shared_weights(layers: Sequence[nn.Module]) -> tuple[SharedWeight, ...]:
    """The weights that several of these layers use."""
    users: dict[nn.Parameter, list[int]] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            users.setdefault(parameter, []).append(index)
    return tuple(
        SharedWeight(parameter.nbytes, parameter.requires_grad, tuple(found))
        for parameter, found in users.items()
        if len(found) > 1
    )


def _counted_once(
    stages: Sequence[StageBytes],
    spans: Sequence[range],
    schedule: Schedule,
    weights: Sequence[SharedWeight],
) -> tuple[list[StageBytes], list[int]]:
    """Returns stages where a worker counts a shared weight once, and by worker the bytes of the largest
    gradient that another owner of a weight sends it.
    """
    found, sent_bytes = list(stages), [0] * schedule.num_workers
    for weight in weights:
        owners = set[int]()
        for stage in [next(i for i, span in enumerate(spans) if layer in span) for layer in weight.layers]:
            worker = schedule.worker(stage)
            if worker in owners:
                found[stage] = without(found[stage], weight.num_bytes, weight.trained)
            owners.add(worker)
        for worker in owners if weight.trained and len(owners) > 1 else ():
            sent_bytes[worker] = max(sent_bytes[worker], weight.num_bytes)
    return found, sent_bytes


def without(stage: StageBytes, num_bytes: int, trained: bool) -> StageBytes:
    """A stage without one of its weights; the weight's gradient stays until the end of the step."""
    sizes = list(stage.trained_sizes)
    if trained:
        sizes.remove(num_bytes)
    return replace(
        stage,
        parameter_bytes=stage.parameter_bytes - num_bytes,
        trained_sizes=tuple(sizes),
        summed_gradient_bytes=stage.summed_gradient_bytes + num_bytes * trained,
    )


def summing(worker: Worker, summed_bytes: int, received_bytes: int) -> StageMemory:
    """A worker that sums a shared weight: it has the gradients of its own uses and one from another owner."""
    resting = worker.update()
    return replace(
        resting, gradients=resting.gradients + summed_bytes, transients=received_bytes, when="ties"
    )


@derived
def _common_steps(schedule: Schedule, receive_ahead: int) -> tuple[Step, ...]:
    """Returns the steps, which must be equal for all stages; cached, since a search asks repeatedly."""
    patterns = {
        tuple((step.alike, step.counts) for step in steps(row, receive_ahead)) for row in schedule.actions
    }
    if len(patterns) > 1:
        raise ValueError(
            f"stages of schedule {schedule.name!r} hold different numbers of micro-batches: "
            "cut by costs instead (pipeline.partition)"
        )
    return steps(schedule.actions[0], receive_ahead)


class StagePeaks:
    """Modelled peaks of all contiguous stages of one model under one schedule; each is computed once."""

    def __init__(
        self,
        layers: Sequence[LayerProfile],
        loss: LayerProfile,
        schedule: Schedule,
        optimizer: str = "rmsprop",
        *,
        receive_ahead: int = 0,
    ) -> None:
        if not layers:
            raise ValueError("a model without layers cannot be cut into stages")
        self.layers, self.loss, self.schedule, self.optimizer = tuple(layers), loss, schedule, optimizer
        self._steps, self._receive_ahead = _common_steps(schedule, receive_ahead), receive_ahead
        self._peaks: dict[tuple[int, ...], int] = {}

    def memory(self, start: int, stop: int) -> StageMemory:
        """The moment of peak memory of the stage with layers start..stop - 1."""
        stage = stage_bytes(self.layers[start:stop], self.loss if stop == len(self.layers) else None)
        row, ahead = self.schedule.actions[0], self._receive_ahead
        return stage_memory(stage, row, self.optimizer, is_first=start == 0, receive_ahead=ahead)

    def peak(self, start: int, stop: int) -> int:
        """Peak bytes of that stage. Stages of equal layers are computed once, wherever they begin."""
        key = (start == 0, stop == len(self.layers), *map(id, self.layers[start:stop]))
        if key not in self._peaks:
            self._peaks[key] = self.memory(start, stop).peak
        return self._peaks[key]

    def floor(self) -> list[int]:
        """Bytes that each layer adds to any stage, whatever stands beside it."""
        state = Optimizer.named(self.optimizer).state
        # From the second backward of a step on, a graph and the gradients are alive together.
        both = any(
            step.counts.after_backward
            and step.action.kind in ((Kind.R, Kind.B) if step.recomputed else (Kind.F, Kind.R, Kind.B))
            for step in self._steps
        )
        return [
            layer.parameter_bytes
            + state * sum(layer.trained_sizes)
            + layer.gradient_bytes
            + both * layer.first.kept_inside
            for layer in self.layers
        ]

    def partition(self, cap_bytes: int) -> Partition | None:
        """The partition whose largest peak is smallest; None if none keeps every stage within the cap."""
        return partition_by(
            self.peak, len(self.layers), self.schedule.num_stages, cap=cap_bytes, floor=self.floor()
        )

    def fits(self, cap_bytes: int) -> bool:
        """Whether `partition` finds a split under the cap."""
        num_stages, floor = self.schedule.num_stages, self.floor()
        filled = fills(self.peak, num_stages, cap=cap_bytes, floor=floor)
        return filled or self.partition(cap_bytes) is not None

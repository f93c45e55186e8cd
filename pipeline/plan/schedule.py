"""A schedule written down as data, so that one description has many readers.

The engine executes it, the replay lays it out in time, the memory model walks over it and the drawing prints
it. Engines that keep the order of the work in their control flow cannot be checked without running them; here
a schedule is a tuple of actions per worker, made by a pure function (`named`), and everything that follows
from it (who sends what to whom, how many micro-batches are in flight, in which order one process takes them,
whether they can run at all) is derived. A worker holds one stage, or several where the schedule has a
placement. Only the standard library is imported.

One notation for an action, everywhere: `2F0` is stage 2, forward, micro-batch 0.

GPipe on K = 3 stages with M = 3 micro-batches, `remat="except_last"` (F, R, B take 1, 1, 2 slots):

    stage 0 | F0 F1 F2 .  .  .  .  .  .  B2 B2 R1 B1 B1 R0 B0 B0
    stage 1 | .  F0 F1 F2 .  .  .  B2 B2 R1 B1 B1 R0 B0 B0
    stage 2 | .  .  F0 F1 F2 B2 B2 R1 B1 B1 R0 B0 B0          (the drain takes the micro-batches in reverse)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

from .remat import Remat, check_remat, in_one_form, of_stages, remat_of


class Kind(StrEnum):
    """What a stage does with a micro-batch."""

    F = "F"  # forward
    R = "R"  # recompute: the forward again, with a graph (re-materialization)
    B = "B"  # backward, gradients of the inputs and of the weights together
    I = "I"  # noqa: E741  first half of a split backward: gradients of the inputs, awaited by the stage before
    W = "W"  # second half of a split backward: gradients of the weights, which nobody waits for

    __hash__ = str.__hash__  # of enumerations it is slow, and actions are keys everywhere


_ACTION = re.compile(r"(\d+)([FRBIW])(\d+)", re.ASCII)


class Action(NamedTuple):
    """One unit of work: `kind` of micro-batch `microbatch` on stage `stage`. Its text form is `2F0`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads the text form, e.g. `Action.parse("2F0")`. `ValueError` if the text is not an action."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not an action; write stage, one of F R B I W, micro-batch, as in '2F0'"
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """The actions of every worker, in the order in which the worker takes them.

    Args:
        name: of a built-in schedule, or any other.
        num_stages: K, the number of partitions of the model.
        num_microbatches: M, numbered from 0.
        remat: which micro-batches are recomputed: "never", "always" or "except_last" (all but the last), or
            one of these names for each stage (`remat`).
        actions: one row per worker.
        placement: the worker of each stage; empty where every stage has a worker of its own.
    """

    name: str
    num_stages: int
    num_microbatches: int
    remat: Remat
    actions: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # One form of each placement and choice, so that equal schedules are equal.
        if self.placement == tuple(range(self.num_stages)):
            object.__setattr__(self, "placement", ())
        object.__setattr__(self, "remat", in_one_form(self.remat))

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what is derived: in another process hashes are others.
        sizes = (self.name, self.num_stages, self.num_microbatches, self.remat)
        return Schedule, (*sizes, self.actions, self.placement)

    @cached_property
    def _hash(self) -> int:
        return hash(self.__reduce__()[1])

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def facts(self) -> dict[Any, Any]:
        """Results of functions of the schedule (`derived`), cached."""
        return {}

    @property
    def num_workers(self) -> int:
        """Processes, or devices, that take the rows."""
        return max(self.placement) + 1 if self.placement else self.num_stages

    def worker(self, stage: int) -> int:
        """The worker that holds `stage`."""
        return self.placement[stage] if self.placement else stage

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that `worker` holds, in their order."""
        return tuple(stages_of(self.placement, worker))

    def receiver(self, action: Action) -> int | None:
        """The stage to which what the action makes is sent, activations ahead and gradients back; None where
        nothing is.
        """
        if action.kind is Kind.F:
            return action.stage + 1 if action.stage + 1 < self.num_stages else None
        return action.stage - 1 if action.stage and action.kind in (Kind.B, Kind.I) else None

    def row(self, stage: int) -> tuple[Action, ...]:
        """The actions of one stage, in the order in which its worker takes them."""
        return self._rows[stage]

    @cached_property
    def _rows(self) -> tuple[tuple[Action, ...], ...]:
        homes = enumerate(self.placement)
        rows = tuple(tuple([a for a in self.actions[worker] if a.stage == stage]) for stage, worker in homes)
        return rows or self.actions

    def __iter__(self) -> Iterator[Action]:
        return (action for row in self.actions for action in row)

    @cached_property
    def recomputed(self) -> tuple[frozenset[int], ...]:
        """The micro-batches that each stage recomputes."""
        return of_stages(self.remat, self.num_stages, self.num_microbatches)

    def recomputes(self, microbatch: int, stage: int) -> bool:
        """Whether the forward of `microbatch` on `stage` keeps only its inputs and runs again before the
        backward.
        """
        return microbatch in self.recomputed[stage]

    def in_flight(self, stage: int) -> int:
        """Largest number of micro-batches that `stage` has taken forward and not yet backward."""
        return self._in_flight[stage]

    @cached_property
    def _in_flight(self) -> list[int]:
        found = []
        for row in map(self.row, range(self.num_stages)):
            live = peak = 0
            ends = set(ends_of(row))
            for action in row:
                live += (action.kind is Kind.F) - (action in ends)
                peak = max(peak, live)
            found.append(peak)
        return found


Derive = TypeVar("Derive", bound=Callable[..., Any])


def derived(function: Derive) -> Derive:
    """Caches what `function` returns for a schedule, in the schedule itself. The result must not be changed;
    further arguments must be hashable.
    """

    @wraps(function)
    def found(schedule: Schedule, *arguments: Any) -> Any:
        key = (function, *arguments)
        if key not in schedule.facts:
            schedule.facts[key] = function(schedule, *arguments)
        return schedule.facts[key]

    return found  # type: ignore[return-value]


def stages_of(placement: tuple[int, ...], worker: int) -> list[int]:
    """The stages that `worker` holds; where `placement` is empty, the one of its own number."""
    return [stage for stage, other in enumerate(placement) if other == worker] if placement else [worker]


def begins_of(row: tuple[Action, ...]) -> list[Action]:
    """The actions that build the graphs of micro-batches, R or else F, in the order of the row."""
    return _either(row, Kind.R, Kind.F)


def ends_of(row: tuple[Action, ...]) -> list[Action]:
    """The actions with which the stages are done with a micro-batch, W or else B, in the order of the row."""
    return _either(row, Kind.W, Kind.B)


def _either(row: tuple[Action, ...], rather: Kind, otherwise: Kind) -> list[Action]:
    """The actions of one kind, and of the other where a micro-batch has none of the first."""
    found = {(action.stage, action.microbatch) for action in row if action.kind is rather}
    return [a for a in row if a.kind is (rather if (a.stage, a.microbatch) in found else otherwise)]


def check_sizes(num_stages: int, num_microbatches: int, remat: Remat) -> None:
    """`ValueError` for sizes or a `remat` that no schedule has."""
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; a pipeline has at least 1 stage")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; a mini-batch has at least 1 micro-batch")
    check_remat(remat, num_stages)


def recomputed(schedule: Schedule, remat: Remat) -> Schedule:
    """`schedule`, which has no recomputation, with one wherever `remat` recomputes a stage's micro-batch.

    R needs nothing from another worker, so it stands right before the backward for which it builds the graph,
    and starts while the worker waits for the gradient. Where the backward is split, the graph lives until W:
    as many graphs are alive as a schedule puts off weights, and all other micro-batches keep their inputs
    alone. ZB-H1 on 3 workers, M = 3, two slots of bubble instead of the eight of 1F1B that recomputes late:

        stage 0 | F0 F1 F2 R0 .  .  I0 W0 R1 I1 W1 R2 I2 W2
        stage 1 | .  F0 F1 R0 .  I0 F2 R1 I1 W0 R2 I2 W1 W2
        stage 2 | .  .  F0 R0 I0 F1 R1 I1 F2 R2 I2 W0 W1 W2

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


@derived
def shortened(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule for a step of fewer micro-batches: without the actions of those that are not there.

    What waits for what, and the order in every row and channel, are those of the whole. The last micro-batch,
    which "except_last" keeps, is one of those that are not there, so all others are recomputed.
    """
    names = [remat_of(schedule.remat, stage) for stage in range(schedule.num_stages)]
    remat = ["always" if name == "except_last" else name for name in names]
    rows = [tuple([a for a in row if a.microbatch < num_microbatches]) for row in schedule.actions]
    return replace(schedule, num_microbatches=num_microbatches, remat=remat, actions=tuple(rows))


class Transfer(NamedTuple):
    """A message that `source` produces and `target`, of the stage before or behind, needs."""

    source: Action
    target: Action

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


@derived
def transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    """Every message of a step, in the order in which the receiving workers need them.

    Derived from the rows, never written by hand. A worker that holds both stages sends it to itself. Raises
    ValueError for an action whose gradient no action sends.
    """
    gradient_source = {
        (action.stage, action.microbatch): action for action in schedule if action.kind in (Kind.B, Kind.I)
    }
    found = []
    for action in schedule:
        if action.kind is Kind.F and action.stage > 0:
            found.append(Transfer(Action(action.stage - 1, Kind.F, action.microbatch), action))
        elif action.kind in (Kind.B, Kind.I) and action.stage < schedule.num_stages - 1:
            source = gradient_source.get((action.stage + 1, action.microbatch))
            if source is None:
                raise ValueError(
                    f"{action} needs a gradient of micro-batch {action.microbatch} that no action of "
                    f"stage {action.stage + 1} produces; add {action.stage + 1}B{action.microbatch}"
                )
            found.append(Transfer(source, action))
    return tuple(found)


Channel = tuple[int, int, bool]
"""Source worker, target worker, and whether gradients travel or activations."""


@derived
def channels(schedule: Schedule) -> dict[Channel, list[Transfer]]:
    """The messages from each worker to each other one, each direction for itself, in the order of need.

    What a worker sends to itself travels nowhere and is left out.
    """
    found: dict[Channel, list[Transfer]] = {}
    for transfer in transfers(schedule):
        source, target = schedule.worker(transfer.source.stage), schedule.worker(transfer.target.stage)
        if source != target:
            found.setdefault((source, target, transfer.target.kind is not Kind.F), []).append(transfer)
    return found


@derived
def dependencies(schedule: Schedule) -> dict[Action, tuple[Action, ...]]:
    """The actions each action has to wait for: messages from neighbours, and its own stage's earlier work on
    the same micro-batch. The order of a worker's row is a further constraint, which the row itself expresses.
    """
    needs: dict[Action, list[Action]] = {action: [] for action in schedule}
    for transfer in transfers(schedule):
        needs[transfer.target].append(transfer.source)
    for action in needs:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.R:
            needs[action].append(Action(stage, Kind.F, microbatch))
        elif action.kind in (Kind.B, Kind.I):
            maker = Kind.R if schedule.recomputes(microbatch, stage) else Kind.F
            needs[action].append(Action(stage, maker, microbatch))
        elif action.kind is Kind.W:
            needs[action].append(Action(stage, Kind.I, microbatch))
    return {action: tuple(sources) for action, sources in needs.items()}


class Walk:
    """Where every worker is in its row: the one walk over the rows of a schedule.

    Every worker takes its row in order, and an action when all that it needs is done (`dependencies`). Which
    of the workers that can go on does so is the reader's choice, and so is what an action waits for besides:
    one process takes all actions in turn (`execution_order`), the rings of `edges` let all workers take one
    where there is a buffer, the replay (`simulate`) when worker and message are there.

    Args:
        schedule: one whose rows are complete; they may wait for each other.
        kinds: the kinds of actions that are taken; of a pass of forwards alone `(Kind.F,)`.
    """

    def __init__(self, schedule: Schedule, kinds: Collection[Kind] = tuple(Kind)) -> None:
        self.schedule, self._needs, self._done = schedule, dependencies(schedule), set[Action]()
        self._rows = [iter([a for a in row if a.kind in kinds]) for row in schedule.actions]
        self.next = [next(row, None) for row in self._rows]
        """The action that each worker takes next, whether it can yet or not; None behind its last."""

    def is_ready(self, worker: int) -> bool:
        """Whether `worker` has an action left, and all that it needs is done."""
        action = self.next[worker]
        return action is not None and self._done.issuperset(self._needs[action])

    def take(self, worker: int) -> Action:
        """Moves `worker` on, which has an action left; the action is done when it is finished."""
        action = self.next[worker]
        assert action is not None, "it was asked"
        self.next[worker] = next(self._rows[worker], None)
        return action

    def finish(self, action: Action) -> None:
        """Marks the action as finished; actions that need it may begin."""
        self._done.add(action)

    def stopped(self) -> ValueError:
        """The error where no worker can go on: what each stands at, and who would have to go on first."""
        reasons = []
        for worker, action in enumerate(self.next):
            missing = [need for need in self._needs.get(action, ()) if need not in self._done]  # type: ignore[arg-type]
            if not missing:
                continue
            need = missing[0]
            other = self.schedule.worker(need.stage)
            before = self.next[other]
            if other == worker:
                why = "which stands behind it in the same row"
            else:
                why = f"which worker {other} takes {'next' if need == before else f'only behind {before}'}"
            reasons.append(f"worker {worker} stands at {action} and needs {need}, {why}")
        return ValueError(f"schedule {self.schedule.name!r} deadlocks: {'; '.join(reasons)}")


@derived
def execution_order(schedule: Schedule) -> tuple[Action, ...]:
    """The order in which a single process takes all actions: each row in its own order, dependencies first.

    A message is consumed before another is produced where the rows allow it: next comes the worker that
    received the last action's message, then the same worker if it has only recomputed, then the one that can
    go on with the latest stage. So one stage's recomputed activations are alive at a time. `ValueError` names
    the actions that wait for each other if the schedule deadlocks.
    """
    consumer = {transfer.source: schedule.worker(transfer.target.stage) for transfer in transfers(schedule)}
    last, worker = schedule.worker(schedule.num_stages - 1), schedule.worker(0)
    walk, order = Walk(schedule), list[Action]()
    for _ in schedule:
        if not walk.is_ready(worker):
            able = [(action, w) for w, action in enumerate(walk.next) if action and walk.is_ready(w)]
            if not able:
                raise walk.stopped()
            worker = max(able)[1]  # of the latest stage
        action = walk.take(worker)
        walk.finish(action)
        order.append(action)
        worker = consumer.get(action, worker if action.kind is Kind.R else last)
    return tuple(order)


@derived
def validate(schedule: Schedule) -> None:
    """`ValueError` with the offending actions unless the schedule can be executed.

    A schedule may come from a file or from a user's own function. A mistake in it would show as a gradient
    that is missing or as processes that wait for each other, far from its cause.

    Checked: a placement of all stages on workers; a row per worker that holds only its own stages' actions;
    every micro-batch once forward and once backward (B, or I and W) on every stage, recomputed exactly where
    `remat` says so; messages of one direction between two workers leave in the order in which they are needed
    (a channel is a queue, as in MPI and NCCL); and no deadlock when every worker takes its row in order. The
    buffers that messages wait for are as many as a schedule needs, so that they add none.
    """
    _check_rows(schedule)
    _check_channels(schedule, "worker" if schedule.placement else "stage")
    execution_order(schedule)


def _check_rows(schedule: Schedule) -> None:
    """`ValueError` unless the rows hold what `validate` asks for, in whatever order."""
    check_sizes(schedule.num_stages, schedule.num_microbatches, schedule.remat)
    if schedule.placement:
        _check_placement(schedule.placement, schedule.num_stages)
    home = "worker" if schedule.placement else "stage"
    if len(schedule.actions) != schedule.num_workers:
        raise ValueError(
            f"{len(schedule.actions)} rows of actions for {schedule.num_workers} {home}s; give one per {home}"
        )
    for worker, row in enumerate(schedule.actions):
        stages = schedule.stages_of(worker)
        strangers = [
            str(a) for a in row if a.stage not in stages or not 0 <= a.microbatch < schedule.num_microbatches
        ]
        if strangers:
            raise ValueError(
                f"the row of {home} {worker} holds {', '.join(strangers)}, outside stage "
                f"{', '.join(map(str, stages))} or outside micro-batches 0..{schedule.num_microbatches - 1}"
            )
        for stage in stages:
            _check_stage(schedule, stage, Counter(schedule.row(stage)))


def _check_placement(placement: tuple[int, ...], num_stages: int) -> None:
    if len(placement) != num_stages:
        raise ValueError(
            f"the placement has {len(placement)} workers for {num_stages} stages; give the worker "
            "of each stage"
        )
    if min(placement) < 0:
        raise ValueError(f"the placement {placement} has worker {min(placement)}; workers count from 0")
    idle = sorted(set(range(min(max(placement), len(placement)) + 1)) - set(placement))
    if idle:
        raise ValueError(
            f"worker {idle[0]} holds no stage in the placement {placement}; workers count from 0 without gaps"
        )


def _check_stage(schedule: Schedule, stage: int, taken: Counter[Action]) -> None:
    repeated = sorted(str(action) for action, times in taken.items() if times > 1)
    if repeated:
        raise ValueError(f"stage {stage} takes {', '.join(repeated)} more than once")
    for microbatch in range(schedule.num_microbatches):
        kinds = {kind for kind in Kind if Action(stage, kind, microbatch) in taken}
        again = {Kind.R} if schedule.recomputes(microbatch, stage) else set()
        if kinds - again not in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}) or not again <= kinds:
            have = " ".join(sorted(kind.value for kind in kinds)) or "nothing"
            want = "F R B" if again else "F B"
            raise ValueError(
                f"stage {stage} takes micro-batch {microbatch} through {have}; with remat="
                f"{remat_of(schedule.remat, stage)!r} it needs {want}, where B may be split into I W"
            )


def _check_channels(schedule: Schedule, home: str) -> None:
    position = {action: i for row in schedule.actions for i, action in enumerate(row)}
    for (source, target, _), messages in channels(schedule).items():
        leaving = sorted(messages, key=lambda message: position[message.source])
        for made, wanted in zip(leaving, messages, strict=True):
            if made != wanted:
                raise ValueError(
                    f"{home} {source} sends {made.source} to {home} {target}, which waits for "
                    f"{wanted.source} first; the messages between two {home}s travel in one queue, so their "
                    "orders must agree"
                )

"""Derives from a schedule's rows its messages, the dependencies of actions, the order in which one process
takes all actions, and whether they can run at all. Only the standard library is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from .schedule import Action, Kind, Schedule, check_sizes, derived, remat_of


class Transfer(NamedTuple):
    """A message that `source` produces and `target`, of the stage before or behind, needs."""

    source: Action
    target: Action

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


@derived
def transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    """Every message of a step, in the order in which the receiving workers need them; also from a worker to
    itself. `ValueError` for an action whose gradient no action sends.
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


@derived
def receivers(schedule: Schedule) -> dict[Action, Action]:
    """The receiving action of each sending action."""
    return {message.source: message.target for message in transfers(schedule)}


Channel = tuple[int, int, bool]
"""Source worker, target worker, and whether gradients travel or activations."""


@derived
def channels(schedule: Schedule) -> dict[Channel, list[Transfer]]:
    """The messages from each worker to each other one, each direction for itself, in the order of need."""
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
    worker goes on first, and what an action waits for besides, is the reader's choice: one process takes all
    actions in turn (`execution_order`), the rings of `edges` let all workers take one where there is a
    buffer, the replay (`simulate`) when worker and message are there. Of a pass of forwards alone ``kinds``
    are `(Kind.F,)`.
    """

    def __init__(self, schedule: Schedule, kinds: Collection[Kind] = tuple(Kind)) -> None:
        self.schedule, self._needs, self._done = schedule, dependencies(schedule), set[Action]()
        self._rows = [iter([a for a in row if a.kind in kinds]) for row in schedule.actions]
        self.next = [next(row, None) for row in self._rows]
        """The action that each worker takes next, whether it can yet or not; None behind its last."""

    def is_ready(self, worker: int) -> bool:
        """Whether `worker` has an action left whose dependencies are done."""
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

    Next comes the worker that received the last action's message, then the same worker if it has only
    recomputed, then the one that can go on with the latest stage: so one stage's recomputed activations are
    alive at a time. `ValueError` names the actions that wait for each other if the schedule deadlocks.
    """
    needed_by = receivers(schedule)
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
        if action in needed_by:
            worker = schedule.worker(needed_by[action].stage)
        elif action.kind is not Kind.R:
            worker = last
    return tuple(order)


@derived
def validate(schedule: Schedule) -> None:
    """`ValueError` with the offending actions unless the schedule can be executed.

    Checked: a placement of all stages on workers; a row per worker that holds only its own stages' actions;
    every micro-batch once forward and once backward (B, or I and W) on every stage, recomputed exactly where
    `remat` says so; messages of one direction between two workers leave in the order in which they are needed
    (a channel is a queue, as in MPI and NCCL); and no deadlock when every worker takes its row in order.
    """
    _check_rows(schedule)
    _check_channels(schedule, "worker" if schedule.placement else "stage")
    execution_order(schedule)


def _check_rows(schedule: Schedule) -> None:
    """`ValueError` unless the rows hold what `validate` asks for, in whatever order."""
    check_sizes(schedule.num_stages, schedule.num_microbatches, schedule.remat)
    if schedule.placement:
        check_placement(schedule.placement, schedule.num_stages)
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


def check_placement(placement: tuple[int, ...], num_stages: int) -> None:
    """`ValueError` unless it gives each stage a worker, and each worker a stage."""
    if len(placement) != num_stages or {*placement} != set(range(len({*placement}))):
        raise ValueError(
            f"the placement {placement} does not give each of {num_stages} stages a worker and each worker a "
            "stage; workers count from 0 without gaps"
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

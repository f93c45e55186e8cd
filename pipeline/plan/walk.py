"""Derives from a schedule its messages, the dependencies of its actions, the order in which one process runs
them, and whether it can be executed. Only the standard library is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from .schedule import Action, Kind, Schedule, check_sizes, derived, remat_of


class Transfer(NamedTuple):
    """A message that `source` sends and `target`, on a neighbouring stage, needs."""

    source: Action
    target: Action

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


@derived
def transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    """Every message of a step, in the order in which receiving workers need them; also those from a worker to
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
"""Source worker, target worker, and whether the messages are gradients."""


@derived
def channels(schedule: Schedule) -> dict[Channel, list[Transfer]]:
    """The messages between each two workers, by direction, in the order of need."""
    found: dict[Channel, list[Transfer]] = {}
    for transfer in transfers(schedule):
        source, target = schedule.worker(transfer.source.stage), schedule.worker(transfer.target.stage)
        if source != target:
            found.setdefault((source, target, transfer.target.kind is not Kind.F), []).append(transfer)
    return found


@derived
def dependencies(schedule: Schedule) -> dict[Action, tuple[Action, ...]]:
    """The actions that each action waits for: senders of its messages, and its stage's earlier actions on the
    same micro-batch. The order of a worker's row is a further constraint.
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
    """The position of every worker in its row, as the schedule is executed or simulated.

    A worker takes its row in order, and an action when its `dependencies` are done. The caller chooses which
    worker goes on first, and what else an action waits for: `execution_order` takes all actions in one
    process, `edges` also waits for receive buffers, `simulate` for workers and messages in time. ``kinds`` is
    `(Kind.F,)` for a pass without backwards.
    """

    def __init__(self, schedule: Schedule, kinds: Collection[Kind] = tuple(Kind)) -> None:
        self.schedule, self._needs, self._done = schedule, dependencies(schedule), set[Action]()
        self._rows = [iter([a for a in row if a.kind in kinds]) for row in schedule.actions]
        self.next = [next(row, None) for row in self._rows]
        """The next action of each worker, ready or not; None after its last."""

    def is_ready(self, worker: int) -> bool:
        """Whether the dependencies of `worker`'s next action are done; False after its last."""
        action = self.next[worker]
        return action is not None and self._done.issuperset(self._needs[action])

    def take(self, worker: int) -> Action:
        """Moves `worker` past its next action and returns it; call `finish` when the action is done."""
        action = self.next[worker]
        assert action is not None, "it was asked"
        self.next[worker] = next(self._rows[worker], None)
        return action

    def finish(self, action: Action) -> None:
        """Marks the action as done; actions that depend on it may begin."""
        self._done.add(action)

    def stopped(self) -> ValueError:
        """The error for a deadlock: each worker's next action, what it needs, and why that is not done."""
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
    """The order in which one process runs all actions: each row in order, dependencies first.

    Next is the worker that received the last message, then the same worker after a recomputation, then the
    one whose next action is on the latest stage: so recomputed activations of one stage are alive at a time.
    `ValueError` for a deadlock names the actions that wait for each other.
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
    """`ValueError`, with the wrong actions, unless the schedule can be executed.

    Checks that every stage has a worker; that a worker's row holds only its own stages' actions; that every
    stage takes every micro-batch once forward and once backward (B, or I and W), recomputed exactly where
    `remat` says so; that messages of one direction between two workers are sent in the order of need (a
    channel is a queue, as in MPI and NCCL); and that nothing deadlocks when workers take their rows in order.
    """
    _check_rows(schedule)
    _check_channels(schedule, "worker" if schedule.placement else "stage")
    execution_order(schedule)


def _check_rows(schedule: Schedule) -> None:
    """`ValueError` unless the rows hold the right actions, in any order."""
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

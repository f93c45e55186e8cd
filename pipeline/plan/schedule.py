"""A schedule written down as data, so that one description has many readers.

The engine executes it, the replay lays it out in time, the memory model walks over it and the drawing prints
it. Engines that keep the order of the work in their control flow cannot be checked without running them; here
a schedule is a tuple of actions per stage, made by a pure function, and everything that follows from it (who
sends what to whom, how many micro-batches are in flight) is derived. Only the standard library is imported.

One notation for an action, everywhere: `2F0` is stage 2, forward, micro-batch 0.

GPipe on K = 3 stages with M = 3 micro-batches, `remat="except_last"` (F, R, B take 1, 1, 2 slots):

    stage 0 | F0 F1 F2 .  .  .  .  .  .  B2 B2 R1 B1 B1 R0 B0 B0
    stage 1 | .  F0 F1 F2 .  .  .  B2 B2 R1 B1 B1 R0 B0 B0
    stage 2 | .  .  F0 F1 F2 B2 B2 R1 B1 B1 R0 B0 B0          (the drain takes the micro-batches in reverse)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

REMAT_MODES = ("never", "always", "except_last")


class Kind(StrEnum):
    """What a stage does with a micro-batch."""

    F = "F"  # forward
    R = "R"  # recompute: the forward again, with a graph (re-materialization)
    B = "B"  # backward, gradients of the inputs and of the weights together
    I = "I"  # noqa: E741  first half of a split backward: gradients of the inputs, awaited by the stage before
    W = "W"  # second half of a split backward: gradients of the weights, which nobody waits for


_ACTION = re.compile(r"(\d+)([FRBIW])(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Action:
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
    """The actions of every stage, in the order in which the stage takes them.

    Args:
        name: of a built-in schedule, or any other.
        num_stages: K, the number of rows.
        num_microbatches: M, numbered from 0.
        remat: which micro-batches are recomputed: "never", "always" or "except_last" (all but the last).
        actions: one row per stage.
    """

    name: str
    num_stages: int
    num_microbatches: int
    remat: str
    actions: tuple[tuple[Action, ...], ...]

    def __iter__(self) -> Iterator[Action]:
        return (action for row in self.actions for action in row)

    def recomputes(self, microbatch: int) -> bool:
        """Whether the forward of `microbatch` keeps only its inputs and runs again before the backward."""
        return recomputes(self.remat, microbatch, self.num_microbatches)

    def in_flight(self, stage: int) -> int:
        """Largest number of micro-batches that `stage` has taken forward and not yet backward."""
        live = peak = 0
        halved = any(action.kind is Kind.W for action in self.actions[stage])
        for action in self.actions[stage]:
            live += (action.kind is Kind.F) - (action.kind is (Kind.W if halved else Kind.B))
            peak = max(peak, live)
        return peak


def recomputes(remat: str, microbatch: int, num_microbatches: int) -> bool:
    """Whether re-materialization mode `remat` recomputes micro-batch `microbatch` of `num_microbatches`."""
    return remat == "always" or (remat == "except_last" and microbatch != num_microbatches - 1)


def check_sizes(num_stages: int, num_microbatches: int, remat: str) -> None:
    """`ValueError` for sizes or a `remat` that no schedule has."""
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; a pipeline has at least 1 stage")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; a mini-batch has at least 1 micro-batch")
    if remat not in REMAT_MODES:
        raise ValueError(f"remat is {remat!r}; choose one of {', '.join(REMAT_MODES)}")


def _forward(stage: int, microbatch: int) -> list[Action]:
    return [Action(stage, Kind.F, microbatch)]


def _backward(stage: int, microbatch: int, num_microbatches: int, remat: str) -> list[Action]:
    """The backward with the recomputation before it: R needs nothing from another stage, so it starts while
    the stage would wait for the gradient.
    """
    again = [Action(stage, Kind.R, microbatch)] if recomputes(remat, microbatch, num_microbatches) else []
    return [*again, Action(stage, Kind.B, microbatch)]


def naive(num_stages: int, num_microbatches: int = 1, remat: str = "never") -> Schedule:
    """Model parallelism without a pipeline: one micro-batch is anywhere in the model at any time.

    With one micro-batch, the paper's naive baseline; with more, they go through end to end one after another.
    """
    check_sizes(num_stages, num_microbatches, remat)
    rows = tuple(
        tuple(
            action
            for m in range(num_microbatches)
            for action in _forward(s, m) + _backward(s, m, num_microbatches, remat)
        )
        for s in range(num_stages)
    )
    return Schedule("naive", num_stages, num_microbatches, remat, rows)


def gpipe(num_stages: int, num_microbatches: int, remat: str = "always") -> Schedule:
    """GPipe (paper section 2.3): all forwards, then all backwards in reverse order of the micro-batches.

    The reverse drain is what lets the last micro-batch keep its activations (`except_last`): its backward
    follows its own forward on the last stage at once.
    """
    check_sizes(num_stages, num_microbatches, remat)
    rows = []
    for s in range(num_stages):
        row = [action for m in range(num_microbatches) for action in _forward(s, m)]
        for m in reversed(range(num_microbatches)):
            row += _backward(s, m, num_microbatches, remat)
        rows.append(tuple(row))
    return Schedule("gpipe", num_stages, num_microbatches, remat, tuple(rows))


def one_f_one_b(num_stages: int, num_microbatches: int, remat: str = "never") -> Schedule:
    """One forward, one backward (PipeDream-flush): at most K - k micro-batches are in flight on stage k.

    Stage k warms up with as many forwards as there are stages behind it, then alternates; M < K is legal.
    """
    check_sizes(num_stages, num_microbatches, remat)
    rows = []
    for s in range(num_stages):
        warm_up = min(num_microbatches, num_stages - 1 - s)
        row = [action for m in range(warm_up) for action in _forward(s, m)]
        for m in range(num_microbatches):
            if m + warm_up < num_microbatches:
                row += _forward(s, m + warm_up)
            row += _backward(s, m, num_microbatches, remat)
        rows.append(tuple(row))
    return Schedule("1f1b", num_stages, num_microbatches, remat, tuple(rows))


SCHEDULES: dict[str, Callable[..., Schedule]] = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """A message that `source` produces and `target`, on a neighbouring stage, needs."""

    source: Action
    target: Action

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


def transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    """Every message of a step, in the order in which the receiving stages need them.

    Derived from the rows, never written by hand. Raises ValueError for an action whose gradient nobody sends.
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


def dependencies(schedule: Schedule) -> dict[Action, tuple[Action, ...]]:
    """The actions each action has to wait for: messages from neighbours, and its own stage's earlier work on
    the same micro-batch. The order of a stage's row is a further constraint, which the row itself expresses.
    """
    needs: dict[Action, list[Action]] = {action: [] for action in schedule}
    for transfer in transfers(schedule):
        needs[transfer.target].append(transfer.source)
    for action in needs:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.R:
            needs[action].append(Action(stage, Kind.F, microbatch))
        elif action.kind in (Kind.B, Kind.I):
            maker = Kind.R if schedule.recomputes(microbatch) else Kind.F
            needs[action].append(Action(stage, maker, microbatch))
        elif action.kind is Kind.W:
            needs[action].append(Action(stage, Kind.I, microbatch))
    return {action: tuple(sources) for action, sources in needs.items()}


def execution_order(schedule: Schedule) -> tuple[Action, ...]:
    """The order in which a single worker takes all actions: each row in its own order, dependencies first.

    A message is consumed before another is produced where the rows allow it: next comes the stage that
    received the last action's message, then the same stage if it has only recomputed, then the latest stage
    that can go on. So one stage's recomputed activations are alive at a time. `ValueError` names the actions
    that wait for each other if the schedule deadlocks.
    """
    needs = dependencies(schedule)
    consumer = {transfer.source: transfer.target.stage for transfer in transfers(schedule)}
    rows, position = schedule.actions, [0] * schedule.num_stages
    done: set[Action] = set()
    order: list[Action] = []

    def ready(stage: int) -> bool:
        return position[stage] < len(rows[stage]) and all(
            a in done for a in needs[rows[stage][position[stage]]]
        )

    stage = 0
    total = sum(len(row) for row in rows)
    while len(order) < total:
        if not ready(stage):
            waiting = [s for s in range(schedule.num_stages) if ready(s)]
            if not waiting:
                stuck = [row[i] for row, i in zip(rows, position, strict=True) if i < len(row)]
                reasons = "; ".join(
                    f"{a} waits for {', '.join(str(need) for need in needs[a] if need not in done)}"
                    for a in stuck
                )
                raise ValueError(f"schedule {schedule.name!r} deadlocks: {reasons}")
            stage = waiting[-1]
        action = rows[stage][position[stage]]
        position[stage] += 1
        done.add(action)
        order.append(action)
        stage = consumer.get(action, stage if action.kind is Kind.R else schedule.num_stages - 1)
    return tuple(order)

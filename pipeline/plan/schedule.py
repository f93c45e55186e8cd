"""A schedule written down as data, so that one description has many readers.

The engine executes it, the replay lays it out in time, the memory model walks over it and the drawing prints
it. Engines that keep the order of the work in their control flow cannot be checked without running them; here
a schedule is a tuple of actions per worker, made by a pure function, and everything that follows from it (who
sends what to whom, how many micro-batches are in flight) is derived. A worker holds one stage, or several
where the schedule has a placement (`schedules`). Only the standard library is imported.

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
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

from gpipe_bench.pipeline.plan.remat import REMAT_MODES as REMAT_MODES
from gpipe_bench.pipeline.plan.remat import Remat, check_remat, choice_of, in_one_form, of_stages, recomputes


class Kind(StrEnum):
    """What a stage does with a micro-batch."""

    F = "F"  # forward
    R = "R"  # recompute: the forward again, with a graph (re-materialization)
    B = "B"  # backward, gradients of the inputs and of the weights together
    I = "I"  # noqa: E741  first half of a split backward: gradients of the inputs, awaited by the stage before
    W = "W"  # second half of a split backward: gradients of the weights, which nobody waits for


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
            one choice for each stage, a name or the micro-batches (`remat`).
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
        remat = in_one_form(self.remat, self.num_stages, self.num_microbatches)
        object.__setattr__(self, "remat", remat)

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
        """What functions have found about the schedule (`derived`)."""
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
    """Keeps what `function` finds about a schedule with the schedule, as long as that lives. Nobody may
    change it; further arguments must be hashable.
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


def ends_of(row: tuple[Action, ...]) -> list[Action]:
    """The actions with which the stages are done with a micro-batch, W or else B, in the order of the row."""
    halved = {(action.stage, action.microbatch) for action in row if action.kind is Kind.W}
    return [
        action
        for action in row
        if action.kind is (Kind.W if (action.stage, action.microbatch) in halved else Kind.B)
    ]


def check_sizes(num_stages: int, num_microbatches: int, remat: Remat) -> None:
    """`ValueError` for sizes or a `remat` that no schedule has."""
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; a pipeline has at least 1 stage")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; a mini-batch has at least 1 micro-batch")
    check_remat(remat, num_stages, num_microbatches)


def _forward(stage: int, microbatch: int) -> list[Action]:
    return [Action(stage, Kind.F, microbatch)]


def _backward(stage: int, microbatch: int, num_microbatches: int, remat: Remat) -> list[Action]:
    """The backward with the recomputation before it: R needs nothing from another stage, so it starts while
    the stage would wait for the gradient.
    """
    is_recomputed = recomputes(choice_of(remat, stage), microbatch, num_microbatches)
    again = [Action(stage, Kind.R, microbatch)] if is_recomputed else []
    return [*again, Action(stage, Kind.B, microbatch)]


def naive(num_stages: int, num_microbatches: int = 1, remat: Remat = "never") -> Schedule:
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


def gpipe(num_stages: int, num_microbatches: int, remat: Remat = "always") -> Schedule:
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


def one_f_one_b(num_stages: int, num_microbatches: int, remat: Remat = "never") -> Schedule:
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


class Transfer(NamedTuple):
    """A message that `source` produces and `target`, of the stage before or behind, needs."""

    source: Action
    target: Action

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


def transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    """Every message of a step, in the order in which the receiving workers need them.

    Derived from the rows, never written by hand. A worker that holds both stages sends it to itself. Raises
    ValueError for an action whose gradient nobody sends.
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

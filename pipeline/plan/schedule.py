"""Schedules as data: the actions of every worker, in order.

The engine executes it, the replay lays it out in time, the memory model walks over it and the drawing prints
it. It is a tuple of actions per worker, made from its name (`named`) or read from a file (`from_csv`);
messages and dependencies are derived from it (plan/walk.py). A worker holds one stage, or several where the
schedule has a placement. Only the standard library is imported.

Actions are written `2F0` everywhere: stage 2, forward, micro-batch 0.

GPipe on K = 3 stages with M = 3 micro-batches, `remat="except_last"` (F, R, B take 1, 1, 2 slots):

    stage 0 | F0 F1 F2 .  .  .  .  .  .  B2 B2 R1 B1 B1 R0 B0 B0
    stage 1 | .  F0 F1 F2 .  .  .  B2 B2 R1 B1 B1 R0 B0 B0
    stage 2 | .  .  F0 F1 F2 B2 B2 R1 B1 B1 R0 B0 B0          (the drain takes the micro-batches in reverse)
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, wraps
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar


class Kind(StrEnum):
    """What a stage does with a micro-batch."""

    F = "F"  # forward
    R = "R"  # recompute: the forward again, with a graph (re-materialization)
    B = "B"  # backward, gradients of the inputs and of the weights together
    I = "I"  # noqa: E741  first half of a split backward: gradients of the inputs, awaited by the stage before
    W = "W"  # second half of a split backward: gradients of the weights, which nobody waits for

    __hash__ = str.__hash__  # an enumeration's own hash is slow, and actions are keys of many dicts


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


REMAT_MODES = ("never", "always", "except_last")

Remat = str | Sequence[str]
"""One of REMAT_MODES for all stages, or one for each stage: stages keep different numbers of micro-batches,
under 1F1B the first K and the last 1."""


def recomputes(name: str, microbatch: int, num_microbatches: int) -> bool:
    """Whether a stage with the remat `name` recomputes micro-batch `microbatch` of `num_microbatches`."""
    return name == "always" or (name == "except_last" and microbatch != num_microbatches - 1)


def remat_of(remat: Remat, stage: int) -> str:
    """The `remat` of one stage."""
    return remat if isinstance(remat, str) else remat[stage]


def of_stages(remat: Remat, num_stages: int, num_microbatches: int) -> tuple[frozenset[int], ...]:
    """The micro-batches that each stage recomputes."""
    return tuple(
        frozenset(
            m for m in range(num_microbatches) if recomputes(remat_of(remat, stage), m, num_microbatches)
        )
        for stage in range(num_stages)
    )


def to_text(remat: Remat) -> str:
    """Writes `remat` as one word that `from_text` reads, such as `always,except_last,never`."""
    return remat if isinstance(remat, str) else ",".join(remat)


def from_text(text: str) -> Remat:
    """Reads what `to_text` writes. `ValueError` for anything else."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in REMAT_MODES:
            raise ValueError(
                f"{name!r} is no choice of recomputation; choose one of {', '.join(REMAT_MODES)}, or give "
                "one for each stage with commas between them"
            )
    return names[0] if len(names) == 1 else names


@dataclass(frozen=True)
class Schedule:
    """The actions of every worker, in the order in which the worker takes them.

    Args:
        name: of a built-in schedule, or any other.
        num_stages: K, the number of partitions of the model.
        num_microbatches: M, numbered from 0.
        remat: which micro-batches are recomputed: "never", "always" or "except_last" (all but the last), or
            one of these names for each stage.
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
        # Equal schedules get equal fields.
        if self.placement == tuple(range(self.num_stages)):
            object.__setattr__(self, "placement", ())
        if not isinstance(self.remat, str) and isinstance(self.remat, Sequence):
            names = tuple(self.remat)
            object.__setattr__(self, "remat", names[0] if len(set(map(repr, names))) == 1 else names)

    def __reduce__(self) -> tuple[Any, ...]:
        # Cached results are not pickled: they hold hashes, which differ between processes.
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
        """Number of processes or devices, one per row."""
        return max(self.placement) + 1 if self.placement else self.num_stages

    def worker(self, stage: int) -> int:
        """The worker that holds `stage`."""
        return self.placement[stage] if self.placement else stage

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that `worker` holds, in their order."""
        return tuple(stages_of(self.placement, worker))

    def receiver(self, action: Action) -> int | None:
        """The stage that receives the action's result; None where none does."""
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
        """Whether `stage` keeps only the input of `microbatch` and recomputes its forward."""
        return microbatch in self.recomputed[stage]

    def in_flight(self, stage: int) -> int:
        """Largest number of micro-batches between forward and backward on `stage`."""
        return self._in_flight[stage]

    @cached_property
    def _in_flight(self) -> list[int]:
        rows = map(self.row, range(self.num_stages))
        return [_most([a for a in row if a.kind is Kind.F], row) for row in rows]


Derive = TypeVar("Derive", bound=Callable[..., Any])


def derived(function: Derive) -> Derive:
    """Caches what `function` returns for a schedule and hashable arguments, in the schedule itself."""

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
    """The action that ends the backward of each stage and micro-batch, in the row's order: W, else B."""
    return _either(row, Kind.W, Kind.B)


def _either(row: tuple[Action, ...], rather: Kind, otherwise: Kind) -> list[Action]:
    """The actions of kind `rather`, and those of kind `otherwise` for micro-batches without one."""
    found = {(action.stage, action.microbatch) for action in row if action.kind is rather}
    return [a for a in row if a.kind is (rather if (a.stage, a.microbatch) in found else otherwise)]


def most_alive_of(row: tuple[Action, ...]) -> int:
    """Largest number of graphs that a worker holds at a time. A stage's graph of a micro-batch lives from F,
    or from R where the micro-batch is recomputed, to the end of its backward.
    """
    return _most(_either(row, Kind.R, Kind.F), row)


def _most(begins: Collection[Action], row: tuple[Action, ...]) -> int:
    """Largest number of micro-batches between their action in `begins` and the end of their backward."""
    begins, ends = set(begins), set(ends_of(row))
    return max(accumulate([(action in begins) - (action in ends) for action in row]), default=0)


def check_sizes(num_stages: int, num_microbatches: int, remat: Remat) -> None:
    """`ValueError` for impossible sizes or an unknown `remat`."""
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; a pipeline has at least 1 stage")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; a mini-batch has at least 1 micro-batch")
    if not isinstance(remat, (str, Sequence)):
        raise ValueError(
            f"remat is {remat!r}; choose one of {', '.join(REMAT_MODES)}, or give one of them for each stage"
        )
    if not isinstance(remat, str) and len(remat) != num_stages:
        raise ValueError(
            f"remat has {len(remat)} names for {num_stages} stages; give one for each stage, or one for all"
        )
    for stage in range(num_stages):
        if (name := remat_of(remat, stage)) not in REMAT_MODES:
            what = "remat" if isinstance(remat, str) else f"remat[{stage}]"
            raise ValueError(f"{what} is {name!r}; choose one of {', '.join(REMAT_MODES)}")


def recomputed(schedule: Schedule, remat: Remat) -> Schedule:
    """Adds to `schedule`, which has no recomputation, an R wherever `remat` recomputes a stage's micro-batch.

    R stands right before the backward for which it builds the graph, and starts while the worker waits for
    the gradient. Where the backward is split, the graph lives until W. The schedule ZB-H1 ("zero bubble") on
    3 workers, M = 3, has two slots of bubble; 1F1B whose R awaits the gradient has eight:

        stage 0 | F0 F1 F2 R0 .  .  I0 W0 R1 I1 W1 R2 I2 W2
        stage 1 | .  F0 F1 R0 .  I0 F2 R1 I1 W0 R2 I2 W1 W2
        stage 2 | .  .  F0 R0 I0 F1 R1 I1 F2 R2 I2 W0 W1 W2

    `ValueError` for a schedule with recomputations, or an unknown `remat`.
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
    """The schedule for a step of fewer micro-batches. "except_last" becomes "always": the last micro-batch,
    which it does not recompute, is left out.
    """
    names = [remat_of(schedule.remat, stage) for stage in range(schedule.num_stages)]
    remat = ["never" if name == "never" else "always" for name in names]
    rows = [tuple([a for a in row if a.microbatch < num_microbatches]) for row in schedule.actions]
    return replace(schedule, num_microbatches=num_microbatches, remat=remat, actions=tuple(rows))


# Schedules as tables, a row for each worker and a cell for each action.

# What torch's runtime adds: messages, sharded parameters, sums over replicas.
_LOWERED = re.compile(
    r"\d+((SEND|RECV|WAIT_RECV|WAIT_SEND)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD|WAIT_\w+)", re.ASCII
)
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    """One line per worker, its actions in order, e.g. `0F0,0F1,0B1,0B0`: the form that torch's
    `_PipelineScheduleRuntime` reads and writes as `compute_only`, except that torch can't read recomputations
    such as `2R0`. A worker holds the stages that are in its row.
    """
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def from_csv(text: str, name: str = "csv", remat: Remat | None = None) -> Schedule:
    """Reads what `to_csv` or torch writes. `remat` is derived from the recomputations unless given.

    Empty cells, which are idle slots, and what torch's runtime adds (`0SEND_F1`, `0UNSHARD`) are left out;
    the parts of an overlapped pair such as `(0F7;7B3)OVERLAP_F_B` are taken in their order. The result is not
    yet validated: see walk.py's `validate`.

    Raises:
        ValueError: the text is no table, holds no actions or something that is not an action, or leaves out
            a stage or a micro-batch.
    """
    table = csv.reader(io.StringIO(text))
    try:
        rows = [[action for cell in cells for action in _actions(cell)] for cells in table if cells]
    except csv.Error as error:
        raise ValueError(f"the text is no table ({error}); write actions with commas between them") from error
    except ValueError as error:
        raise ValueError(f"line {table.line_num}: {error}") from error
    if not any(rows):
        raise ValueError("the text holds no actions; write one line per worker, such as 0F0,0F1,0B1,0B0")
    holders = {action.stage: worker for worker, row in reversed([*enumerate(rows)]) for action in row}
    microbatches = {action.microbatch for row in rows for action in row}
    _check_numbers("stage", holders.keys())
    _check_numbers("micro-batch", microbatches)
    if remat is None:
        known = {of_stages(mode, 1, len(microbatches))[0]: mode for mode in reversed(REMAT_MODES)}
        remat = []
        for stage in range(len(holders)):
            row = rows[holders[stage]]
            again = frozenset(a.microbatch for a in row if a.stage == stage and a.kind is Kind.R)
            if again not in known:
                listed = ", ".join(map(str, sorted(again)))
                raise ValueError(
                    f"micro-batches {listed} of {len(microbatches)} are recomputed; "
                    "a stage recomputes all of them, none, or all but the last"
                )
            remat.append(known[again])
    placement = tuple(holders[stage] for stage in range(len(holders)))
    return Schedule(name, len(holders), len(microbatches), remat, tuple(map(tuple, rows)), placement)


def _check_numbers(what: str, found: Collection[int]) -> None:
    """`ValueError` unless these are 0, 1, 2 ... However large a number is, the loop ends at the first gap."""
    missing = next((number for number in range(len(found)) if number not in found), None)
    if missing is not None:
        raise ValueError(
            f"no action is of {what} {missing}, but one is of {what} {max(found)}; they count from 0 without "
            "gaps"
        )


def _actions(cell: str) -> list[Action]:
    """The actions of a cell: none, one, or the parts of a pair."""
    cell = cell.strip()
    if not cell or _LOWERED.fullmatch(cell):
        return []
    pair = _TOGETHER.fullmatch(cell)
    return [Action.parse(part) for part in (pair[1].split(";") if pair else (cell,))]

"""What an experiment has to say about itself so that the harness can run, resume, judge and show it.

An experiment is data and four pure functions; the harness decides what to run, keeps what came out and
calls the functions that turn records into cells, tables and figures. All but `run` work without a device
and without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.record import Quantity, Record, Scalar, Status, identity, label

if TYPE_CHECKING:
    from harness.compare import Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """What the user asked for. `only` maps a key of the cases to the wanted values, as typed.

    `data`, `text` and `parallel_text` are paths of the user's own data, for experiments that train on any.
    `scratch` is a folder where a case may keep what it needs to go on after a kill; nothing depends on it.
    """

    profile: str = "short"
    device: str = "auto"
    engine: str | None = None
    seed: int = 0
    data: str | None = None
    text: str | None = None
    parallel_text: str | None = None
    scratch: Path | None = None
    fresh: bool = False
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One unit of work that is run, stored and resumed as a whole; `estimate_s` on two laptop cores.

    Cases of one `group` keep something in memory for one another, so where cases run beside each other
    these run in turn in one process. Raises ValueError for keys that would not survive being stored.
    """

    key: dict[str, Scalar]
    estimate_s: float = 1.0
    group: str = ""

    def __post_init__(self) -> None:
        for name, value in self.key.items():
            if not (value is None or type(value) in (str, int, float, bool)):
                raise ValueError(
                    f"case key {name}={value!r} is {type(value).__name__}; use str, int, float, bool or None"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"case key {name}={value} is not finite")

    @property
    def label(self) -> str:
        """`K=2 M=4`."""
        return label(self.key)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case produced. A status other than "done" needs a reason."""

    quantities: tuple[Quantity, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    status: Status = "done"
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """Our number for one cell of the paper, and all that its verdict needs to know.

    `gap` is a declared model gap relative to the paper's value (0.01 is 1 %) and needs `gap_reason`. A
    non-empty `not_comparable` says why the two numbers can't be held against each other. `note` explains
    a difference that remains. `status` and `reason` are those of the record, for a cell without a number.
    """

    table: str
    row: str
    column: str
    quantity: Quantity | None = None
    gap: float = 0.0
    gap_reason: str = ""
    not_comparable: str = ""
    note: str = ""
    status: Status = "done"
    reason: str = ""

    def __post_init__(self) -> None:
        cell = f"cell {self.table} / {self.row} / {self.column}"
        if not (math.isfinite(self.gap) and self.gap >= 0):
            raise ValueError(f"{cell}: gap is {self.gap}; it is a share of the paper's value, such as 0.01")
        if self.gap and not self.gap_reason:
            raise ValueError(
                f"{cell}: a gap of {self.gap:g} is declared without gap_reason; say why it is there"
            )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure of the paper.

    `profiles` maps "smoke", "short", "full" to what each does; `estimate` comes from the cases.
    `revision`
    is raised whenever a change makes earlier records wrong: they are then run again. `options` names the
    run options its results depend on; a case is run again for each of their values. `engines` are the
    engine names it accepts, empty if it runs none. `tables` defaults to the comparison alone. `untimed`: no
    result depends on how long anything takes, so cases may run beside each other, in processes that import
    the experiment's functions by name.

    `cases`, `cells`, `tables` and `figures` must not need torch: they serve `list` and `compare`.
    """

    name: str
    title: str
    source: str
    describe: str
    profiles: Mapping[str, str]
    cases: Callable[[RunOptions], list[Case]]
    run: Callable[[Case, RunOptions], Outcome]
    cells: Callable[[Sequence[Record]], list[Ours]]
    tables: Callable[[Sequence[Record], list[Comparison]], str] | None = None
    figures: Callable[[Sequence[Record], Path], list[Path]] | None = None
    revision: int = 1
    options: tuple[str, ...] = ("device", "engine", "seed")
    engines: tuple[str, ...] = ()
    untimed: bool = False

    def identity(self, case: Case, options: RunOptions) -> str:
        """Identity of a case; equal to that of the record it leaves."""
        return identity(self.name, options.profile, self.revision, case.key, self.relevant(options))

    def relevant(self, options: RunOptions) -> dict[str, Scalar]:
        """The run options that the results depend on, as records keep them."""
        return {name: getattr(options, name) for name in self.options}


def select(cases: Sequence[Case], only: Mapping[str, tuple[str, ...]]) -> list[Case]:
    """The cases that every wanted key admits. Raises ValueError with what is unknown and what allowed."""
    for key, wanted in only.items():
        allowed = {text(case.key[key]): None for case in cases if key in case.key}
        if not allowed:
            keys = sorted({name for case in cases for name in case.key})
            raise ValueError(
                f"unknown key {key!r} in --only; allowed: {', '.join(keys) or 'none, there is one case'}"
            )
        for value in wanted:
            if value not in allowed:
                raise ValueError(f"no case has {key}={value}; allowed: {', '.join(allowed)}")
    chosen = [
        case
        for case in cases
        if all(key in case.key and text(case.key[key]) in wanted for key, wanted in only.items())
    ]
    if not chosen:
        asked = " ".join(f"{key}={'|'.join(wanted)}" for key, wanted in only.items())
        raise ValueError(f"no case has {asked} together; drop one of them")
    return chosen


def text(value: Scalar) -> str:
    """A key's value as it is typed after --only."""
    return (
        {None: "none", True: "true", False: "false"}[value]
        if value is None or value is True or value is False
        else str(value)
    )

"""`Experiment`: what the harness needs to run an experiment, resume it, judge it and show it.

An experiment is data and a few pure functions; only `run` may need a device and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from .record import Metric, Record, Scalar, Status, check_key, identity, label
from .verdict import Result


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options of a run, chosen by the user.

    Args:
        profile: "smoke", "short" or "full"
        device: "auto", "cpu" or "cuda"
        tf32: whether GPUs may round the factors of float32 products to TF32
        engine: the engine under test, for experiments that run one
        seed: of random numbers
        data: path of the user's own images, for experiments that train on some
        fresh: whether to run cases again that are on record
        only: wanted values, as typed, by key of the cases
    """

    profile: str = "short"
    device: str = "auto"
    tf32: bool = False
    engine: str | None = None
    seed: int = 0
    data: str | None = None
    fresh: bool = False
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One unit of work that is run, stored and resumed as a whole; `estimate_s` is for two laptop cores.

    Cases of one `group` share something in memory, so parallel runs take them in turn in one process. Raises
    ValueError for keys that JSON would change.
    """

    key: dict[str, Scalar]
    estimate_s: float = 1.0
    group: str = ""

    def __post_init__(self) -> None:
        check_key(self.key, "case key")

    @property
    def label(self) -> str:
        """The case's key in words: `K=2 M=4`."""
        return label(self.key)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a case. A status other than "done" needs a reason."""

    metrics: tuple[Metric, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    status: Status = "done"
    reason: str = ""


def by_name(records: Sequence[Record]) -> list[Result]:
    """Every number of the records as a result in the table named like the experiment, in the row of its name
    and key and the column of its case (`K=2 M=4`).
    """
    return [
        Result(table=record.experiment, row=each.label, column=record.label, metric=each, record=record)
        for record in records
        for each in record.metrics
    ]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure of the paper, or another experiment.

    Args:
        name: as in the registry
        title: a line for `list`, `nox --list` and the report; a literal, since nox reads it from the source
        source: its place in the paper
        describe: a sentence or two about what it does
        profiles: "smoke", "short", "full" -> what each does; its duration is that of the cases
        cases: returns the cases to run
        run: runs one case
        cells: returns our results for numbers of the paper; by default results in rows of their own names
        reproduction: returns as text the paper's tables computed at its size beside what ran here, from the
            comparisons, with notes or without
        tables: returns further text, beside the comparison with the paper
        figures: returns the plots that the records suffice for
        paper_tables: the tables of paper.csv that it answers; results/tables.toml describes them
        docs: a page of the documentation about it
        revision: increased by a change that makes earlier records wrong: cases then run again
        options: run options that results depend on; a case runs again for each of their values
        takes: command-line options for few experiments: "engines" if `--engine` may name several
        engines: the engines it accepts; empty if it runs none
        untimed: whether no result depends on durations: cases may run in parallel, in processes that import
            the experiment's functions by name
    """

    name: str
    title: str
    source: str
    describe: str
    profiles: Mapping[str, str]
    cases: Callable[[RunOptions], list[Case]]
    run: Callable[[Case, RunOptions], Outcome]
    cells: Callable[[Sequence[Record]], list[Result]] = by_name
    reproduction: Callable[..., str] | None = None
    tables: Callable[[Sequence[Record]], str] | None = None
    figures: Callable[[Sequence[Record]], list[Plot]] | None = None
    paper_tables: tuple[str, ...] = ()
    docs: str = ""
    revision: int = 1
    options: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    untimed: bool = False

    def identity(self, case: Case, options: RunOptions) -> str:
        """The identity of a case, equal to that of its record."""
        return identity(self.name, options.profile, self.revision, case.key, self.relevant(options))

    def relevant(self, options: RunOptions) -> dict[str, Scalar]:
        """The run options that results depend on, as in records."""
        known: dict[str, Scalar] = {name: getattr(options, name) for name in self.options}
        return known | ({"tf32": True} if options.tf32 else {})


def only_of(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """`RunOptions.only` from words such as K=2. Raises ValueError for a word that is not KEY=VALUE."""
    only: dict[str, tuple[str, ...]] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise ValueError(f"--only {word!r} is not KEY=VALUE")
        only[key] = (*only.get(key, ()), value)
    return only


def select(cases: Sequence[Case], only: Mapping[str, tuple[str, ...]]) -> list[Case]:
    """The cases with the wanted values. Raises ValueError with what is unknown and what is allowed."""
    for key, wanted in only.items():
        allowed = dict.fromkeys(text(case.key[key]) for case in cases if key in case.key)
        if not allowed:
            keys = sorted({name for case in cases for name in case.key})
            raise ValueError(
                f"unknown key {key!r} in --only; allowed: {', '.join(keys) or 'none, there is one case'}"
            )
        for value in wanted:
            if value not in allowed:
                raise ValueError(f"no case has {key}={value}; allowed: {', '.join(allowed)}")
    fits = lambda case, key: key in case.key and text(case.key[key]) in only[key]  # noqa: E731
    chosen = [case for case in cases if all(fits(case, key) for key in only)]
    if not chosen:
        asked = " ".join(f"{key}={'|'.join(wanted)}" for key, wanted in only.items())
        raise ValueError(f"no case has {asked} together; drop one of them")
    return chosen


def text(value: Scalar) -> str:
    """A key's value as it is typed after --only."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A figure that can be drawn from records.

    Args:
        name: of its file, without suffix
        caption: what it shows, in a line below the figure
        alt: a description for readers who can't see it
        draw: returns a figure of matplotlib or an object with `savefig`; only this may need matplotlib
        suffix: of its file: "svg", or "png" where pixels are fewer bytes
        style: a context for drawing and saving, such as a theme
    """

    name: str
    caption: str
    alt: str
    draw: Callable[[], Any]
    suffix: str = "svg"
    style: Callable[[], AbstractContextManager[object]] = nullcontext

"""Which records belong together, and what they come to beside the paper's numbers.

A table is made of the records of one profile and one revision; records of different machines, profiles or
options never mix in one table of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpipe_bench.experiments.registry import program
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.grid import SCREEN, fill, within
from gpipe_bench.harness.report.reproduced import covers
from gpipe_bench.harness.report.table import short_text, text_table
from gpipe_bench.harness.store import Store, latest
from gpipe_bench.harness.verdict import Comparison, Result
from gpipe_bench.pipeline.plan.named import suggestion

T = TypeVar("T")

UNREADABLE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
)  # fmt: skip
"""Errors of an experiment that reads records which another program wrote."""
MOST_SCREEN = 100
"""Lines of tables beside the paper's; half as many of a text without its numbers."""


def select_records(records: Sequence[Record], experiment: Experiment, profile: str | None) -> list[Record]:
    """The latest record of each case at the current revision; without `profile`, of the latest one."""
    current = [record for record in records if record.revision == experiment.revision]
    if profile is None and current:
        profile = current[-1].profile
    return list(latest(record for record in current if record.profile == profile).values())


def folder_of(name: str, results: Path, *, is_own: bool = True) -> tuple[Path, str]:
    """Folder of an experiment's records: the user's `results`, or, where nothing of it is there and no
    folder was asked for, those that come with the project, with a sentence that says so.
    """
    having = [folder for folder in sorted(REFERENCE.glob("*")) if (folder / f"{name}.jsonl").is_file()]
    if not is_own or not having or Store(results).load(name).records:
        return results, ""
    said = f"records that came with the project ({having[0].name}); yours: {program()} run {name}"
    return having[0], said


def engines_of(*records: Record) -> tuple[str, ...]:
    """The engines that took part in any of them: those asked for, without the digests of their files, then
    those that the experiment set beside them.
    """
    names: list[str] = []
    for record in records:
        asked = str(record.options.get("engine") or "").split(",")
        beside = record.details.get("engines")
        names += [name.partition("@")[0] for name in asked] + [*(beside if isinstance(beside, dict) else ())]
    return tuple(dict.fromkeys(filter(None, names)))


def check_engine_is_there(engine: str, records: Iterable[Record]) -> None:
    """ValueError, naming those that took part, unless the engine is one of them."""
    known = engines_of(*records)
    if engine not in known:
        raise ValueError(
            f"--engine {engine}: no record has it{suggestion(engine, known)}; there are: "
            f"{', '.join(known) or 'none'}"
        )


@dataclass(frozen=True, slots=True)
class Shown:
    """Results of some records of one experiment, computed once for all readers.

    `comparisons` has one for every entry, and one for every number of the same tables that nobody produced.
    """

    records: tuple[Record, ...]
    comparisons: tuple[Comparison, ...]
    text: str = ""
    reproduction: str = ""

    @property
    def has_numbers(self) -> bool:
        """Whether any number of ours stands beside one of the paper."""
        return any(cell.ours is not None for cell in self.comparisons)


def shown_of(experiment: Experiment, records: Sequence[Record], *, brief: bool = False) -> Shown:
    """The experiment's entries beside the paper's numbers, and its text.

    A `brief` one is what a screen takes: no text where there are numbers.

    Raises RuntimeError where the entries contradict themselves, and whatever the experiment stumbles over.
    """
    _, comparisons = judged(experiment, records)
    computed = (
        "" if experiment.reproduction is None else experiment.reproduction(comparisons, notes=not brief)
    )
    shown = Shown(tuple(records), tuple(comparisons), reproduction=computed)
    if brief and shown.has_numbers:
        return shown
    tables = experiment.tables
    others = [cell for cell in comparisons if not (computed and covers(cell))]
    parts = [
        computed,
        text_table(others) if others or tables is None else "",
        "" if tables is None else tables(records),
    ]
    text = "\n\n".join(filter(None, parts))
    return Shown(tuple(records), tuple(comparisons), text, computed)


def judged(experiment: Experiment, records: Sequence[Record]) -> tuple[list[Result], list[Comparison]]:
    """The experiment's entries and what they come to; see `shown_of`."""
    entries = experiment.cells(records)
    try:
        return entries, compare(entries, whole=experiment.paper_tables)
    except ValueError as error:  # not the user's mistake, so it must not look like bad usage
        raise RuntimeError(f"the cells of {experiment.name} can't be compared") from error


def screen(shown: Shown, whole: str) -> str:
    """A screen of it; `whole` is the command that shows all. Where the paper has no numbers for it, the first
    tables of its text.
    """
    if shown.has_numbers:
        others = [cell for cell in shown.comparisons if not (shown.reproduction and covers(cell))]
        with within(SCREEN):
            *tables, counts = short_text(others).split("\n\n") if others else [""]
        parts = (shown.reproduction, _cut(tables, MOST_SCREEN), counts, f"ranges and footnotes: {whole}")
        return "\n\n".join(filter(None, parts))
    with within(SCREEN):
        lines = shown.text.splitlines()
        tables = "\n".join(line if "  " in line else fill(line) for line in lines).split("\n\n")
    text = _cut(tables, MOST_SCREEN // 2)
    return text if text.endswith(tables[-1]) else f"{text}\n\nall of it: {whole}"


def _cut(tables: Sequence[str], most: int) -> str:
    """As many tables as fit into `most` lines, and a line that says how many lines are left out."""
    kept = list(tables[:1])
    for table in tables[1:]:
        if "\n\n".join([*kept, table]).count("\n") > most:
            left = "\n\n".join(tables[len(kept) :]).count("\n") + 1
            return "\n\n".join([*kept, f"... {left} more lines"])
        kept.append(table)
    return "\n\n".join(kept)


def readable(name: str, show: Callable[[], T]) -> tuple[T | None, str]:
    """Result of `show`, or why the experiment of that name can't read its records: another program, or a
    version that was never released, may have written them.
    """
    try:
        return show(), ""
    except UNREADABLE as error:
        cause = error.__cause__ or error
        return None, f"{name} can't be shown: {type(cause).__name__}: {cause}"

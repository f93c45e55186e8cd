"""Which records belong together, in which order they are asked, and what they come to.

A table is made of the records of one profile and one revision. Records of different machines, profiles or
options never mix in one table of numbers: for the report each group is turned into cells by itself, and a
cell takes its number from the first group that has one. Your own records come first and the committed
reference records fill in what you did not run; a smoke run, which only proves that the path works, comes
last.

Judging, laying out text and drawing timelines all happen here, once, where an experiment may still stumble
over its records; everything behind it only picks and places what is read. A line may have come from a
version that was never released, or from somebody's own program. The store accepts it, because only the
experiment knows what it needs; so the experiment is asked, one record at a time, once it has stumbled over
all of them together, and a record that makes no sense to it costs itself and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpipe_bench.experiments.registry import EXPERIMENTS, load, program, suggestion
from gpipe_bench.experiments.report.timelines import Chart, charts_of
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.environment import differences
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.hypotheses import Joint, joint_text, judge_jointly, with_reasons
from gpipe_bench.harness.places import REFERENCE
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.grid import SCREEN, fill, within
from gpipe_bench.harness.report.table import short_text, text_table
from gpipe_bench.harness.store import Problem, Store, latest
from gpipe_bench.harness.verdict import Answer, Comparison

T = TypeVar("T")

PROFILES = ("full", "short", "smoke")
UNREADABLE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
)  # fmt: skip
"""What an experiment may stumble over in records that something else wrote."""
MOST_LINES = 5  # about records that can't be read
MOST_SCREEN = 100
"""Lines of tables beside the paper's; half as many of a text without its numbers."""


# Records that belong together -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Records of one experiment that belong together: one folder, profile and set of options."""

    experiment: str
    machine: str
    folder: Path
    profile: str
    records: tuple[Record, ...]
    own: bool  # from the results folder that was asked for, not a reference

    @property
    def command(self) -> str:
        """The last command that made one of them."""
        return self.records[-1].command


def select_records(records: Sequence[Record], experiment: Experiment, profile: str | None) -> list[Record]:
    """The latest record of each case at the current revision; without `profile`, of the latest one."""
    current = [record for record in records if record.revision == experiment.revision]
    if profile is None and current:
        profile = current[-1].profile
    return list(latest(record for record in current if record.profile == profile).values())


def folder_of(name: str, results: Path, *, is_own: bool = True) -> tuple[Path, str]:
    """Where the records of an experiment are: the user's `results`, or, where nothing of it is there and no
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


def folders(results: Path, references: Path = REFERENCE) -> list[tuple[str, Path]]:
    """(name, folder) of the results asked for, then of every reference machine."""
    own = results.name or str(results)
    if (references / own).is_dir() and (references / own).resolve() != results.resolve():
        own += " (yours)"
    there = sorted(references.iterdir()) if references.is_dir() else []
    others = [path for path in there if path.is_dir() and path.resolve() != results.resolve()]
    return [(own, results), *((folder.name, folder) for folder in others)]


def sources(
    experiment: Experiment, places: Iterable[tuple[str, Path]], engine: str | None = None
) -> tuple[list[Source], list[Problem]]:
    """The groups of records of an experiment, in the order in which they are asked, and unreadable lines.

    The first of `places` is the user's own. Groups in which the `engine` took part come first.
    """
    found: list[Source] = []
    problems: list[Problem] = []
    for place, (machine, folder) in enumerate(places):
        loaded = Store(folder).load(experiment.name)
        problems += loaded.problems
        groups: dict[tuple[str, str], list[Record]] = {}
        current = [record for record in loaded.records if record.revision == experiment.revision]
        for record in latest(current).values():
            groups.setdefault((record.profile, repr(sorted(record.options.items()))), []).append(record)
        found += [
            Source(experiment.name, machine, folder, profile, tuple(records), place == 0)
            for (profile, _), records in groups.items()
        ]

    def order(source: Source) -> tuple[object, ...]:
        used = source.records[-1].options.get("engine")
        usual = used is None or not experiment.engines or used == experiment.engines[0]
        profile = PROFILES.index(source.profile) if source.profile in PROFILES else len(PROFILES)
        return (
            engine is not None and engine not in engines_of(*source.records), source.profile == "smoke",
            not usual, not source.own, profile, -len(source.records), source.machine,
        )  # fmt: skip

    return sorted(found, key=order), problems


def load_all() -> tuple[list[Experiment], list[str]]:
    """Every experiment that can be loaded here, and a line for each that can't."""
    loaded: list[Experiment] = []
    warnings: list[str] = []
    for name in EXPERIMENTS:
        try:
            loaded.append(load(name))
        except ImportError as error:  # one experiment that lacks a package must not cost the whole page
            warnings.append(f"{name} can't be loaded: {error}")
    return loaded, warnings


# What they come to ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shown:
    """What some records of one experiment come to, worked out once: whoever shows them reads it here.

    `comparisons` has one for every entry, and one for every number of the same tables that nobody produced;
    `joint` one for every claim about several cells at once. `own` is the text without them.
    """

    records: tuple[Record, ...]
    entries: tuple[Answer, ...]
    comparisons: tuple[Comparison, ...]
    text: str
    own: str
    joint: tuple[Joint, ...] = ()


def screen(shown: Shown, whole: str) -> str:
    """A screen of it; `whole` is the command that shows all. Where the paper has no numbers for it, the first
    tables of its text.
    """
    if any(cell.ours is not None for cell in shown.comparisons):
        with within(SCREEN):
            *tables, counts = short_text(shown.comparisons).split("\n\n")
        return f"{_cut(tables, MOST_SCREEN)}\n\n{counts}\n\nranges, reasons and footnotes: {whole}"
    with within(SCREEN):
        lines = shown.text.splitlines()
        tables = "\n".join(line if "  " in line else fill(line) for line in lines).split("\n\n")
    text = _cut(tables, MOST_SCREEN // 2)
    return text if text.endswith(tables[-1]) else f"{text}\n\nall of it: {whole}"


def _cut(tables: Sequence[str], most: int) -> str:
    """As many of the tables as fit into so many lines, and how many lines are left out."""
    kept = list(tables[:1])
    for table in tables[1:]:
        if "\n\n".join([*kept, table]).count("\n") > most:
            left = "\n\n".join(tables[len(kept) :]).count("\n") + 1
            return "\n\n".join([*kept, f"... {left} more lines"])
        kept.append(table)
    return "\n\n".join(kept)


def shown_of(experiment: Experiment, records: Sequence[Record]) -> Shown:
    """The experiment's entries beside the paper's numbers, and its text.

    Raises RuntimeError where the entries contradict themselves, and whatever the experiment stumbles over.
    """
    tested = () if experiment.hypotheses is None else experiment.hypotheses(records)
    entries = with_reasons(experiment.cells(records), tested)
    try:
        comparisons = compare(entries, whole=experiment.paper_tables)
    except ValueError as error:  # not the user's mistake, so it must not look like bad usage
        raise RuntimeError(f"the cells of {experiment.name} can't be compared") from error
    tables = experiment.tables
    text = text_table(comparisons) if tables is None else tables(records, comparisons)
    own = "" if tables is None else tables(records, [])
    joint = judge_jointly(experiment.walks(records)) if experiment.walks is not None else []
    text = "\n\n".join(filter(None, [text, joint_text(joint)]))
    return Shown(tuple(records), tuple(entries), tuple(comparisons), text, own, tuple(joint))


def environment_warnings(records: Sequence[Record]) -> list[str]:
    """One line for each field in which the records differ, of those whose numbers depend on a machine."""
    environments = [
        record.environment
        for record in records
        if any(quantity.provenance != "modelled" for quantity in record.quantities)
    ]
    return [
        f"records differ in {name}: {' | '.join(map(str, values))}"
        for name, values in differences(environments).items()
    ]


def readable(
    name: str, records: Sequence[Record], show: Callable[[Sequence[Record]], T]
) -> tuple[T | None, list[str]]:
    """What `show` makes of the records that it can make something of, and lines about the others.

    None where it stumbles over all: the mistake may then be the experiment's own. `name` is the experiment's.
    """

    def tried(records: Sequence[Record]) -> tuple[T | None, str]:
        """What it makes of them, or what it stumbles over."""
        try:
            return show(records), ""
        except UNREADABLE as error:
            cause = error.__cause__ or error
            return None, f"{type(cause).__name__}: {cause}"

    shown, error = tried(records)
    if not error:
        return shown, []
    causes = [tried([record])[1] for record in records]
    kept = [record for record, cause in zip(records, causes, strict=True) if not cause]
    shown, rest = tried(kept)
    if not kept or rest:
        return None, [f"{name} can't be shown: {error}"]
    lines = [
        f"{name} can't read its record of {record.label} ({cause}); left out"
        for record, cause in zip(records, causes, strict=True)
        if cause
    ]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"{name}: {len(lines) - MOST_LINES} more records are left out"]
    return shown, lines


@dataclass(frozen=True, slots=True)
class Reading:
    """One source, without the records that can't be read, and all that follows from the others."""

    source: Source
    shown: Shown
    charts: tuple[Chart, ...]


def readings(
    experiment: Experiment, groups: Sequence[Source]
) -> tuple[list[Reading], list[tuple[Source, str]]]:
    """The readings of the groups, and lines about records that can't be shown, with the group of each."""
    found: list[Reading] = []
    lines: list[tuple[Source, str]] = []
    for group in groups:

        def read(records: Sequence[Record], group: Source = group) -> Reading:
            source = dataclasses.replace(group, records=tuple(records))
            return Reading(source, shown_of(experiment, records), tuple(charts_of(experiment, records)))

        reading, left_out = readable(experiment.name, group.records, read)
        lines += [(group, line) for line in left_out]
        found += [] if reading is None else [reading]
    return found, lines


def answers(found: Sequence[Reading]) -> list[Comparison]:
    """One for each entry that any of the readings reports, from the first that has a number."""
    chosen: dict[tuple[str, ...], Comparison] = {}
    for source, shown in ((each.source, each.shown) for each in found):
        compared = {comparison.key: comparison for comparison in shown.comparisons}
        for entry in shown.entries:
            cell = compared[entry.key]
            if cell.ours is not None or entry.status == "out_of_memory":
                command = source.command if entry.record is None else entry.record.command
                cell = dataclasses.replace(
                    cell, machine=source.machine, profile=source.profile, command=command
                )
            if entry.key not in chosen or (cell.machine and not chosen[entry.key].machine):
                chosen[entry.key] = cell
    return list(chosen.values())

"""What records come to: the same functions after a run, in `compare` and in the report.

Judging, laying out text and drawing timelines all happen here, once, where an experiment may still stumble
over its records; everything behind it only picks and places what is read. A line may have come from a
version that was never released, or from somebody's own program. The store accepts it, because only the
experiment knows what it needs; so the experiment is asked, one record at a time, once it has stumbled over
all of them together, and a record that makes no sense to it costs itself and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gpipe_bench.experiments.report.records import Source
from gpipe_bench.experiments.report.timelines import Chart, charts_of
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.environment import differences
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.hypotheses import Joint, joint_text, judge_jointly, with_reasons
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.table import Row, short_text, text_table
from gpipe_bench.harness.verdict import Answer, Comparison

T = TypeVar("T")

UNREADABLE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
)  # fmt: skip
"""What an experiment may stumble over in records that something else wrote."""

MOST_LINES = 5


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


def screen(shown: Shown, name: str) -> str:
    """A screen of it, and how to see the rest; all of the text where the paper has no numbers for it."""
    if not any(cell.ours is not None for cell in shown.comparisons):
        return shown.text
    return f"{short_text(shown.comparisons)}\n\nranges, reasons and footnotes: compare {name} --full"


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
        f"records differ in {name}: {' | '.join(str(value) for value in values)}"
        for name, values in differences(environments).items()
    ]


def readable(
    name: str, records: Sequence[Record], show: Callable[[Sequence[Record]], T]
) -> tuple[T | None, list[str]]:
    """What `show` makes of the records that it can make something of, and lines about the others.

    None where it stumbles over all: the mistake may then be the experiment's own. `name` is the experiment's.
    """
    shown, error = _tried(show, records)
    if not error:
        return shown, []
    alone = [_tried(show, [record])[1] for record in records]
    lines = [
        f"{name} can't read its record of {record.label} ({cause}); left out"
        for record, cause in zip(records, alone, strict=True)
        if cause
    ]
    kept = [record for record, cause in zip(records, alone, strict=True) if not cause]
    shown, rest = _tried(show, kept)
    if not kept or rest:
        return None, [f"{name} can't be shown: {error}"]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"{name}: {len(lines) - MOST_LINES} more records are left out"]
    return shown, lines


def _tried(show: Callable[[Sequence[Record]], T], records: Sequence[Record]) -> tuple[T | None, str]:
    """What it makes of them, or what it stumbles over."""
    try:
        return show(records), ""
    except UNREADABLE as error:
        cause = error.__cause__ or error
        return None, f"{type(cause).__name__}: {cause}"


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
            return Reading(source, shown_of(experiment, records), tuple(charts_of(experiment, source)))

        reading, left_out = readable(experiment.name, group.records, read)
        lines += [(group, line) for line in left_out]
        found += [] if reading is None else [reading]
    return found, lines


def answers(found: Sequence[Reading]) -> list[Row]:
    """One row for each entry that any of the readings reports, from the first that has a number."""
    chosen: dict[tuple[str, ...], Row] = {}
    for source, shown in ((each.source, each.shown) for each in found):
        compared = {comparison.key: comparison for comparison in shown.comparisons}
        for entry in shown.entries:
            row = Row(comparison=compared[entry.key], entry=entry)
            if row.comparison.ours is not None or entry.status == "out_of_memory":
                command = source.command if entry.record is None else entry.record.command
                row = dataclasses.replace(
                    row, machine=source.machine, profile=source.profile, command=command
                )
            if entry.key not in chosen or (row.machine and not chosen[entry.key].machine):
                chosen[entry.key] = row
    return list(chosen.values())

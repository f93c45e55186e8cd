"""From records to what is shown: the same functions after a run, in `compare` and in the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.judging.compare import Comparison, compare
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.records.environment import differences
from gpipe_bench.harness.records.record import Record
from gpipe_bench.harness.report.text import text_table


@dataclass(frozen=True, slots=True)
class Shown:
    """What some records of one experiment come to, worked out once: whoever shows them reads it here.

    `comparisons` has one for every entry, and one for every number of the same tables that nobody produced.
    """

    records: tuple[Record, ...]
    entries: tuple[Entry, ...]
    comparisons: tuple[Comparison, ...]
    text: str


def shown_of(experiment: Experiment, records: Sequence[Record]) -> Shown:
    """The experiment's entries beside the paper's numbers, and its text.

    Raises RuntimeError where the entries contradict themselves, and whatever the experiment stumbles over.
    """
    entries = experiment.cells(records)
    try:
        comparisons = compare(entries)
    except ValueError as error:  # not the user's mistake, so it must not look like bad usage
        raise RuntimeError(f"the cells of {experiment.name} can't be compared") from error
    tables = experiment.tables
    text = text_table(comparisons) if tables is None else tables(records, comparisons)
    return Shown(tuple(records), tuple(entries), tuple(comparisons), text)


def environment_warnings(records: Sequence[Record]) -> list[str]:
    """One line for each field that numbers depend on and in which the records differ."""
    return [
        f"records differ in {name}: {' | '.join(str(value) for value in values)}"
        for name, values in differences([record.environment for record in records]).items()
    ]

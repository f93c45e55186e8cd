"""What each group of records comes to, worked out once for the whole report.

Judging, laying out text and drawing timelines all happen here, where an experiment may still stumble over its
records; everything behind it only picks and places what is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_bench.experiments.report.readable import readable
from gpipe_bench.experiments.report.records import Source
from gpipe_bench.experiments.report.show import Shown, shown_of
from gpipe_bench.experiments.report.timelines import charts_of
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.records.record import Record
from gpipe_bench.harness.report.chart import Chart
from gpipe_bench.harness.report.page import Answer


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
        if reading is not None:
            found.append(reading)
    return found, lines


def answers(found: Sequence[Reading]) -> list[Answer]:
    """One answer for each entry that any of the readings reports, from the first that has a number."""
    chosen: dict[tuple[str, str, str], Answer] = {}
    for reading in found:
        compared = {comparison.key: comparison for comparison in reading.shown.comparisons}
        for entry in reading.shown.entries:
            answer = Answer(
                entry=entry,
                comparison=compared[entry.key],
                machine=reading.source.machine,
                profile=reading.source.profile,
                command=_command(entry, reading.source),
            )
            if entry.key not in chosen or (answer.answers and not chosen[entry.key].answers):
                chosen[entry.key] = answer
    return list(chosen.values())


def _command(entry: Entry, source: Source) -> str:
    return source.command if entry.record is None else entry.record.command

"""From records to what is shown: the same functions after a run and in `compare`."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.judging.compare import Comparison, compare
from gpipe_bench.harness.judging.paper import load_paper
from gpipe_bench.harness.records.environment import differences
from gpipe_bench.harness.records.record import Record
from gpipe_bench.harness.report.tables import text_table


def comparisons_of(experiment: Experiment, records: Sequence[Record]) -> list[Comparison]:
    """The experiment's cells beside the paper's. Raises RuntimeError where they contradict themselves."""
    paper = load_paper()
    try:
        return compare(experiment.cells(records), paper)
    except ValueError as error:  # not the user's mistake, so it must not look like bad usage
        raise RuntimeError(f"the cells of {experiment.name} can't be compared") from error


def text_of(experiment: Experiment, records: Sequence[Record], comparisons: list[Comparison]) -> str:
    """The experiment's own text, or the comparison alone."""
    if experiment.tables is None:
        return text_table(comparisons)
    return experiment.tables(records, comparisons)


def environment_warnings(records: Sequence[Record]) -> list[str]:
    """One line for each field that numbers depend on and in which the records differ."""
    return [
        f"records differ in {name}: {' | '.join(str(value) for value in values)}"
        for name, values in differences([record.environment for record in records]).items()
    ]

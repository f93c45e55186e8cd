"""Records that are whole and yet make no sense to their experiment: they cost themselves and nothing else.

A line may have come from a version that was never released, or from somebody's own program. The store accepts
it, because only the experiment knows what it needs; so the experiment is asked, one record at a time, once
it has stumbled over all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpipe_bench.experiments.report.show import comparisons_of, text_of
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.records.record import Record

UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
)
"""What an experiment may stumble over in records that something else wrote."""

MOST_LINES = 5


def show_all(experiment: Experiment, records: Sequence[Record]) -> None:
    """Makes all that `compare` shows of the records, or raises what the experiment stumbles over."""
    text_of(experiment, records, comparisons_of(experiment, records))


def readable(
    experiment: Experiment,
    records: Sequence[Record],
    use: Callable[[Experiment, Sequence[Record]], object] = show_all,
) -> tuple[list[Record], list[str]]:
    """The records that `use` can make something of, and lines about what it can't.

    None of them where it stumbles over all: the mistake may then be the experiment's own.
    """
    error = _stumbles(experiment, records, use)
    if error is None:
        return list(records), []
    kept: list[Record] = []
    lines: list[str] = []
    for record in records:
        alone = _stumbles(experiment, [record], use)
        if alone is None:
            kept.append(record)
        else:
            lines.append(
                f"{experiment.name} can't read its record of {record.label} ({_cause(alone)}); left out"
            )
    if not kept or _stumbles(experiment, kept, use) is not None:
        return [], [f"{experiment.name} can't be shown: {_cause(error)}"]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"{experiment.name}: {len(lines) - MOST_LINES} more records are left out"]
    return kept, lines


def _stumbles(
    experiment: Experiment,
    records: Sequence[Record],
    use: Callable[[Experiment, Sequence[Record]], object],
) -> Exception | None:
    try:
        use(experiment, records)
    except UNREADABLE as error:
        return error
    return None


def _cause(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"

"""Table 2's hypotheses: the settings of its predictions, and what each gives."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.published.hypotheses import hypotheses_of
from gpipe_bench.harness.judging.hypotheses import Hypothesis
from gpipe_bench.harness.records.record import Record


def hypotheses(records: Sequence[Record]) -> list[Hypothesis]:
    """Every setting that was tried, from the records of the predictions."""
    return hypotheses_of(records)

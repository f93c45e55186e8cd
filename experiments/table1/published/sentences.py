"""What the text says of the largest models of Table 1: linear in the accelerators for the Transformer, not
perfectly so for AmoebaNet.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.measuring.tables.sentences import TABLE, word
from gpipe_bench.experiments.table1.published.choices import capacity_choices, capacity_record, ranged
from gpipe_bench.experiments.table1.published.settings import spread_of
from gpipe_bench.harness.judging.allowed import at_least
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.records.record import Record

NOTE = (
    "ours is the quotient of the largest models that fit, both under the same settings, over the number of "
    "accelerators"
)
SENTENCES = (
    ("Transformer-L: largest model, per accelerator", "transformer", 128),
    ("AmoebaNet-D: largest model, per accelerator", "amoebanet", 8),
)
"""Row, half, and how many accelerators are set against one."""


def sentences(records: Sequence[Record]) -> list[Entry]:
    """An entry for each sentence that the records suffice for."""
    found = []
    for row, half, most in SENTENCES:
        record = capacity_record(records, half)
        if record is None:
            continue
        choices = capacity_choices(record)
        quotients = choices.quotient(f"pipeline-{most}", "pipeline-1")
        values = [None if value is None else value / most for value in quotients]
        spread = spread_of(choices.settings, values, choices.names)
        if spread is None:
            continue
        found.append(
            Entry(
                table=TABLE,
                row=row,
                column=f"pipeline-{most} over pipeline-1",
                question="as published",
                quantity=ranged(row, "ratio", spread),
                spread=spread,
                allowed=at_least(word("near_linear_share")) if half == "transformer" else None,
                record=record,
                note=NOTE,
            )
        )
    return found

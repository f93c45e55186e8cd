"""Our cells of Table 2, from records alone: normalised throughput, which is what the paper prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpipe_bench.experiments.measuring.step_text import GAP, GAP_REASON, SMOKE
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.records.find import find
from gpipe_bench.harness.records.record import Record

TABLES = {"amoebanet": "table2-amoebanet", "transformer": "table2-transformer"}
JUDGED = "fitted"  # the mini-batch as the paper chose it


def configurations(record: Record) -> list[tuple[int, int]]:
    """(K, M) of all that was timed, in the order of the table."""
    return sorted(
        (facts["num_stages"], facts["num_microbatches"]) for facts in record.details["cells"].values()
    )


def facts_of(record: Record, num_stages: int, num_microbatches: int) -> dict[str, Any]:
    """What is known of one configuration beside its numbers."""
    return next(
        facts
        for facts in record.details["cells"].values()
        if (facts["num_stages"], facts["num_microbatches"]) == (num_stages, num_microbatches)
    )


def cells(records: Sequence[Record]) -> list[Entry]:
    """A cell for each (K, M) of each model on record."""
    return [cell for model in TABLES for cell in _of_model(records, model)]


def _of_model(records: Sequence[Record], model: str) -> Iterator[Entry]:
    record = find(records, "done", model=model, batch=JUDGED)
    if record is None:
        return
    for num_stages, num_microbatches in configurations(record):
        yield Entry(
            table=TABLES[model],
            row=f"M={num_microbatches}",
            column=f"K={num_stages}",
            quantity=record.quantity("normalised throughput", K=num_stages, M=num_microbatches),
            record=record,
            not_comparable=SMOKE if record.profile == "smoke" else "",
            gap=GAP,
            gap_reason=GAP_REASON,
            note=_note(record),
        )


def _note(record: Record) -> str:
    scale = record.details["scale"]
    where = f"A scaled model ({scale}): the shape of the table is compared, not its speeds. " if scale else ""
    return (
        f"{where}Exact partition by measured seconds, early recomputation, the mini-batch fitted to a memory "
        "cap; the paper gives neither its mini-batches nor its partitions."
    )

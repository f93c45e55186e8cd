"""Our cells of Table 2, from records alone: normalised throughput, which is what the paper prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpipe_bench.experiments.measuring.step_text import GAP, GAP_REASON, SMOKE
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.records.record import Quantity, Record

TABLES = {"amoebanet": "table2-amoebanet", "transformer": "table2-transformer"}
JUDGED = "fitted"  # the mini-batch as the paper chose it


def find(records: Sequence[Record], model: str, batch: str) -> Record | None:
    """The finished record of a model with that choice of mini-batch."""
    return next(
        (
            r
            for r in records
            if r.case.get("model") == model and r.case.get("batch") == batch and r.status == "done"
        ),
        None,
    )


def cell_names(record: Record) -> list[tuple[int, int]]:
    """(K, M) of all cells of a record, in the order of the table."""
    found = [tuple(int(part[2:]) for part in name.split()) for name in record.details["cells"]]
    return sorted((k, m) for k, m in found)


def best(record: Record, what: str, num_stages: int, num_microbatches: int) -> Quantity | None:
    """A number of a cell by its name without "real": the replayed one, which all cells have."""
    return record.quantity(f"{what} K={num_stages} M={num_microbatches}")


def cells(records: Sequence[Record]) -> list[Entry]:
    """A cell for each (K, M) of each model on record."""
    return [cell for model in TABLES for cell in _of_model(records, model)]


def _of_model(records: Sequence[Record], model: str) -> Iterator[Entry]:
    record = find(records, model, JUDGED)
    if record is None:
        return
    for num_stages, num_microbatches in cell_names(record):
        yield Entry(
            table=TABLES[model],
            row=f"M={num_microbatches}",
            column=f"K={num_stages}",
            quantity=best(record, "normalised throughput", num_stages, num_microbatches),
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

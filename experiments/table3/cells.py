"""Our cells of Table 3, from records alone: throughput relative to K = 2, which is what the paper prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpipe_bench.experiments.measuring.step_text import SMOKE
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.records.find import find
from gpipe_bench.harness.records.record import Quantity, Record

TABLES = {"amoebanet": "table3-amoebanet", "transformer": "table3-transformer"}

WIDEST = 0.5
"""Of an interval, relative to its value; a wider one would let any number count as reproduced."""


def stage_counts(record: Record) -> list[int]:
    """The values of K on record."""
    return [facts["num_stages"] for facts in record.details["stages"].values()]


def cells(records: Sequence[Record]) -> list[Entry]:
    """A cell for each K of each model whose steps were measured; the modelled ones are shown beside them."""
    return [cell for model in TABLES for cell in _of_model(records, model)]


def _of_model(records: Sequence[Record], model: str) -> Iterator[Entry]:
    record = find(records, "done", part="steps", model=model)
    if record is None:
        return
    for k in stage_counts(record):
        quantity = record.quantity("normalised throughput", link=record.details["judged"], K=k)
        yield Entry(
            table=TABLES[model],
            row="M=32",
            column=f"K={k}",
            quantity=quantity,
            record=record,
            gap=round(record.details["gap"][f"K={k}"], 3),
            gap_reason=f"how long a message takes beside the computation is modelled: "
            f"{record.details['assumption']}",
            note=_note(record),
            not_comparable=SMOKE if record.profile == "smoke" else _too_wide(quantity),
        )


def _too_wide(quantity: Quantity | None) -> str:
    """Why an interval that would admit almost any number is not held against the paper's."""
    if quantity is None or quantity.value is None or quantity.low is None or quantity.high is None:
        return ""
    width = (quantity.high - quantity.low) / quantity.value
    if width <= WIDEST:
        return ""
    return (
        f"The machine was busy with other things: the 95 % interval is {width:.0%} of the value wide, more "
        f"than {WIDEST:.0%}; run it again (--fresh) on a quiet machine."
    )


def _note(record: Record) -> str:
    scale = record.details["scale"]
    where = (
        f"A scaled model ({scale}) over PCIe slowed down as much as its computation: balance of the stages, "
        "schedule and the share of the messages are compared, not speeds. "
        if scale
        else ""
    )
    return (
        f"{where}Exact partition by measured seconds; the paper gives neither its partitions nor its batches."
    )

"""Our numbers for the cells of Table 1 and of the claims made from it, from records alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpipe_bench.experiments.table1.paper_models import COLUMNS, HALVES
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.records.record import Quantity, Record, Status, find

CONTENT = {
    "amoebanet": (
        "ours is what PyTorch's autograd keeps in float32 in a real step: saved activations with the "
        "int64 indices of max pooling, boundary inputs, gradients of activations; the parameters' gradients "
        "are not in it (see below); the paper's TPU system is not public and kept activations in bfloat16"
    ),
    "transformer": (
        "ours is what PyTorch's autograd keeps in float32 in a real step, the softmax of the attention "
        "included as in 2019; the parameters' gradients are not in it (see below); the paper's TPU system is "
        "not public and its fused operations keep other tensors"
    ),
}
SMALLER = (
    "without micro-batches and re-materialization all activations of the mini-batch must fit, and eager "
    "autograd keeps several times more of them than the paper reports for its system"
)
LARGER = (
    "the search looks for the largest model that an exact cut by modelled memory fits, with as many "
    "micro-batches as it needs; the paper does not say how it chose its models"
)
JUDGED_ATTENTION = {"amoebanet": "none", "transformer": "explicit"}

_CLAIMS = (
    ("AmoebaNet: largest on 8 accelerators over naive-1", "amoebanet", "pipeline-8", "naive-1"),
    ("Transformer: largest on 128 partitions over naive-1", "transformer", "pipeline-128", "naive-1"),
    ("Transformer: larger by re-materialization alone", "transformer", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger on one accelerator", "amoebanet", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger from 1 to 8 accelerators", "amoebanet", "pipeline-8", "pipeline-1"),
)
"""Row, half and the two columns whose parameters are divided."""


def cells(records: Sequence[Record]) -> list[Entry]:
    found: list[Entry] = []
    for half in HALVES:
        for column in COLUMNS[half]:
            key = {"half": half, "column": column.name, "attention": JUDGED_ATTENTION[half]}
            paper = find(records, part="paper", **key)
            rows = ("parameters", "parameter memory", "peak activation memory")
            found.extend(_cell(half, column.name, row, paper) for row in rows)
            largest = find(records, part="largest", precision="float32", **key)
            found.append(_largest(half, column.name, largest))
    return found + [_claim(records, *claim) for claim in _CLAIMS]


def _cell(half: str, column: str, row: str, record: Record | None) -> Entry:
    return Entry(
        table=HALVES[half].table,
        row=row,
        column=column,
        quantity=record.quantity(row) if record is not None else None,
        record=record,
        note=CONTENT[half] if row == "peak activation memory" else "",
        status=record.status if record is not None else "done",
        reason=record.reason if record is not None else "",
    )


def _largest(half: str, column: str, record: Record | None) -> Entry:
    quantity = record.quantity("parameters") if record is not None else None
    status: Status = "done" if record is None else record.status
    reason = "" if record is None else record.reason
    if quantity is not None and quantity.value is None:
        status, reason = "out_of_memory", f"{quantity.note}; {SMALLER}"
    return Entry(
        table=HALVES[half].table,
        row="maximum parameters",
        column=column,
        quantity=None if quantity is None or quantity.value is None else _higher(quantity),
        record=record,
        note=SMALLER if column.startswith("naive") else LARGER,
        status=status,
        reason=reason,
    )


def _higher(quantity: Quantity) -> Quantity:
    return replace(quantity, higher_is_better=True)


def _claim(records: Sequence[Record], row: str, half: str, over: str, under: str) -> Entry:
    counts = []
    for column in (over, under):
        record = find(records, part="paper", half=half, column=column, attention=JUDGED_ATTENTION[half])
        quantity = record.quantity("parameters") if record is not None else None
        counts.append(quantity.value if quantity is not None and quantity.value is not None else 0)
    ratio = Quantity(
        name=row, value=counts[0] / counts[1] if all(counts) else None, unit="ratio", provenance="modelled"
    )
    return Entry(
        table="claims",
        row=row,
        column=f"{over} / {under}",
        quantity=ratio,
    )

"""Our numbers for the paper's formulas, from records alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.records.find import of_case
from gpipe_bench.harness.records.record import Quantity, Record

TABLE = "formulas"
NEGLIGIBLE = Fraction(1, 5)
RULE = (
    "The paper does not say which bubble it calls negligible. At M = 4K it is (K-1)/(5K-1), 11 % at K = 2 "
    "and 18 % at K = 8, and M = 4K is the least whole multiple of K that keeps it below 20 % for every K."
)


def of_part(records: Sequence[Record], part: str) -> list[Record]:
    """The finished records of one part, in order; fewer stages first."""
    found = of_case(records, "done", part=part)
    return sorted(found, key=lambda r: (str(r.case.get("model", "")), int(str(r.case.get("num_stages", 0)))))


def cells(records: Sequence[Record]) -> list[Entry]:
    """A cell for every formula that the paper's text gives and we have a record for."""
    return [*_bubbles(records), *_activations(records), *_rule(records), *_sizes(records)]


def _bubbles(records: Sequence[Record]) -> Iterator[Entry]:
    for record in of_part(records, "bubble"):
        if record.case["num_stages"] not in (2, 4, 8):
            continue
        for count in (1, 4, 32):
            yield Entry(
                table=TABLE,
                row=f"bubble (K-1)/(M+K-1) at M={count}",
                column=f"K={record.case['num_stages']}",
                quantity=record.quantity("bubble", schedule="gpipe", M=count),
                record=record,
                note="GPipe without re-materialization, equal stages, a free link.",
            )


def _activations(records: Sequence[Record]) -> Iterator[Entry]:
    for record in of_part(records, "formula"):
        layers, count = record.case["num_layers"], record.case["num_microbatches"]
        yield Entry(
            table=TABLE,
            row=f"activation memory (N + L/K N/M) / N at L={layers}, M={count}",
            column=f"K={record.case['num_stages']}",
            quantity=record.quantity("peak activations / N"),
            record=record,
            note="Counted over the schedule's actions, where every layer's activations weigh the same.",
        )


def least_multiple(records: Sequence[Record]) -> int | None:
    """The least whole M / K with a bubble below `NEGLIGIBLE` for every K on record."""
    found = of_part(records, "bubble")
    for ratio in (1, 2, 3, 4, 8):
        quantities = [
            r.quantity("bubble", schedule="gpipe", M=ratio * int(str(r.case["num_stages"]))) for r in found
        ]
        values = [q.value for q in quantities if q is not None and q.value is not None]
        if values and len(values) == len(found) and all(value < NEGLIGIBLE for value in values):
            return ratio
    return None


def _sizes(records: Sequence[Record]) -> Iterator[Entry]:
    """The parameters of models whose traffic is on record and that no other table counts."""
    for record in of_part(records, "traffic"):
        count = record.quantity("parameters")
        if record.case["model"] == "amoebanet-b":
            yield Entry(table="amoebanet-b", row="parameters", column="v5", quantity=count, record=record)
        elif record.case["model"] == "transformer-seq2seq":
            name = str(record.case["size"]).replace(", ", ",")
            yield Entry(table="nmt-models", row=name, column="parameters", quantity=count, record=record)


def _rule(records: Sequence[Record]) -> Iterator[Entry]:
    ratio = least_multiple(records)
    if ratio is not None:
        yield Entry(
            table=TABLE,
            row="micro-batches per stage for a negligible bubble",
            column="M / K",
            quantity=Quantity(
                name="least M / K with a bubble below 20 %", value=ratio, unit="ratio", provenance="replayed"
            ),
            not_comparable=RULE,
        )

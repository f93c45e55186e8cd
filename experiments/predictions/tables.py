"""The predictions of others' numbers from records alone: entries, and how far they are off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from gpipe_bench.harness.paper import PaperCell, load_paper
from gpipe_bench.harness.record import Quantity, Record
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.units import show
from gpipe_bench.harness.verdict import Comparison, Entry, Spread

TORCHGPIPE = ("amoebanet", "resnet101", "resnet101-accuracy", "unet")
"""Its benchmark scripts whose speeds are predicted."""

UNETS = ("naive-1", "pipeline-1", "pipeline-2", "pipeline-4", "pipeline-8")
"""Columns of its table of the largest U-Nets."""

SOURCES = {"torchgpipe": "torchgpipe", "memory": "torchgpipe", "count": "paper"}
"""Whose numbers a part predicts, as in results/paper.csv."""

NOTES = {
    "torchgpipe": "Predicted for a P40 by its published peaks, with torchgpipe's batches and cuts.",
    "memory": (
        "ours is the sum of the accelerators' peaks in bytes that tensors hold, and nothing in it is open; "
        "the published one is what the allocator had reserved"
    ),
    "count": "Counted on the zoo's AmoebaNet-C.",
}


DIRECT_SKIPS = (
    "over more than two stages torchgpipe sends a skip directly from the stage that makes it to the one "
    "that takes it; predicted steps have links between neighbours only"
)


def cells(records: Sequence[Record]) -> list[Entry]:
    """An entry for each published number that is predicted, or why it is not."""
    known = [record for record in records if record.status == "done" and record.case["part"] in SOURCES]
    found = [entry for record in known for entry in _entries(record)]
    if any(record.case.get("script") == "unet" for record in known):
        found += [
            Entry(
                table="unet-speed", row=row, column=column, source="torchgpipe", question="as published",
                reason=DIRECT_SKIPS,
            )
            for column in ("pipeline-4", "pipeline-8")
            for row in ("throughput", "normalized throughput")
        ]  # fmt: skip
    return found


def _entries(record: Record) -> Iterator[Entry]:
    part = str(record.case["part"])
    spreads = {
        tuple(each["cell"]): Spread.from_data(each["spread"]) for each in record.details.get("predicted", ())
    }
    for quantity in record.quantities:
        place = (str(quantity.key["table"]), str(quantity.key["row"]), str(quantity.key["column"]))
        yield Entry(
            table=place[0],
            row=place[1],
            column=place[2],
            source=SOURCES[part],
            question="as published",
            quantity=quantity,
            spread=spreads.get(place),
            record=record,
            note=NOTES[part],
        )


@dataclass(frozen=True, slots=True)
class _Line:
    """One published number beside its prediction."""

    entry: Entry
    published: PaperCell
    quantity: Quantity

    @property
    def ratio(self) -> float:
        assert self.quantity.value is not None
        return self.quantity.value / self.published.value

    @property
    def is_inside(self) -> bool:
        """Whether the range meets what rounds to the published number."""
        assert self.entry.range is not None
        low, high = self.entry.range
        return low <= self.published.value + self.published.rounding and high >= (
            self.published.value - self.published.rounding
        )


KINDS = ("ratios", "absolute speeds", "memory", "counts")


def _kind(line: _Line) -> str:
    return {"ratio": "ratios", "samples/s": "absolute speeds", "GiB": "memory", "parameters": "counts"}[
        line.published.unit
    ]


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    """Every number, and the errors by kind."""
    published = {(cell.source, *cell.key): cell for cell in load_paper()}
    lines = [
        _Line(entry, published[entry.source, *entry.place], entry.quantity)
        for entry in cells(records)
        if entry.quantity is not None and (entry.source, *entry.place) in published
    ]
    if not lines:
        return ""
    parts = [
        _grid(kind, found) for kind in KINDS if (found := [each for each in lines if _kind(each) == kind])
    ]
    return "\n\n".join(parts)


def _grid(kind: str, lines: Sequence[_Line]) -> str:
    rows = []
    for line in lines:
        entry, unit = line.entry, line.quantity.unit
        assert entry.range is not None
        assert line.quantity.value is not None
        low, high = entry.range
        rows.append(
            [
                f"{entry.table}: {entry.row}, {entry.column}",
                line.published.printed,
                show(line.quantity.value, unit, 4),
                "-" if low == high else f"{show(low, unit, 3)} to {show(high, unit, 3)}",
                f"{line.ratio:.3f}",
                "yes" if line.is_inside else "no",
            ]
        )
    off = [abs(line.ratio - 1) for line in lines]
    inside = sum(line.is_inside for line in lines)
    title = (
        f"{kind.capitalize()}: predicted, in the middle of what is unknown, against published\n"
        f"  the middle is off by {_percent(median(off))} in the median, {_percent(max(off))} at worst; "
        f"{inside} of {len(lines)} lie in the range"
    )
    headers = ["", "published", "middle", "range", "middle / published", "in the range"]
    return Grid(title=title, columns=headers, lines=rows, right=numbers(headers)).text()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 5e-4 else f"{100 * share:.3f} %"

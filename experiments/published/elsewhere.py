"""How far the predictions are off where others published numbers that they were not made for.

Only the middle that the rule gives counts: a prediction that may be chosen among many is always right
somewhere. Ratios and absolute numbers are told apart, since the unknown share of the peak moves an absolute
number as a whole and leaves a ratio nearly alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gpipe_bench.harness.paper import PaperCell, load_paper
from gpipe_bench.harness.record import Record

SOURCE = "torchgpipe"


@dataclass(frozen=True, slots=True)
class Errors:
    """|predicted / published - 1| of some numbers."""

    ratios: tuple[float, ...]
    absolute: tuple[float, ...]

    @property
    def sentence(self) -> str:
        """Of both kinds: median and worst."""
        parts = [
            f"{kind} median {100 * median(found):.0f} %, worst {100 * max(found):.0f} % of {len(found)}"
            for kind, found in (("ratios", self.ratios), ("absolute speeds", self.absolute))
            if found
        ]
        return (
            "The same code on torchgpipe's published numbers, which it was not made for, in the middle of "
            f"the same unknowns, errs by: {'; '.join(parts)}. See the experiment predictions."
        )


def errors(record: Record, paper: Sequence[PaperCell] | None = None) -> Errors | None:
    """Of what a record predicted beside its own numbers; None where it has nothing of the kind."""
    return errors_of(record.details.get("elsewhere", ()), paper)


def errors_of(found: Iterable[Mapping[str, Any]], paper: Sequence[PaperCell] | None = None) -> Errors | None:
    """Of predictions {"cell": [table, row, column], "value": middle} against the published numbers."""
    published = {
        cell.key: cell for cell in (load_paper() if paper is None else paper) if cell.source == SOURCE
    }
    ratios: list[float] = []
    absolute: list[float] = []
    for each in found:
        table, row, column = each["cell"]
        cell = published.get((table, row, column))
        if cell is not None:
            kind = ratios if cell.unit == "ratio" else absolute
            kind.append(abs(each["value"] / cell.value - 1))
    return Errors(tuple(ratios), tuple(absolute)) if ratios or absolute else None

"""Joins our cells with the paper's: one row per cell, with verdict, reason and footnotes.

A cell that nobody produced is a row too ("not run"), so leaving numbers out makes no table look better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.judging.paper import PaperCell, load_paper
from gpipe_bench.harness.judging.units import convert
from gpipe_bench.harness.judging.verdict import NO_RECORD, Verdict, judge
from gpipe_bench.harness.records.record import Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One cell: the paper's number, ours, and what to make of the two.

    All numbers are in `unit`, the paper's. `paper` is the printed value, `corrected` the one judged
    instead where an erratum gives it. `low` and `high` are our 95 % interval, `band_low` and `band_high`
    where our value may lie to be reproduced, `ratio` is ours over the value judged. `peer` is the same
    number as published for torchgpipe.
    """

    table: str
    row: str
    column: str
    paper: float | None
    printed: str
    corrected: float | None
    corrected_printed: str
    ours: float | int | None
    unit: str
    provenance: str
    low: float | None
    high: float | None
    band_low: float | None
    band_high: float | None
    ratio: float | None
    peer: float | None
    peer_printed: str
    verdict: Verdict
    reason: str
    footnotes: tuple[str, ...]
    hardware: str
    location: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Table, row and column."""
        return (self.table, self.row, self.column)

    @property
    def paper_text(self) -> str:
        """As printed, with the corrected value where an erratum gives one; empty where nothing is printed."""
        return self.printed if self.corrected is None else f"{self.printed} (means {self.corrected_printed})"


def compare(
    ours: Sequence[Entry], paper: Sequence[PaperCell] | None = None, tolerance: float = 1.0
) -> list[Comparison]:
    """The rows of every table that `ours` touches, in the paper's order, then our other cells.

    `tolerance` multiplies the width of every band (see `gpipe_bench.harness.judging.verdict.band`).

    Raises ValueError where a cell is given twice or its unit can't be converted to the paper's.
    """
    cells = load_paper() if paper is None else list(paper)
    mine: dict[tuple[str, str, str], Entry] = {}
    for entry in ours:
        if entry.key in mine:
            raise ValueError(f"cell {' / '.join(entry.key)} is given twice")
        mine[entry.key] = entry
    tables = {entry.table for entry in ours}
    published = {c.key: c for c in cells if c.source == "paper" and c.table in tables}
    peers = {c.key: c for c in cells if c.source == "torchgpipe" and c.table in tables}
    keys = dict.fromkeys([key for key, cell in published.items() if key in mine or cell.counted] + list(mine))
    order = {table: place for place, table in enumerate(dict.fromkeys(key[0] for key in keys))}
    return [
        compare_entry(
            mine.get(key) or Entry(table=key[0], row=key[1], column=key[2], reason=published[key].unanswered),
            published.get(key),
            peers.get(key),
            tolerance,
        )
        for key in sorted(keys, key=lambda key: order[key[0]])
    ]


def compare_entry(
    ours: Entry, cell: PaperCell | None, peer: PaperCell | None = None, tolerance: float = 1.0
) -> Comparison:
    """One entry beside the paper's number and torchgpipe's, where they print one."""
    judgement = judge(cell, ours, tolerance)
    quantity = ours.quantity or Quantity(name=ours.row, value=None, unit="", provenance="measured")
    unit = cell.unit if cell is not None else quantity.unit

    def here(value: float | int | None) -> float | int | None:
        return None if value is None else convert(value, quantity.unit, unit)

    value = here(quantity.value)
    return Comparison(
        table=ours.table,
        row=ours.row,
        column=ours.column,
        paper=None if cell is None else cell.value,
        printed="" if cell is None else cell.printed,
        corrected=None if cell is None else cell.corrected_value,
        corrected_printed="" if cell is None else cell.corrected_printed,
        ours=value,
        unit=unit,
        provenance=quantity.provenance if value is not None else "",
        low=here(quantity.low),
        high=here(quantity.high),
        band_low=_finite(judgement.band_low),
        band_high=_finite(judgement.band_high),
        ratio=value / cell.target if cell is not None and value is not None and cell.target else None,
        peer=None if peer is None or not unit else convert(peer.value, peer.unit, unit),
        peer_printed="" if peer is None else peer.printed,
        verdict=judgement.verdict,
        reason=judgement.reason,
        footnotes=_footnotes(cell, ours, judgement.verdict, judgement.reason),
        hardware="" if cell is None else cell.hardware,
        location="" if cell is None else cell.location,
    )


def _finite(edge: float | None) -> float | None:
    return edge if edge is not None and math.isfinite(edge) else None


def _footnotes(cell: PaperCell | None, ours: Entry, verdict: Verdict, reason: str) -> tuple[str, ...]:
    notes = [] if cell is None else [cell.erratum, cell.note]
    if verdict != "reproduced":
        # The explanation is shared by many cells; the sizes of the differences stand in the table. "Not run"
        # says it all.
        explained = verdict in ("deviates", "exceeds") and ours.note
        notes.append("" if reason == NO_RECORD else ours.note if explained else reason)
    else:
        if ours.gap:
            notes.append(f"The band includes a declared gap of {100 * ours.gap:g} %: {ours.gap_reason}")
        notes.append(ours.note)
    return tuple(dict.fromkeys(note for note in notes if note))

"""Joins our cells with the paper's: one row per cell and question, with verdict, reason and footnotes.

A cell that nobody produced is a row too ("not run"), so leaving numbers out makes no table look better. What
is predicted for the paper's accelerators and what was found here are rows of their own: neither fills in for
the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpipe_bench.harness.paper import PaperCell, load_paper
from gpipe_bench.harness.record import Quantity
from gpipe_bench.harness.units import convert
from gpipe_bench.harness.verdict import (
    DIFFERS,
    NO_RECORD,
    QUESTIONS,
    Comparison,
    Entry,
    Verdict,
    judge,
    why,
)


def compare(
    ours: Sequence[Entry],
    paper: Sequence[PaperCell] | None = None,
    tolerance: float = 1.0,
    whole: Collection[str] | None = None,
) -> list[Comparison]:
    """The rows of every table that `ours` touches, by question, in the paper's order, then our other cells.

    Args:
        ours: our entries
        paper: the published numbers; by default those of the file
        tolerance: multiplies the width of every range (see `gpipe_bench.harness.verdict.judge`)
        whole: the tables whose unanswered numbers are rows too; by default all that `ours` touches

    Raises ValueError where a cell is given twice for one question or its unit can't be converted to the
    paper's.
    """
    cells = load_paper() if paper is None else list(paper)
    mine: dict[tuple[str, str, str, str, str], Entry] = {}
    for entry in ours:
        if entry.key in mine:
            raise ValueError(f"cell {' / '.join(entry.key)} is given twice")
        mine[entry.key] = entry
    tables = dict.fromkeys(entry.table for entry in ours)
    published = {(cell.source, *cell.key): cell for cell in cells if cell.table in tables}
    answered = {(entry.source, *entry.place) for entry in ours}
    entries = list(mine.values()) + [
        absent(cell)
        for key, cell in published.items()
        if key not in answered and cell.source == "paper" and cell.counted
        if whole is None or cell.table in whole
    ]
    first = {table: place for place, table in enumerate(tables)}
    place = {key: place for place, key in enumerate(published)}

    def order(entry: Entry) -> tuple[int, int, bool, int]:
        key = (entry.source, *entry.place)
        return first[entry.table], QUESTIONS.index(entry.question), key not in place, place.get(key, 0)

    return [
        compare_entry(
            entry,
            published.get((entry.source, *entry.place)),
            published.get(("torchgpipe", *entry.place)) if entry.source == "paper" else None,
            tolerance,
        )
        for entry in sorted(entries, key=order)
    ]


def absent(cell: PaperCell, reason: str = "") -> Entry:
    """The entry of a published number that nobody answers. `reason` is why, where the file says nothing."""
    return Entry(
        table=cell.table,
        row=cell.row,
        column=cell.column,
        source=cell.source,
        question="here" if cell.form == "words" else "as published",
        reason=cell.unanswered or reason,
    )


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
        source=ours.source,
        question=ours.question,
        kind="ours" if cell is None else cell.kind,
        counted=cell is not None and cell.source == "paper" and cell.counted,
        paper=None if cell is None else cell.value,
        printed="" if cell is None else cell.printed,
        corrected=None if cell is None else cell.corrected_value,
        corrected_printed="" if cell is None else cell.corrected_printed,
        ours=value,
        unit=unit,
        provenance=quantity.provenance if value is not None else "",
        low=here(quantity.low),
        high=here(quantity.high),
        range_low=judgement.low,
        range_high=judgement.high,
        parts=() if ours.spread is None else tuple(part.what for part in ours.spread.parts),
        fails_below=judgement.fails_below,
        fails_above=judgement.fails_above,
        ratio=value / cell.target if cell is not None and value is not None and cell.target else None,
        factor=judgement.factor,
        peer=None if peer is None or not unit else convert(peer.value, peer.unit, unit),
        peer_printed="" if peer is None else peer.printed,
        verdict=judgement.verdict,
        reason=judgement.reason,
        explained_by=ours.explained_by if judgement.verdict in DIFFERS else "",
        tried=ours.tried,
        footnotes=_footnotes(cell, ours, judgement.verdict, judgement.reason),
        hardware="" if cell is None else cell.hardware,
        location="" if cell is None else cell.location,
    )


def _footnotes(cell: PaperCell | None, ours: Entry, verdict: Verdict, reason: str) -> tuple[str, ...]:
    notes = [] if cell is None else [cell.erratum, cell.note]
    notes.append(ours.note)
    if verdict in DIFFERS and ours.quantity is not None and ours.quantity.value is not None:
        # the sizes of the differences stand in the table
        reason = why(ours.explained_by, ours.tried)
        notes.append(reason[0].upper() + reason[1:])
    elif verdict in ("not comparable", "not run", "below") and reason != NO_RECORD:  # "not run" says it all
        notes.append(reason)
    return tuple(dict.fromkeys(note for note in notes if note))

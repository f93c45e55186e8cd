"""Joins our results with the paper's numbers and judges each, one row per number and question.

    PaperNumber x Result -> Comparison

        published       |----|                        what rounds to the printed digits
        reproduced         |---|                      ours meets it, and is narrow
        undecided    |--------------------|           ours meets it and says little
        above                        |---|            ours lies beyond it
        below     |--|

A number without a result is a row too ("not run"). A prediction and a result from this machine answer
different questions and have rows of their own. What meets only some readings of the paper is `undecided`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from .paper import PaperNumber, convert, load_paper, percent, show
from .record import Metric, interval_name
from .reproduction import Unknown, Way, load_reproduction, words
from .verdict import (
    DIFFERS,
    NARROW,
    NO_RECORD,
    QUESTIONS,
    ULP,
    Allowed,
    Comparison,
    Place,
    Question,
    Result,
    Verdict,
)

# Fields of an environment on which numbers depend. Load, free memory and the digest of all sources always
# differ; the experiment's revision says which code counts.
COMPARABLE_FIELDS = (
    "cpu_model", "cores_logical", "affinity", "memory_total_gib", "cgroup_cpus", "gpus", "gpu_numerics",
    "gpu_driver", "torch_threads", "python", "versions", "variables",
)  # fmt: skip


def compare(
    ours: Sequence[Result],
    paper: Sequence[PaperNumber] | None = None,
    whole: Collection[str] | None = None,
) -> list[Comparison]:
    """The rows of every table that `ours` answers, by question, in the paper's order, then our other results.

    Args:
        ours: our results
        paper: the published numbers; default: those of paper.csv
        whole: tables whose unanswered numbers are rows too; default: all that `ours` answers

    Raises ValueError if a number has two results for one question, or units can't be converted.
    """
    for key, count in Counter(entry.key for entry in ours).items():
        if count > 1:
            raise ValueError(f"cell {' / '.join(key)} is given twice")
    tables = list(dict.fromkeys(entry.table for entry in ours))
    cells = [cell for cell in (load_paper() if paper is None else paper) if cell.table in tables]
    published, peers = {(cell.source, *cell.key): cell for cell in cells}, peers_of(cells)
    answered = {(entry.source, *entry.place) for entry in ours if not entry.context}
    entries = [*ours] + [
        absent(cell)
        for place, cell in published.items()
        if place not in answered and cell.source == "paper" and cell.counted
        if whole is None or cell.table in whole
    ]
    order = {place: number for number, place in enumerate(published)}

    def place_of(entry: Result) -> tuple[int, int, int]:
        place = order.get((entry.source, *entry.place), len(order))
        return (tables.index(entry.table), QUESTIONS.index(entry.question), place)

    return [
        judge(
            published.get((entry.source, *entry.place)),
            entry,
            peers.get(entry.place) if entry.source == "paper" else None,
        )
        for entry in sorted(entries, key=place_of)
    ]


def peers_of(cells: Iterable[PaperNumber]) -> dict[tuple[str, str, str], PaperNumber]:
    """Others' published numbers, by their place in the paper's tables."""
    return {cell.key: cell for cell in cells if cell.kind == "external"}


def absent(cell: PaperNumber, reason: str = "") -> Result:
    """The "not run" result of a published number; `reason` says why, unless paper.csv does."""
    question: Question = "here" if cell.form == "words" else "as published"
    return Result(
        table=cell.table, row=cell.row, column=cell.column, source=cell.source, question=question,
        reason=cell.unanswered or reason,
    )  # fmt: skip


def differences(environments: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Fields of COMPARABLE_FIELDS that differ between environments, with their distinct values.

    A missing value is no difference, such as torch's threads where torch was not loaded.
    """
    found: dict[str, list[Any]] = {}
    for name in COMPARABLE_FIELDS:
        for value in (each.get(name) for each in environments):
            if value is not None and value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: values for name, values in found.items() if len(values) > 1}


# One answer


def judge(cell: PaperNumber | None, ours: Result, peer: PaperNumber | None = None) -> Comparison:
    """Compares one result with the paper's number, if it prints one; `peer` is the same number as others
    published it. Raises ValueError for units of different kinds.
    """
    metric = ours.metric or Metric(name=ours.row, value=None, unit="", provenance="measured")
    unit = metric.unit if cell is None else cell.unit
    value, low, high = (
        None if number is None else convert(number, metric.unit, unit)
        for number in (metric.value, metric.low, metric.high)
    )
    held = _held(cell, ours)
    notes = [*([] if cell is None else [cell.erratum, cell.note]), ours.note]
    unread = held["verdict"] in ("not comparable", "not run") or value is None
    if unread and held["reason"] != NO_RECORD:
        notes.append(held["reason"])  # "not run" needs no reason
    known: dict[str, Any] = {field.name: getattr(ours, field.name) for field in fields(Place)}
    if cell is not None:
        for name in ("kind", "printed", "corrected_printed", "hardware", "location"):
            known[name] = getattr(cell, name)
        known |= {"paper": cell.value, "corrected": cell.corrected_value}
        known["counted"] = cell.source == "paper" and cell.counted and not ours.context
    return Comparison(
        ours=value,
        unit=unit,
        provenance=metric.provenance if value is not None else "",
        low=low,
        high=high,
        parts=() if ours.spread is None else ours.spread.parts,
        ratio=value / cell.target if cell is not None and value is not None and cell.target else None,
        peer=None if peer is None or not unit else convert(peer.value, peer.unit, unit),
        peer_printed="" if peer is None else peer.printed,
        footnotes=tuple(dict.fromkeys(note for note in notes if note)),
        entry=ours,
        **known,
        **held,
    )


def _is_narrow(low: float, high: float) -> bool:
    """Whether a range is informative: at most a fifth to either side of its middle."""
    return (high - low) / 2 <= NARROW * abs(low + high) / 2 * (1 + ULP)


def _held(cell: PaperNumber | None, ours: Result) -> dict[str, Any]:
    """The verdict, its reason, and fields computed with them; unknown ones are left out."""
    metric, found = ours.metric, ours.range
    if metric is None or metric.value is None or found is None:
        if ours.status == "out_of_memory":
            reason = f"ran out of memory here: {ours.reason or 'no reason was recorded'}"
            return {"verdict": "below", "reason": reason}
        if ours.not_comparable:
            return {"verdict": "not comparable", "reason": ours.not_comparable}
        reason = ours.reason or ("" if metric is None else metric.note) or NO_RECORD
        told = ours.reason and ours.status != "done"
        return {"verdict": "not run", "reason": f"{ours.status}: {reason}" if told else reason}
    if cell is None:
        return {
            "verdict": "not comparable",
            "reason": ours.not_comparable or "the paper prints no such number",
        }
    value, low, high = (convert(number, metric.unit, cell.unit) for number in (metric.value, *found))
    held: dict[str, Any] = {"range_low": low, "range_high": high}
    if ours.context:
        return {**held, "verdict": "not judged", "reason": ours.context}
    if ours.not_comparable:
        return {**held, "verdict": "not comparable", "reason": ours.not_comparable}
    allowed = admitted(cell)
    most = load_reproduction().error.no_test_above
    if ours.error > most and cell.kind != "identity":
        reason = (
            f"our error of {percent(ours.error)} is above {100 * most:.0f} %, which is too large for a test"
        )
        return {**held, "verdict": "undecided", "reason": reason}
    verdict = _verdict(cell.kind, allowed, low, high, is_narrow=ours.error > 0 or _is_narrow(low, high))
    factor = None
    if verdict in DIFFERS:
        near, edge = (low, allowed.possible_high) if verdict == "above" else (high, allowed.possible_low)
        factor = near / edge if edge > 0 and near > 0 else None
    below, above = low - (allowed.possible_high - cell.target), high + (cell.target - allowed.possible_low)
    return {
        **held,
        "verdict": verdict,
        "reason": _reason(verdict, cell, ours, allowed, (value, low, high), factor),
        "fails_below": below if math.isfinite(below) else None,
        "fails_above": above if math.isfinite(above) else None,
        "factor": factor,
    }


def _verdict(kind: str, allowed: Allowed, low: float, high: float, *, is_narrow: bool) -> Verdict:
    """The verdict of a range. A number with a declared error counts as narrow."""
    edges = (low, high, allowed.possible_low, allowed.possible_high)
    slack = ULP * max(abs(edge) for edge in edges if math.isfinite(edge))
    if low > allowed.possible_high + slack:
        return "above"
    if high < allowed.possible_low - slack:
        return "below"
    agrees: Verdict = "identity" if kind == "identity" else "reproduced"
    if allowed.open:  # a bound must hold for the whole range
        inside = allowed.low - slack <= low and high <= allowed.high + slack
        return agrees if inside else "undecided"
    if kind == "identity":
        return agrees
    meets = low <= allowed.high + slack and high >= allowed.low - slack
    return "reproduced" if meets and is_narrow else "undecided"


def _reason(
    verdict: Verdict,
    cell: PaperNumber,
    ours: Result,
    allowed: Allowed,
    found: tuple[float, float, float],
    factor: float | None,
) -> str:
    value, low, high = found
    made_of = ""
    if ours.spread is None and ours.metric is not None:
        made_of = f" (our {interval_name(len(ours.metric.samples))})"
    if ours.spread is not None and ours.spread.parts:
        made_of = f" ({', '.join(ours.spread.parts)})"
    mine = show(value, cell.unit) if low == high else f"{_interval(low, high, cell.unit)}{made_of}"
    theirs = f"{_interval(allowed.low, allowed.high, cell.unit)} ({allowed.words})"
    match verdict:
        case "reproduced" | "identity" if allowed.open:
            reason = f"{mine} keeps to {theirs}"
        case "reproduced":
            reason = f"{mine} meets {theirs}"
        case "identity":
            reason = f"{mine} follows from the arithmetic: {theirs}"
        case "undecided" if allowed.open:
            reason = f"{mine} lies on both sides of what {theirs} may mean"
        case "undecided" if _is_narrow(low, high):
            reason = f"{mine} agrees with some readings of {theirs} only"
        case "undecided":
            reason = f"{mine} meets {theirs}, and would meet much else"
        case _:
            apart = ""
            if factor:  # a positive factor
                times = max(factor, 1 / factor)
                apart = f", at least a factor of {times:.{3 if times >= 1.005 else 5}g} away"
            reason = f"{mine} lies {verdict} {theirs}{apart}"
    if cell.corrected_printed:
        return f"judged by the corrected {cell.corrected_printed}, not the printed {cell.printed}; {reason}"
    return reason


def _interval(low: float, high: float, unit: str) -> str:
    """`3.45 to 3.55`, `at most 5 %`: an interval in words, with one digit more than numbers have."""
    if math.isinf(low):
        return f"at most {show(high, unit, 5)}"
    if math.isinf(high):
        return f"at least {show(low, unit, 5)}"
    return show(low, unit, 5) if low == high else f"{show(low, unit, 5)} to {show(high, unit, 5)}"


# What agrees with a published number or sentence


def printed(cell: PaperNumber) -> Allowed:
    """Numbers that round to the printed one, or that keep to a printed limit."""
    low, high = cell.target - cell.target_rounding, cell.target + cell.target_rounding
    if cell.bound == "at most":
        return Allowed(-math.inf, high, -math.inf, high, "the paper says at most so much")
    if cell.bound == "at least":
        return Allowed(low, math.inf, low, math.inf, "the paper says at least so much")
    words = "half a unit of the printed digit"
    if cell.exact and not cell.target_rounding:
        words = "an exact number"
    elif cell.form in ("read off", "derived"):
        words = "the error of what is " + cell.form
    return Allowed(low, high, low, high, words)


@cache
def admitted(cell: PaperNumber) -> Allowed:
    """Numbers that agree with a published one, by its digits or by the words of its sentence."""
    word = words().get(cell.row) if cell.source == "paper" else None
    return printed(cell) if word is None else worded(cell, *word)


def worded(cell: PaperNumber, way: Way, limit: Unknown) -> Allowed:
    """Numbers that agree with a sentence that gives no limit: as small or as large as its word may mean, a
    ratio near 1, or near the printed number.
    """
    assert limit.range is not None, "how far a word may reach is a range"
    low, high = limit.range
    what = "about, as near as" if way == "about" else way
    said = f"{what} {low:g} to {high:g}: {limit.setting} of the unknowns"
    if way in ("at most", "at least"):
        low, high = (convert(end, limit.unit, cell.unit) for end in (low, high))
    match way:
        case "at most":
            return Allowed(-math.inf, low, -math.inf, high, said)
        case "at least":
            return Allowed(high, math.inf, low, math.inf, said)
        case "within a factor":
            return Allowed(1 / low, low, 1 / high, high, said)
        case "about":
            middle = cell.target
            near, far = (max(cell.target_rounding, share * abs(middle)) for share in (low, high))
            return Allowed(middle - near, middle + near, middle - far, middle + far, said)

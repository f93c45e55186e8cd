"""All that `check-engine` finds out about an engine: every check in one process and over two.

A setting in which an engine raises, hangs or ends its processes costs that setting alone: the next ones run
in new processes. Only where the base fails so, nothing else can be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpipe_bench.experiments.engines.isolated import IsolatedError, run_isolated
from gpipe_bench.experiments.engines.trial import BASE, NUM_STAGES, SETTINGS, Finding, trial

PLACES = {"one process": 1, "two processes": NUM_STAGES}
OK, FAILED, BROKEN, CANNOT, UNTRIED = "ok", "failed", "broken", "can't", "not tried"
"""Verdicts. `broken`: it raised, hung or ended its process; `can't`: it says so itself, by a ValueError."""


@dataclass(frozen=True)
class Row:
    """What one check found in one place."""

    place: str
    check: str
    verdict: str
    text: str


@dataclass
class _Heard:
    """What the processes told, by setting and rank."""

    found: dict[int, dict[int, list[Finding]]] = field(default_factory=dict)
    at: int = 0
    unusable: str = ""

    def hear(self, rank: int, news: Any) -> None:
        match news:
            case ("begin", index):
                self.at = max(self.at, index)
            case ("found", index, findings):
                self.found.setdefault(index, {})[rank] = findings
            case ("unusable", reason):
                self.unusable = reason


def examination(name: str, timeout_s: float) -> list[Row]:
    """Every check in every place. ValueError where the name leads to no engine."""
    rows: list[Row] = []
    for place, num_processes in PLACES.items():
        rows += _in_place(name, place, num_processes, timeout_s)
    return rows


def _in_place(name: str, place: str, num_processes: int, timeout_s: float) -> list[Row]:
    rows: list[Row] = []
    first = 0
    while first < len(SETTINGS):
        heard = _Heard(at=first)
        fault = None
        try:
            run_isolated(
                trial, num_processes, name, num_processes == 1, first,
                timeout_s=timeout_s, on_news=heard.hear,
            )  # fmt: skip
        except IsolatedError as error:
            fault = error.fault
        if heard.unusable:
            raise ValueError(heard.unusable)
        for index in range(first, len(SETTINGS)):
            by_rank = heard.found.get(index, {})
            if len(by_rank) == num_processes:
                rows += [Row(place, *finding) for finding in _joined([by_rank[r] for r in sorted(by_rank)])]
        if fault is None:
            break
        setting = SETTINGS[heard.at]
        check = "step" if setting == BASE else setting.name
        verdict = CANNOT if fault.refused else BROKEN
        rows.append(Row(place, check, verdict, fault.reason.removeprefix("ValueError: ")))
        if setting == BASE:
            if not fault.refused:
                rows += [Row(place, each.name, UNTRIED, "its step is broken") for each in SETTINGS[1:]]
            break
        first = heard.at + 1
    return rows


def _joined(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Of each check the worst that any process found; what it says names the process if not all say so."""
    joined = []
    for findings in zip(*by_rank, strict=False):  # one without `step` says no more
        bad = [rank for rank, finding in enumerate(findings) if finding.verdict != OK]
        if bad and len(findings) > 1:
            said = findings[bad[0]]
            joined.append(said._replace(text=f"process {bad[0]}: {said.text}"))
        else:
            joined.append(findings[-1])  # the last stage knows the loss
    return joined


def faults(rows: Sequence[Row]) -> list[Row]:
    """What is wrong, the engine's own errors first. An engine that can do nothing at all is wrong, too."""
    bad = [row for row in rows if row.verdict == BROKEN] + [row for row in rows if row.verdict == FAILED]
    if not bad and not any(row.verdict == OK for row in rows):
        return [row for row in rows if row.verdict == CANNOT][:1]
    return bad

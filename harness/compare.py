"""Joins our answers with the paper's numbers: one row per number and question.

A number that nobody answers is a row too ("not run"), so leaving numbers out makes no table look better. What
is predicted for the paper's accelerators and what was found here are rows of their own: neither fills in for
the other. Numbers of different surroundings may not be comparable at all; which differ is said here too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from gpipe_bench.harness.paper import PaperNumber, load_paper
from gpipe_bench.harness.verdict import QUESTIONS, Answer, Comparison, judge

# Differences in these make two numbers hard to compare; load and free memory differ between any two runs. So
# does the digest of all sources: what of them a result depends on is said by the experiment's revision.
COMPARABLE_FIELDS = (
    "cpu_model", "cores_logical", "affinity", "memory_total_gib", "cgroup_cpus", "gpus", "gpu_numerics",
    "gpu_driver", "torch_threads", "python", "versions", "variables",
)  # fmt: skip


def compare(
    ours: Sequence[Answer],
    paper: Sequence[PaperNumber] | None = None,
    tolerance: float = 1.0,
    whole: Collection[str] | None = None,
) -> list[Comparison]:
    """The rows of every table that `ours` touches, by question, in the paper's order, then our other answers.

    Args:
        ours: our answers
        paper: the published numbers; by default those of the file
        tolerance: multiplies the width of every range (see `gpipe_bench.harness.verdict.judge`)
        whole: the tables whose unanswered numbers are rows too; by default all that `ours` touches

    Raises ValueError where a number is answered twice for one question or units can't be converted.
    """
    seen: set[tuple[str, str, str, str, str]] = set()
    for entry in ours:
        if entry.key in seen:
            raise ValueError(f"cell {' / '.join(entry.key)} is given twice")
        seen.add(entry.key)
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
    entries.sort(
        key=lambda entry: (
            tables.index(entry.table),
            QUESTIONS.index(entry.question),
            order.get((entry.source, *entry.place), len(order)),
        )
    )
    return [
        judge(
            published.get((entry.source, *entry.place)),
            entry,
            tolerance,
            peers.get(entry.place) if entry.source == "paper" else None,
        )
        for entry in entries
    ]


def peers_of(cells: Iterable[PaperNumber]) -> dict[tuple[str, str, str], PaperNumber]:
    """Numbers that others published for places of the paper's tables."""
    return {cell.key: cell for cell in cells if cell.kind == "external"}


def absent(cell: PaperNumber, reason: str = "") -> Answer:
    """The answer to a published number that nobody gives. `reason` is why, where the file says nothing."""
    return Answer(
        table=cell.table,
        row=cell.row,
        column=cell.column,
        source=cell.source,
        question="here" if cell.form == "words" else "as published",
        reason=cell.unanswered or reason,
    )


def differences(environments: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Fields that numbers depend on and that differ between environments, with their distinct values.

    What one of them does not know, such as torch's threads where torch was not loaded, is no difference.
    """
    found: dict[str, list[Any]] = {}
    for name in COMPARABLE_FIELDS:
        for value in (each.get(name) for each in environments):
            if value is not None and value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: values for name, values in found.items() if len(values) > 1}

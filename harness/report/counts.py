"""How many numbers have each verdict, by what the verdict rests on.

A total that mixes what was measured with what follows by arithmetic says neither, so identities are counted
apart from what was judged, and every count can be asked for by its evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from gpipe_bench.harness.verdict import JUDGED, QUESTIONS, Comparison, Question, Verdict

Evidence = Literal["measured", "replayed", "modelled", "identity", "no number"]
"""What a verdict rests on: how our number was made, or that it follows by arithmetic from others."""
EVIDENCE: tuple[Evidence, ...] = ("measured", "replayed", "modelled", "identity", "no number")

ASKED: Mapping[Question, str] = {
    "as published": "Does our prediction for the paper's accelerators, at the paper's size, give the printed "
    "number?",
    "here": "Does what the paper says hold on the machines of these records?",
}
"""The two questions in words."""

_APART: tuple[Verdict, ...] = ("not comparable", "not run")


def evidence(cell: Comparison) -> Evidence:
    """What the verdict on the cell rests on; "no number" also where memory ran out."""
    if cell.kind == "identity" and cell.verdict in JUDGED:
        return "identity"
    return cast("Evidence", cell.provenance) if cell.provenance else "no number"


@dataclass(frozen=True, slots=True)
class Counts:
    """How many numbers there are of each evidence and verdict."""

    by: Mapping[tuple[Evidence, Verdict], int]

    @classmethod
    def of(cls, found: Iterable[tuple[Evidence, Verdict]]) -> Counts:
        """Of pairs."""
        return cls(Counter(found))

    @classmethod
    def of_counted(cls, cells: Iterable[Comparison]) -> Counts:
        """Of those cells that count among the paper's numbers."""
        return cls.of((evidence(cell), cell.verdict) for cell in cells if cell.counted)

    @property
    def total(self) -> int:
        """All of them, also those that nobody ran."""
        return sum(self.by.values())

    @property
    def identities(self) -> int:
        """Those that follow by arithmetic, whether it comes out or not."""
        return sum(count for (rests_on, _), count in self.by.items() if rests_on == "identity")

    @property
    def judged(self) -> int:
        """Those held against the paper that could have come out otherwise: no identities."""
        return sum(self.judged_as(verdict) for verdict in JUDGED)

    def judged_as(self, verdict: Verdict) -> int:
        """Those with that verdict that are no identities."""
        return self[verdict] - self.at("identity", verdict)

    def at(self, rests_on: Evidence, verdict: Verdict) -> int:
        """Those of one evidence and one verdict."""
        return self.by.get((rests_on, verdict), 0)

    def __getitem__(self, verdict: Verdict) -> int:
        """Those with that verdict, whatever it rests on."""
        return sum(self.at(rests_on, verdict) for rests_on in EVIDENCE)

    @property
    def present(self) -> tuple[Evidence, ...]:
        """What the verdicts on judged numbers and identities rest on, in order."""
        return tuple(e for e in EVIDENCE if any(self.at(e, verdict) for verdict in JUDGED))

    def __str__(self) -> str:
        """`3 reproduced, 8 undecided of 11 judged; 14 identities; 2 not comparable; 30 not run`."""
        found = [f"{n} {verdict}" for verdict in JUDGED if (n := self.judged_as(verdict))]
        held, identities = self["identity"], self.identities
        parts = [f"{', '.join(found)} of {self.judged} judged"] if found else []
        if identities:
            name = "identity" if identities == 1 else "identities"
            parts.append(f"{held} {name}" if held == identities else f"{held} of {identities} {name} hold")
        apart = [f"{self[verdict]} {verdict}" for verdict in _APART if self[verdict]]
        return "; ".join([*(parts or ["nothing judged"]), *apart]) if self.total else "nothing counted"


def counts_of(cells: Iterable[Comparison]) -> dict[Question, Counts]:
    """The counts of each question that any of the cells answers or leaves open, in order."""
    found = list(cells)
    each = {q: Counts.of_counted(cell for cell in found if cell.question == q) for q in QUESTIONS}
    return {question: counts for question, counts in each.items() if counts.total}


def counts_lines(cells: Iterable[Comparison]) -> list[str]:
    """A line for each question: `as published: 3 reproduced of 3 judged; 14 identities`."""
    return [f"{question}: {counts}" for question, counts in counts_of(cells).items()] or ["nothing counted"]

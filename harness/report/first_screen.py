"""The first screen: the question, an answer in plain words, the paper's claims, and the kinds of evidence.

The words are data (`results/answer.toml`) with places for numbers, and every number comes from a comparison
or from a fact of the records. A sentence names the verdicts under which it is true; where these have changed
it is left out, so nothing untrue is printed, and `stale` says which need new words. README, the page and the
terminal show one object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpipe_bench.harness.places import PUBLISHED
from gpipe_bench.harness.report.grid import Grid, fill
from gpipe_bench.harness.report.table import ASKED, Counts, counts_of, range_text
from gpipe_bench.harness.units import show
from gpipe_bench.harness.verdict import Comparison, Question, Verdict

PATH = PUBLISHED / "answer.toml"
WORDS: Mapping[Verdict, str] = {
    "reproduced": "yes", "identity": "yes", "undecided": "open", "above": "no, more", "below": "no, less",
    "not judged": "not judged", "not comparable": "not comparable", "not run": "not tried",
}  # fmt: skip
"""A claim's answer, by the verdicts on its numbers; where they differ it holds in part."""
SUMS = "sums that we checked"
DIGITS = 3


class _Number(msgspec.Struct, forbid_unknown_fields=True):
    place: tuple[str, str, str]
    question: Question = "here"
    source: str = "paper"


class _Sentence(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    true_while: dict[str, tuple[Verdict, ...]] = msgspec.field(default_factory=dict, name="while")


class _Claim(msgspec.Struct, forbid_unknown_fields=True):
    says: str
    source: str
    answers: tuple[str, ...]
    ours: str
    how: str


class _Words(msgspec.Struct, forbid_unknown_fields=True):
    question: str
    numbers: dict[str, _Number]
    paragraph: tuple[_Sentence, ...]
    claim: tuple[_Claim, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstScreen:
    """What is shown first. `claims` are (claim, where, answer, ours, how); `stale` needs new words."""

    question: str
    sentences: tuple[str, ...]
    claims: tuple[tuple[str, str, str, str, str], ...]
    evidence: tuple[tuple[str, ...], ...]
    stale: tuple[str, ...] = ()

    CLAIMS = ("the paper says", "where", "answer", "ours", "how")
    COUNTS = ("", "agree", "open", "differ", "not comparable", "not run")

    @property
    def claims_grid(self) -> Grid:
        """The table of claims."""
        return Grid(columns=self.CLAIMS, lines=self.claims)

    @property
    def evidence_grid(self) -> Grid:
        """How many numbers of the paper each kind of evidence says what of."""
        return Grid(columns=self.COUNTS, lines=self.evidence, right=frozenset(range(1, len(self.COUNTS))))

    def markdown(self) -> str:
        """For README and the markdown page."""
        parts = [f"**{self.question}** {' '.join(self.sentences)}", self.claims_grid.markdown()]
        return "\n\n".join([*parts, self.evidence_grid.markdown()])

    def text(self) -> str:
        """For a terminal."""
        lines = []
        for says, where, answer, ours, how in self.claims:
            lines.append(fill(f"{answer.upper()}: {says} ({where})", "  ", "  "))
            lines.append(fill(f"{ours}; {how}", "      ", "      "))
        plain = fill(" ".join((self.question, *self.sentences)).replace("*", ""))
        return "\n\n".join([plain, "\n".join(lines), self.evidence_grid.text()])


def first_screen(cells: Sequence[Comparison], facts: Mapping[str, str], path: Path = PATH) -> FirstScreen:
    """The words with the numbers of the comparisons and facts.

    What lacks a number is left out, and `stale` names it. Raises ValueError where the file can't be read.
    """
    try:
        words = msgspec.toml.decode(path.read_bytes(), type=_Words)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    at = {cell.key: cell for cell in cells}
    found = {
        name: at[key]
        for name, number in words.numbers.items()
        if (key := (*number.place, number.source, number.question)) in at
    }
    counts, given = counts_of(cells), dict(facts)
    for name, question in (("computed", "as published"), ("here", "here")):
        each = counts.get(question, Counts())  # type: ignore[call-overload]
        if not each.judged:
            continue
        differ = each.judged_as("above") + each.judged_as("below")
        agree, still_open = each.judged_as("reproduced"), each.judged_as("undecided")
        given |= {
            f"{name}.{word}": f"{n}"
            for word, n in (
                ("judged", each.judged),
                ("agree", agree),
                ("open", still_open),
                ("differ", differ),
            )
        }
    for name, cell in found.items():
        given |= _said(name, cell)
    stale: list[str] = []

    def filled(text: str) -> str:
        missing = [name for name in re.findall(r"\{([\w.]+)\}", text) if name not in given]
        if missing:
            stale.append(f"{', '.join(missing)} of {text!r}")
            return ""
        return re.sub(r"\{([\w.]+)\}", lambda match: given[match[1]], text)

    sentences = []
    for sentence in words.paragraph:
        other = {
            name: found[name].verdict if name in found else "no number"
            for name, verdicts in sentence.true_while.items()
            if name not in found or found[name].verdict not in verdicts
        }
        if other:
            stale.append(f"{other} of {sentence.text!r}")
        elif text := filled(sentence.text):
            sentences.append(text)
    claims = []
    for claim in words.claim:
        verdicts = {found[name].verdict for name in claim.answers if name in found}
        answers = list(dict.fromkeys(WORDS[verdict] for verdict in verdicts))
        answer = answers[0] if len(answers) == 1 else "in part" if answers else "not tried"
        says, ours, how = (filled(text) or "-" for text in (claim.says, claim.ours, claim.how))
        claims.append((says, claim.source, answer, ours, how))
    return FirstScreen(
        question=words.question, sentences=tuple(sentences), claims=tuple(claims),
        evidence=_evidence(cells), stale=tuple(stale),
    )  # fmt: skip


def _said(name: str, cell: Comparison) -> dict[str, str]:
    """The ways in which a text may name a number."""
    ours = "-" if cell.ours is None else show(cell.ours, cell.unit, DIGITS)
    said = {name: ours, f"{name}.paper": cell.printed, f"{name}.verdict": cell.verdict}
    if range_text(cell):
        said[f"{name}.range"] = range_text(cell, DIGITS)
    if cell.ours is not None and cell.unit == "ratio":
        said[f"{name}.percent"] = f"{100 * cell.ours:.0f} %"
        said[f"{name}.lost"] = f"{100 * (1 - cell.ours):.0f} %"
        if cell.range_low is not None and cell.range_high is not None:
            said[f"{name}.range_percent"] = f"{100 * cell.range_low:.0f} to {100 * cell.range_high:.0f} %"
    return said


def _evidence(cells: Sequence[Comparison]) -> tuple[tuple[str, ...], ...]:
    """A line for each question, and one for what follows by arithmetic."""
    lines = []
    for question, counts in counts_of(cells).items():
        differ = counts.judged_as("above") + counts.judged_as("below")
        numbers = (counts.judged_as("reproduced"), counts.judged_as("undecided"), differ)
        others = (counts.with_verdict("not comparable"), counts.with_verdict("not run"))
        lines.append((ASKED[question], *(f"{n}" for n in (*numbers, *others))))
    every = Counts.of(cells)
    held, sums = every.with_verdict("identity"), every.identities
    if sums:
        off = [
            abs(cell.ratio - 1)
            for cell in cells
            if cell.counted and cell.kind == "identity" and cell.verdict in ("above", "below") and cell.ratio
        ]
        by = f" (by at most {show(100 * max(off), '%', 2)})" if off else ""
        lines.append((SUMS, f"{held}", "-", f"{sums - held}{by}", "-", "-"))
    return tuple(lines)

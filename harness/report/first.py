"""The first screen: the question, an answer in plain words, and the paper's claims with ours beside them.

Its words are data (`results/answer.toml`) with places for numbers, and every number comes from a comparison
or from a fact of the records: a number that the records lack is a dash. README, the page and the terminal
show one object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.report.grid import Grid, fill
from gpipe_bench.harness.report.table import answer, range_text
from gpipe_bench.harness.units import show
from gpipe_bench.harness.verdict import Comparison, Question

PATH = PUBLISHED / "answer.toml"
DIGITS = 3
_PLACE = re.compile(r"\{([\w. ]+)\}")


class _Number(msgspec.Struct, forbid_unknown_fields=True):
    place: tuple[str, str, str]
    question: Question = "here"

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return (*self.place, "paper", self.question)


class _Claim(msgspec.Struct, forbid_unknown_fields=True):
    says: str
    paper: str
    answers: tuple[str, ...]
    ours: str
    how: str


class _Words(msgspec.Struct, forbid_unknown_fields=True):
    question: str
    numbers: dict[str, _Number]
    answer: tuple[str, ...]
    claim: tuple[_Claim, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstScreen:
    """Question, paragraphs and claims shown first. `claims` are rows of (claim, paper, ours, how, answer)."""

    question: str
    paragraphs: tuple[str, ...]
    claims: tuple[tuple[str, ...], ...]

    CLAIMS = ("claim", "paper", "ours", "how", "answer")

    def markdown(self) -> str:
        """Text in markdown, for README and the report's markdown page."""
        claims = Grid(columns=self.CLAIMS, lines=self.claims).markdown()
        return "\n\n".join([*self.paragraphs, claims])

    def text(self) -> str:
        """Text for a terminal."""
        lines = []
        for says, paper, ours, how, said in self.claims:
            lines.append(fill(f"{said.upper()}: {says} (paper: {paper})", "  ", "  "))
            lines.append(fill(f"{ours}; {how}", "      ", "      "))
        plain = [fill(text.replace("*", "")) for text in self.paragraphs]
        return "\n\n".join([self.question, *plain, "\n".join(lines)])


def first_screen(cells: Sequence[Comparison], facts: Mapping[str, str], path: Path = PATH) -> FirstScreen:
    """The words with the numbers of the comparisons and facts. Raises ValueError where the file can't be
    read.
    """
    try:
        words = msgspec.toml.decode(path.read_bytes(), type=_Words)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    at = {cell.key: cell for cell in reversed(cells)}
    found = {name: at[each.key] for name, each in words.numbers.items() if each.key in at}
    given = dict(facts)
    for name, cell in found.items():
        given[name] = "-" if cell.ours is None else show(cell.ours, cell.unit, DIGITS)
        given[f"{name}.paper"] = cell.printed
        given[f"{name}.range"] = range_text(cell, DIGITS) or "-"

    def filled(text: str) -> str:
        return _PLACE.sub(lambda match: given.get(match[1], "-"), text)

    claims = []
    for claim in words.claim:
        said = [answer(found[name]) if name in found else "not run" for name in claim.answers]
        word = ", ".join(dict.fromkeys(said) if len(set(said)) == 1 else said)
        texts = (claim.says, claim.paper, claim.ours, claim.how)
        claims.append((*map(filled, texts), word))
    return FirstScreen(
        question=words.question, paragraphs=tuple(map(filled, words.answer)), claims=tuple(claims)
    )

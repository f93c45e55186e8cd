"""Reasons for a difference, tested: settings of the same model against the cells that they should explain.

A setting accounts for a number if under it alone the verdict would be `reproduced`: verdicts and reasons have
one criterion (`gpipe_bench.harness.verdict.accounts`). A reason that leaves other settings open accounts for
it if a tenth of them do, each as wide as the prediction's error: what a verdict asks of a range.

A footnote that says why a number differs is only worth something if the setting that it names was run and
found to give the paper's number, and if it is said how many others were tried. A hypothesis is such a
setting with the numbers that it gives; this module holds them against the paper's and ranks them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpipe_bench.harness.paper import PaperNumber, load_paper
from gpipe_bench.harness.record import Scalar
from gpipe_bench.harness.verdict import SLIVER, Allowed, Answer, Spread, accounts, printed

Key = tuple[str, str, str]
"""Table, row and column of paper.csv."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """What the model gives under one choice of settings.

    Args:
        name: the choice in a few words; equal names are one hypothesis
        values: by table, row and column, each in the unit of that number in paper.csv
        settings: by name, as in results/unknowns.toml where it has them
        after_looking: found once the difference had been seen, so not one of those that the ranges cover
        spreads: by the same places, what it gives over all that is allowed of everything else
    """

    name: str
    values: Mapping[Key, float]
    settings: Mapping[str, Scalar]
    after_looking: bool = False
    spreads: Mapping[Key, Spread] = field(default_factory=dict)

    def share(self, cell: PaperNumber, allowed: Allowed | None = None) -> float:
        """The share of its settings that account for a number of the paper, in the unit of that."""
        spread = self.spreads.get(cell.key)
        if spread is None or not spread.values:
            return float(cell.key in self.values and accounts(self.values[cell.key], cell, allowed))
        known = allowed or printed(cell)
        return spread.share_within(known.low, known.high) if cell.comparable else 0.0

    @property
    def tried(self) -> int:
        """How many settings it went through."""
        return max([1, *(len(spread.values) for spread in self.spreads.values())])


@dataclass(frozen=True, slots=True)
class Fit:
    """How near a hypothesis comes to the paper's numbers.

    Args:
        hypothesis: which
        changed: how many settings differ from those of the first hypothesis that was given, the base
        ratios: ours over the paper's, of the numbers it has
        within: the keys that it accounts for
        by_table: root mean square of the logarithms of the ratios, by table
        overall: the same of all
    """

    hypothesis: Hypothesis
    changed: int
    ratios: Mapping[Key, float]
    within: frozenset[Key]
    by_table: Mapping[str, float]
    overall: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """All hypotheses tried, nearest first; those with fewer numbers come last.

    `keys` are the paper's numbers that any of them has, in the paper's order.
    """

    keys: tuple[Key, ...]
    fits: tuple[Fit, ...]

    @property
    def tried(self) -> int:
        return len(self.fits)

    @property
    def explains_all(self) -> tuple[Fit, ...]:
        """Those that account for every number."""
        return tuple(fit for fit in self.fits if len(fit.within) == len(self.keys))

    def explains(self, key: Key) -> tuple[Hypothesis, ...]:
        """The hypotheses that account for one number, nearest over all numbers first."""
        return tuple(fit.hypothesis for fit in self.fits if key in fit.within)

    def best_of(self, table: str) -> Fit:
        """The nearest one over the numbers of a table. Raises ValueError where none has any."""
        having = [fit for fit in self.fits if table in fit.by_table]
        if not having:
            raise ValueError(f"no hypothesis has a number of {table!r}")
        return min(having, key=lambda fit: fit.by_table[table])

    def of_single_settings(self) -> tuple[Fit, ...]:
        """The base, then what changes one setting of it, nearest first."""
        found = [fit for fit in self.fits if fit.changed <= 1]
        return tuple(sorted(found, key=lambda fit: fit.changed))


def with_reasons(
    entries: Sequence[Answer], hypotheses: Sequence[Hypothesis], paper: Sequence[PaperNumber] | None = None
) -> list[Answer]:
    """Our predictions for the paper's numbers, each with the hypotheses that account for the number.

    The ranges cover all hypotheses but those found after looking, so only these are further settings tried.
    """
    cells = _of_the_paper(paper) if hypotheses else {}

    def joined(entry: Answer) -> Answer:
        cell = cells.get(entry.place)
        tried = [each for each in hypotheses if entry.place in each.values or entry.place in each.spreads]
        if cell is None or not tried or (entry.source, entry.question) != ("paper", "as published"):
            return entry
        holding = [each for each in tried if each.share(cell, entry.allowed) >= SLIVER]
        others = sum(each.tried for each in tried if each.after_looking or not entry.tried)
        named = tuple(each.name.rpartition(": ")[2] for each in tried if each.after_looking)
        others += entry.others_tried
        return replace(entry, explained_by=_named(holding), others_tried=others, named=named)

    return [joined(entry) for entry in entries]


def rank(hypotheses: Sequence[Hypothesis], paper: Sequence[PaperNumber] | None = None) -> Ranking:
    """Hold the hypotheses against the paper's numbers, which are those of paper.csv unless given.

    Raises ValueError for two of one name, for a number that the paper lacks or that cannot be compared, and
    for values that have no logarithm.
    """
    cells = _of_the_paper(paper)
    order: dict[str, int] = {}
    for index, hypothesis in enumerate(hypotheses):
        if order.setdefault(hypothesis.name, index) != index:
            raise ValueError(f"two hypotheses are called {hypothesis.name!r}")
    fits = [_fit(hypothesis, hypotheses[0], cells) for hypothesis in hypotheses]
    fits.sort(key=lambda fit: (-len(fit.ratios), fit.overall, order[fit.hypothesis.name]))
    having = {key for fit in fits for key in fit.ratios}
    return Ranking(tuple(key for key in cells if key in having), tuple(fits))


def _fit(hypothesis: Hypothesis, base: Hypothesis, cells: Mapping[Key, PaperNumber]) -> Fit:
    ratios: dict[Key, float] = {}
    within: set[Key] = set()
    logarithms: dict[str, list[float]] = {}
    for key, value in hypothesis.values.items():
        cell = cells.get(key)
        if cell is None:
            raise ValueError(f"{hypothesis.name}: the paper has no number {' / '.join(key)}")
        if not (math.isfinite(value) and value > 0 and cell.target > 0):
            raise ValueError(
                f"{hypothesis.name}: {value} over {cell.target} of {' / '.join(key)} is no ratio"
            )
        ratios[key] = value / cell.target
        logarithms.setdefault(key[0], []).append(math.log(ratios[key]))
        if hypothesis.share(cell) >= SLIVER:
            within.add(key)
    names = {*base.settings, *hypothesis.settings}
    changed = sum(base.settings.get(name) != hypothesis.settings.get(name) for name in names)
    by_table = {table: root_mean_square(each) for table, each in logarithms.items()}
    overall = root_mean_square([each for table in logarithms.values() for each in table])
    return Fit(hypothesis, changed, ratios, frozenset(within), by_table, overall)


def root_mean_square(values: Sequence[float]) -> float:
    """0 for none."""
    return math.sqrt(math.fsum(value * value for value in values) / len(values)) if values else 0.0


def _of_the_paper(paper: Sequence[PaperNumber] | None) -> dict[Key, PaperNumber]:
    return {cell.key: cell for cell in (load_paper() if paper is None else paper) if cell.source == "paper"}


def _named(hypotheses: Sequence[Hypothesis]) -> str:
    """The first by name, and how many more; what was not found after looking stands first."""
    if not hypotheses:
        return ""
    first, *more = sorted(hypotheses, key=lambda each: each.after_looking)
    name = first.name + (" (found after looking)" if first.after_looking else "")
    return f"{name} and {len(more):,} more" if more else name

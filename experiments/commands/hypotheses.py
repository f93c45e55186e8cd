"""`hypotheses NAME`: settings of the same model against the paper's numbers, from records alone.

Hypotheses are ranked by how near each comes over all numbers that it has: the root mean square of the
logarithms of ours over the paper's. Which numbers one accounts for says the criterion of the verdicts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpipe_bench.experiments.commands.output import DONE, tell, warn
from gpipe_bench.experiments.registry import EXPERIMENTS, load, program
from gpipe_bench.experiments.report.readings import folder_of, select_records
from gpipe_bench.harness.hypotheses import Hypothesis, Key
from gpipe_bench.harness.paper import PaperNumber, of_the_paper
from gpipe_bench.harness.report.grid import Grid, fill, numbers
from gpipe_bench.harness.store import Store, lines_of
from gpipe_bench.harness.verdict import SLIVER

BEST = 5
"""Combinations shown unless all are asked for."""


def options(verb: argparse.ArgumentParser) -> None:
    """Of the verb."""
    verb.add_argument("name", metavar="NAME", help="an experiment; `list` has their names")
    verb.add_argument("--all", action="store_true", help="every combination, not the nearest few")


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError where there is nothing to show, with what to do."""
    experiment = load(arguments.name)
    if experiment.hypotheses is None:
        having = [name for name in EXPERIMENTS if load(name).hypotheses is not None]
        raise ValueError(f"{experiment.name} has no hypotheses; those that have: {', '.join(having)}")
    folder, whose = folder_of(experiment.name, arguments.results, is_own=arguments.is_own)
    loaded = Store(folder).load(experiment.name)
    warn(*lines_of(loaded.problems))
    records = select_records(loaded.records, experiment, None)
    found = experiment.hypotheses(records)
    if not found:
        raise ValueError(
            f"no records of {experiment.name} in {folder} have hypotheses; make them with: {program()} run "
            f"{experiment.name}"
        )
    ranking = rank(found)
    if whose and arguments.json:
        warn(whose)
    shown = ranking.fits if arguments.all else _shown(ranking)
    tell(
        arguments,
        map(_as_data, shown),
        lambda: "\n\n".join([*([whose] if whose else []), _text(ranking, every=arguments.all)]),
    )
    return DONE


# How near each comes to the paper's numbers


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

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that these numbers stand in."""
        return tuple(dict.fromkeys(key[0] for key in self.keys))

    def best_of(self, table: str) -> Fit:
        """The nearest one over the numbers of a table that any has."""
        having = [fit for fit in self.fits if table in fit.by_table]
        return min(having, key=lambda fit: fit.by_table[table])

    def of_single_settings(self) -> tuple[Fit, ...]:
        """The base, then what changes one setting of it, nearest first."""
        found = [fit for fit in self.fits if fit.changed <= 1]
        return tuple(sorted(found, key=lambda fit: fit.changed))


def rank(hypotheses: Sequence[Hypothesis], paper: Sequence[PaperNumber] | None = None) -> Ranking:
    """Hold the hypotheses against the paper's numbers, which are those of paper.csv unless given.

    Raises ValueError for two of one name, for a number that the paper lacks or that cannot be compared, and
    for values that have no logarithm.
    """
    cells = of_the_paper(paper)
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
    by_table = {table: _root_mean_square(each) for table, each in logarithms.items()}
    overall = _root_mean_square([each for table in logarithms.values() for each in table])
    return Fit(hypothesis, changed, ratios, frozenset(within), by_table, overall)


def _root_mean_square(values: Sequence[float]) -> float:
    """0 for none."""
    return math.sqrt(math.fsum(value * value for value in values) / len(values)) if values else 0.0


# In words


def _shown(ranking: Ranking) -> list[Fit]:
    chosen = [*ranking.of_single_settings(), *ranking.fits[:BEST], *_best_of_tables(ranking)]
    return list({fit.hypothesis.name: fit for fit in chosen}.values())


def _best_of_tables(ranking: Ranking) -> list[Fit]:
    return [ranking.best_of(name) for name in dict.fromkeys(key[0] for key in ranking.keys)]


def _text(ranking: Ranking, *, every: bool) -> str:
    parts = [
        "Ours over the paper's number under each hypothesis; RMS: root mean square of its logarithm.",
        fill(base_of(ranking)),
    ]
    sections: Iterable[tuple[str, Sequence[Fit]]] = (
        ("The base, and what changes one setting of it", ranking.of_single_settings()),
        (
            f"All {ranking.tried}" if every else f"The {BEST} nearest of all combinations",
            ranking.fits if every else ranking.fits[:BEST],
        ),
        ("The nearest for each table alone", _best_of_tables(ranking)),
    )
    parts += [table(ranking, fits, title).text() for title, fits in sections]
    return "\n\n".join([*parts, "\n".join(summary(ranking))])


def _as_data(fit: Fit) -> dict[str, object]:
    return {
        "hypothesis": fit.hypothesis.name,
        "settings": dict(fit.hypothesis.settings),
        "changed_settings": fit.changed,
        "ratios": [
            {"table": table, "row": row, "column": column, "ratio": ratio}
            for (table, row, column), ratio in fit.ratios.items()
        ],
        "rms": {**fit.by_table, "all": fit.overall},
        "within": len(fit.within),
        "after_looking": fit.hypothesis.after_looking,
    }


def table(ranking: Ranking, fits: Sequence[Fit], title: str) -> Grid:
    """Hypotheses as lines: ours over the paper's in each column, then how near over each table and all."""
    tables, keys = ranking.tables, ranking.keys
    several = len(tables) > 1
    alike = several and len({name.partition("-")[0] for name in tables}) == 1
    short = {name: name.partition("-")[2] or name if alike else name for name in tables}
    rows = {name: {key[1] for key in keys if key[0] == name} for name in tables}
    columns = ["hypothesis"]
    columns += [
        "\n".join((short[name], *([row] if len(rows[name]) > 1 else []), column))
        for name, row, column in keys
    ]
    columns += [f"{short[name]}\nRMS" for name in tables] + ["all\nRMS"] * several + ["accounts\nfor"]
    lines = [
        [
            fit.hypothesis.label,
            *(f"{fit.ratios[key]:.2f}" if key in fit.ratios else "-" for key in keys),
            *(f"{fit.by_table[name]:.2f}" if name in fit.by_table else "-" for name in tables),
            *[f"{fit.overall:.2f}"] * several,
            len(fit.within),
        ]
        for fit in fits
    ]
    return Grid(title=title, columns=columns, lines=lines, right=numbers(columns))


def base_of(ranking: Ranking) -> str:
    """The settings of the hypothesis that all others are named after."""
    base = next(fit.hypothesis for fit in ranking.fits if fit.changed == 0)
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in base.settings.items())
    return f"The base: {settings}. Others are named after what they change of it."


def summary(ranking: Ranking) -> list[str]:
    """Sentences: how many were tried, whether one accounts for everything, what accounts for each number."""
    complete, best, count = ranking.explains_all, ranking.fits[0], len(ranking.keys)
    said = "None of them accounts for every number, so that under it alone each would be `reproduced`."
    if complete:
        nearest = complete[0].hypothesis.name
        said = f"{len(complete)} of them account for every number, the nearest being: {nearest}."
    lines = [
        f"{ranking.tried} hypotheses were tried on {count} numbers.",
        said,
        f"Nearest over all: {best.hypothesis.name} (RMS of the logarithms {best.overall:.2f}, "
        f"{len(best.within)} of {count} accounted for).",
    ]
    most = max(ranking.fits, key=lambda fit: (len(fit.within), -fit.overall))
    if most is not best:
        found = f"{len(most.within)} of {count}, RMS {most.overall:.2f}"
        lines.append(f"Most numbers accounted for: {most.hypothesis.name} ({found}).")
    if lost := [" / ".join(key) for key in ranking.keys if not ranking.explains(key)]:
        lines.append(f"No hypothesis accounts for {', '.join(lost)}.")
    return lines

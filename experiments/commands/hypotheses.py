"""`hypotheses NAME`: settings of the same model against the paper's numbers, from records alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from gpipe_bench.experiments.commands.output import DONE, tell, warn
from gpipe_bench.experiments.registry import EXPERIMENTS, load, program
from gpipe_bench.experiments.report.readings import folder_of, select_records
from gpipe_bench.harness.hypotheses import Fit, Ranking, base_of, rank, summary, table
from gpipe_bench.harness.report.grid import fill
from gpipe_bench.harness.store import Store, lines_of

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

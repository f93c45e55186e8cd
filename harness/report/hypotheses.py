"""Tables of hypotheses in words: what was tried, how near each comes, and what none of them explains."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.harness.hypotheses import Fit, Ranking
from gpipe_bench.harness.report.grid import Grid, numbers


def table(ranking: Ranking, fits: Sequence[Fit], title: str) -> Grid:
    """Hypotheses as lines: ours over the paper's in each column, then how near over each table and all."""
    tables = list(dict.fromkeys(key[0] for key in ranking.keys))
    first = {name.partition("-")[0] for name in tables}
    short = {
        name: name.partition("-")[2] or name if len(first) == 1 < len(tables) else name for name in tables
    }
    rows = {name: {key[1] for key in ranking.keys if key[0] == name} for name in tables}
    columns = [
        "hypothesis",
        *(
            "\n".join((short[key[0]], *([key[1]] if len(rows[key[0]]) > 1 else []), key[2]))
            for key in ranking.keys
        ),
        *(f"{short[name]}\nRMS" for name in tables),
        *(["all\nRMS"] if len(tables) > 1 else []),
        "accounts\nfor",
    ]
    lines = [
        [
            fit.hypothesis.name + (" (found after looking)" if fit.hypothesis.after_looking else ""),
            *(f"{fit.ratios[key]:.2f}" if key in fit.ratios else "-" for key in ranking.keys),
            *(f"{fit.by_table[name]:.2f}" if name in fit.by_table else "-" for name in tables),
            *([f"{fit.overall:.2f}"] if len(tables) > 1 else []),
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
    complete = ranking.explains_all
    best = ranking.fits[0]
    lines = [
        f"{ranking.tried} hypotheses were tried on {len(ranking.keys)} numbers.",
        f"{len(complete)} of them account for every number, the nearest being: {complete[0].hypothesis.name}."
        if complete
        else "None of them accounts for every number, so that under it alone each would be `reproduced`.",
        f"Nearest over all: {best.hypothesis.name} (RMS of the logarithms {best.overall:.2f}, "
        f"{len(best.within)} of {len(ranking.keys)} accounted for).",
    ]
    most = max(ranking.fits, key=lambda fit: (len(fit.within), -fit.overall))
    if most is not best:
        lines.append(
            f"Most numbers accounted for: {most.hypothesis.name} ({len(most.within)} of {len(ranking.keys)}, "
            f"RMS {most.overall:.2f})."
        )
    lost = [key for key in ranking.keys if not ranking.explains(key)]
    if lost:
        lines.append("No hypothesis accounts for " + ", ".join(" / ".join(key) for key in lost) + ".")
    return lines

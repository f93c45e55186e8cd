"""Measure, remember, judge: records of runs, the paper's numbers, and verdicts between the two.

The package knows nothing about pipelines or models, so it can hold any experiment to any published table.
What the project publishes and what a user gets lies in `results/`, which stands beside `harness/` in a
checkout and in an installed wheel alike.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout, or the installed `gpipe_bench`."""

PUBLISHED = ROOT / "results"
"""The paper's numbers, reference records, the guard's counters: what comes with the project."""

REFERENCE = PUBLISHED / "reference"


def is_checkout() -> bool:
    """Whether this code runs from a checkout of the project, not from an installed wheel."""
    return (ROOT / "noxfile.py").is_file()


def own_results() -> Path:
    """`results/local` of the checkout, for who works in it; of the working directory, for whom the project is
    only installed or on the path.
    """
    here = Path.cwd().resolve()
    return (ROOT if is_checkout() and here.is_relative_to(ROOT) else here) / "results" / "local"


def short_path(path: Path) -> str:
    """The path as one would type it from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)

"""Runs experiments, keeps their records, and judges them by the paper's numbers.

The package knows nothing about pipelines or models, so it can compare any experiment with any published
table. Published and own results are in `results/`, beside `harness/` in a checkout and in an installed wheel.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout, or the installed `gpipe_bench`."""

PUBLISHED = ROOT / "results"
"""What the project publishes: the paper's numbers, reference records, the guard's counters."""

REFERENCE = PUBLISHED / "reference"


def is_checkout() -> bool:
    """Whether this code runs from a checkout of the project, not from an installed wheel."""
    return (ROOT / "noxfile.py").is_file()


def own_results() -> Path:
    """`results/local` in the checkout if the working directory is inside, else in the working directory."""
    here = Path.cwd().resolve()
    return (ROOT if is_checkout() and here.is_relative_to(ROOT) else here) / "results" / "local"


def short_path(path: Path) -> str:
    """The path relative to the working directory, if it is inside."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)

"""Where things lie: what the project publishes, and where the results of a user go.

The same layout holds in a checkout and in an installed wheel: `results/` stands beside `harness/`.
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

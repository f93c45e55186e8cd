"""The experiments by name; a module is imported when asked for, so the command line starts at once."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_bench.harness.experiment import Experiment

EXPERIMENTS: dict[str, str] = {
    "table1": "gpipe_bench.experiments.table1.experiment",
    "table2": "gpipe_bench.experiments.table2.experiment",
    "table3": "gpipe_bench.experiments.table3.experiment",
    "table4": "gpipe_bench.experiments.table4.experiment",
    "figure2": "gpipe_bench.experiments.figure2.experiment",
    "figure3": "gpipe_bench.experiments.figure3.experiment",
    "engine": "gpipe_bench.experiments.side_by_side.engine",
    "consistency": "gpipe_bench.experiments.consistency.experiment",
    "peers": "gpipe_bench.experiments.side_by_side.peers",
}


def load(name: str) -> Experiment:
    """The experiment of that name. Raises ValueError naming those there are."""
    if name not in EXPERIMENTS:
        raise ValueError(
            f"unknown experiment {name!r}{suggestion(name, EXPERIMENTS)}; known: {', '.join(EXPERIMENTS)}"
        )
    experiment: Experiment = importlib.import_module(EXPERIMENTS[name]).EXPERIMENT
    return experiment


def suggestion(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'table1'?` for a slip of the finger."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""

"""The experiments by name; a module is imported when asked for, so the command line starts at once."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.experiment import Experiment

EXPERIMENTS: dict[str, str] = {
    "table1": "experiments.table1",
    "table2": "experiments.table2",
    "table3": "experiments.table3",
    "table4": "experiments.table4",
    "figure2": "experiments.figure2",
    "figure3": "experiments.figure3",
    "engine": "experiments.engine_bench",
    "consistency": "experiments.consistency",
    "peers": "experiments.peers",
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

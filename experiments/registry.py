"""The one list of experiments, and that of engines; a module is imported when asked for, so the command line
starts at once.

`noxfile.py` runs this file by itself, before anything is installed: it needs the standard library alone.
"""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_bench.harness.experiment import Experiment

# A line for each: the name on the command line and in nox, and the module that ends with its EXPERIMENT.
EXPERIMENTS: dict[str, str] = {
    "table1": "gpipe_bench.experiments.paper.table1",
    "table2": "gpipe_bench.experiments.paper.table2",
    "table3": "gpipe_bench.experiments.paper.table3",
    "table4": "gpipe_bench.experiments.paper.table4",
    "figure2": "gpipe_bench.experiments.paper.figure2",
    "figure3": "gpipe_bench.experiments.paper.figure3",
    "computed": "gpipe_bench.experiments.paper.computed",
    "consistency": "gpipe_bench.experiments.paper.consistency",
    "predictions": "gpipe_bench.experiments.paper.predictions",
    "engines": "gpipe_bench.experiments.beyond.engines",
    "schedules": "gpipe_bench.experiments.beyond.schedules",
    "grid": "gpipe_bench.experiments.beyond.grid",
    "plan": "gpipe_bench.experiments.beyond.plan",
}
ENGINES: dict[str, str] = {
    "ours": "gpipe_bench.experiments.engines.known:Ours",
    "ours-1f1b": "gpipe_bench.experiments.engines.known:Ours1F1B",
    "torch-gpipe": "gpipe_bench.experiments.engines.known:TorchGPipe",
    "torch-1f1b": "gpipe_bench.experiments.engines.known:Torch1F1B",
    "torchgpipe": "gpipe_bench.experiments.engines.known:Torchgpipe",
}
"""Known engines under test: name -> factory. "torch-..." are torch.distributed.pipelining's schedules."""

PROFILES = ("smoke", "short", "full")
"""Profiles of every experiment: that it runs, what a laptop can do, the paper's sizes."""

VERBS_TOO = ("plan",)
"""Experiments that have the name of a verb, which it stays on the command line."""


def load(name: str) -> Experiment:
    """The experiment of that name. Raises ValueError naming those there are."""
    if name not in EXPERIMENTS:
        from gpipe_bench.pipeline.plan.named import suggestion

        raise ValueError(
            f"unknown experiment {name!r}{suggestion(name, EXPERIMENTS)}; known: {', '.join(EXPERIMENTS)}"
        )
    experiment: Experiment = importlib.import_module(EXPERIMENTS[name]).EXPERIMENT
    if experiment.name != name:  # its records and its commands would have another name than it is called by
        raise ValueError(
            f"the experiment {name!r} of the registry is called {experiment.name!r} in {EXPERIMENTS[name]}; "
            "give both the same name"
        )
    return experiment


def spelled_out(words: Sequence[str]) -> list[str]:
    """Arguments of the command line, with the verb `run` before an experiment whose name stands alone."""
    if words and words[0] in EXPERIMENTS and words[0] not in VERBS_TOO:
        return ["run", *words]
    return list(words)


def program() -> str:
    """Words to type in front of a verb: the command or the module by which this program was started."""
    started, python = Path(sys.argv[0]), sys.executable
    if (started.parent.name, started.name) == ("experiments", "__main__.py"):
        package = "gpipe_bench.experiments" if started.parts[-3] == "gpipe_bench" else "experiments"
        return f"{_typed('python', python)} -m {package}"
    return _typed("gpipe-bench", str(started)) if started.name == "gpipe-bench" else "gpipe-bench"


def _typed(name: str, path: str) -> str:
    """The name where it leads to this file, else its path as seen from here."""
    if os.path.dirname(shutil.which(name) or "") == os.path.dirname(os.path.abspath(path)):
        return name
    shown = os.path.relpath(path)
    return path if shown.startswith("..") else shown


def title(name: str) -> str:
    """The experiment's title, read from its source: nothing is imported. Raises ValueError if it has none."""
    _, *folders = EXPERIMENTS[name].split(".")
    path = Path(__file__).resolve().parents[1].joinpath(*folders).with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name("EXPERIMENT")], value=ast.Call(keywords=keywords)):
                given = {keyword.arg: keyword.value for keyword in keywords}
                if isinstance(text := given.get("title"), ast.Constant):
                    return str(text.value)
    raise ValueError(f'{path} has no EXPERIMENT = ...(title="..."); nox lists experiments by it')

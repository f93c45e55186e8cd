"""Options of the verbs for engines and other repositories: `guard` and `check-engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpipe_bench.experiments.commands.parsing.options import add


def guard_options(verbs: Any) -> None:
    """Of `guard`."""
    verb = add(
        verbs,
        "guard",
        "exact counters against the committed ones, and speed against another revision",
        "Without --base only the counters are checked. For a repository of your own: guard --repo . --base "
        "main --engine module:attribute.",
    )
    verb.add_argument(
        "--base", metavar="REF", help="time the working tree against where it left this revision"
    )
    verb.add_argument(
        "--update",
        action="store_true",
        help="write the committed counters anew; say in the commit why they changed",
    )
    verb.add_argument(
        "--only", action="append", default=[], metavar="BENCHMARK", help="time only this one; may be repeated"
    )
    verb.add_argument(
        "--removed",
        action="append",
        default=[],
        metavar="BENCHMARK",
        help="a benchmark of the base that is gone on purpose",
    )
    verb.add_argument(
        "--budget-s", type=float, default=150.0, metavar="S", help="time for all rounds; default: %(default)g"
    )
    verb.add_argument("--history", type=Path, metavar="DIR", help="also write a file for a trend tool there")
    verb.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also add the result to this file, as to a job's summary",
    )
    verb.add_argument(
        "--require-conclusive", action="store_true", help="exit with 1 where nothing can be told, too"
    )
    verb.add_argument(
        "--repo", type=Path, metavar="DIR", help="guard this repository instead, by --engine or --benchmarks"
    )
    verb.add_argument(
        "--engine", metavar="MODULE:ATTRIBUTE", help="its engine, timed by this project's benchmarks"
    )
    verb.add_argument(
        "--benchmarks",
        type=Path,
        metavar="FILE",
        help="a file of its own benchmarks: functions in a dictionary BENCHMARKS",
    )
    verb.add_argument(
        "--path", action="append", default=[], metavar="FOLDER",
        help="where its modules are, below DIR; default: DIR and DIR/src",
    )  # fmt: skip
    verb.add_argument("--build", metavar="COMMAND", help="run in the base's checkout before it is timed")


def check_engine_options(verbs: Any) -> None:
    """Of `check-engine`."""
    verb = add(
        verbs,
        "check-engine",
        "whether an engine is right: gradients, micro-batches, recomputation",
        "Takes seconds and times nothing. Example: check-engine my_engine:Engine.",
        results=False,
    )
    verb.add_argument(
        "engine", metavar="MODULE:ATTRIBUTE", help="your engine, or one by its name, such as gpipe"
    )
    verb.add_argument(
        "--timeout-s", type=float, default=30.0, metavar="S",
        help="after which a step counts as hung; default: %(default)g",
    )  # fmt: skip

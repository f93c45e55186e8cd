"""Options of the verbs about experiments and their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpipe_bench.experiments.commands.parsing.options import add

PROFILES = ("smoke", "short", "full")


def list_options(verbs: Any) -> None:
    """Of `list`."""
    verb = add(verbs, "list", "the experiments, and how long each profile of them takes on this machine")
    verb.add_argument(
        "--models", action="store_true", help="instead the model zoo: layers and exact parameters"
    )


def doctor_options(verbs: Any) -> None:
    """Of `doctor`."""
    verb = add(verbs, "doctor", "what this machine can run, and what it lacks")
    verb.add_argument(
        "--device", choices=("auto", "cuda"), default="auto",
        help="cuda: what .ci/gpu would run here, how long each step takes and what it needs",
    )  # fmt: skip


def run_options(verbs: Any) -> None:
    """Of `run`."""
    verb = add(
        verbs,
        "run",
        "run an experiment, then compare; what is on record is not run again",
        "Example: run table1 --only half=transformer. A run that was ended goes on from where it was.",
    )
    verb.add_argument("name", metavar="NAME", help="an experiment; `list` has their names")
    verb.add_argument(
        "--profile", choices=PROFILES, default="short",
        help="smoke: that it runs, in seconds; short: minutes, no GPU needed; full: the paper's sizes, for "
        "GPUs; default: %(default)s",
    )  # fmt: skip
    verb.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s"
    )
    verb.add_argument(
        "--engine",
        metavar="NAME",
        help="the engine under test, by its name or as module:attribute, where an experiment runs one",
    )
    verb.add_argument("--data", type=Path, metavar="PATH", help="your own images, where it trains on some")
    verb.add_argument("--text", type=Path, metavar="PATH", help="your own text, likewise")
    verb.add_argument(
        "--parallel-text", type=Path, metavar="PATH", help="its translation, line by line, to train on pairs"
    )
    verb.add_argument(
        "--only", action="append", default=[], metavar="KEY=VALUE",
        help="only the cases with this value, such as half=transformer; the same key again adds a value, "
        "another key narrows",
    )  # fmt: skip
    verb.add_argument("--fresh", action="store_true", help="run again what is on record")
    verb.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="cases at the same time, where an experiment times nothing; default there: cores, at most 8",
    )
    verb.add_argument(
        "--assert",
        dest="assert_",
        action="store_true",
        help="exit with 1 if a verdict is `above` or `below`, after printing",
    )


def compare_options(verbs: Any) -> None:
    """Of `compare`."""
    verb = add(
        verbs,
        "compare",
        "the paper's numbers, ours and a verdict for each, from records alone",
        "Example: compare table1 --results results/reference/cpu-2-cores shows ours; nothing is run.",
    )
    verb.add_argument("name", metavar="NAME", help="an experiment; `list` has their names")
    verb.add_argument("--profile", choices=PROFILES, help="default: that of the latest record")
    verb.add_argument("--engine", metavar="NAME", help="of several runs the latest in which it took part")
    verb.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    verb.add_argument(
        "--machines",
        nargs="+",
        metavar="MACHINE",
        help="several machines in one table: names under results/reference, local, folders, files of export",
    )


def hypotheses_options(verbs: Any) -> None:
    """Of `hypotheses`."""
    verb = add(
        verbs,
        "hypotheses",
        "reasons for differences, tested: what each setting that the paper leaves open does",
    )
    verb.add_argument("name", metavar="NAME", help="an experiment; `list` has their names")
    verb.add_argument("--all", action="store_true", help="every combination, not the nearest few")


def report_options(verbs: Any) -> None:
    """Of `report`."""
    verb = add(verbs, "report", "every number of the paper beside ours, as one HTML page and markdown")
    verb.add_argument("--output", type=Path, metavar="DIR", help="default: the results folder")
    verb.add_argument(
        "--with", dest="with_", action="append", default=[], type=Path, metavar="FILE",
        help="also the records of a file that export wrote; may be repeated",
    )  # fmt: skip
    verb.add_argument("--engine", metavar="NAME", help="first of all the runs in which it took part")
    verb.add_argument("--no-figures", action="store_true", help="numbers and timelines only")


def export_options(verbs: Any) -> None:
    """Of `export`."""
    verb = add(verbs, "export", "your records as one file, to send to somebody else")
    verb.add_argument("name", nargs="*", metavar="NAME", help="experiments; default: all on record")
    verb.add_argument("--output", type=Path, metavar="FILE.zip", help="default: the results folder's name")


def check_options(verbs: Any) -> None:
    """Of `check`."""
    verb = add(verbs, "check", "whether a file of records is whole, unaltered and can be true")
    verb.add_argument("file", type=Path, metavar="FILE", help="what export wrote")

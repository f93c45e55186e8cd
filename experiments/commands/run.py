"""`run NAME`: runs what is not on record, then shows table and verdicts and writes the figures."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from gpipe_bench.harness import short_path
from gpipe_bench.harness.experiment import Experiment, RunOptions, only_of
from gpipe_bench.harness.record import Record, encode, printable
from gpipe_bench.harness.report.grid import SCREEN, within
from gpipe_bench.harness.report.table import Shown, screen, shown_of
from gpipe_bench.harness.runner import Reporter, RunResult, reporter, run_experiment, sensible_jobs
from gpipe_bench.harness.store import Store, latest, select_records
from gpipe_bench.harness.verdict import JUDGED, Comparison
from gpipe_bench.pipeline.plan.named import suggestion

from ..drawing import draw
from ..registry import PROFILES, load, program
from .output import CASE_FAILED, DONE, VERDICT_FAILED, interrupted, lines_only, print_line, say

TF32 = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"  # torch reads it when it is loaded


def options(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("name", metavar="NAME", help="an experiment; `list` has their names")
    add(
        "--profile", choices=PROFILES,
        help="smoke: that it runs, in seconds; short: minutes, no GPU needed; full: the paper's sizes, for "
        "GPUs; default: full on a GPU, else short",
    )  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    add(
        "--tf32", action="store_true",
        help="on a GPU, let products of float32 round their factors to TF32; such records stand apart",
    )  # fmt: skip
    add(
        "--engine", metavar="NAME",
        help="the engine under test, by its name or as module:attribute, where an experiment runs one",
    )  # fmt: skip
    add("--data", type=Path, metavar="PATH", help="your own images, where it trains on some")
    add(
        "--only", action="append", default=[], metavar="KEY=VALUE",
        help="only the cases with this value, such as half=transformer; the same key again adds a value, "
        "another key narrows",
    )  # fmt: skip
    add("--fresh", action="store_true", help="run again what is on record")
    add(
        "--jobs", type=int, metavar="N",
        help="cases at the same time, where an experiment times nothing; default there: cores, at most 8",
    )  # fmt: skip
    add(
        "--assert", dest="assert_", action="store_true",
        help="exit with 1 if an answer is `differs`, after printing",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError, naming value and remedy, for what can't be run."""
    experiment = load(arguments.name)
    asked = _asked(arguments, experiment)
    store, show = Store(arguments.results), reporter()
    does = experiment.profiles.get(asked.profile)
    show.title = f"{experiment.title}, profile {asked.profile}: {does}"
    jobs = arguments.jobs
    if jobs is None:  # all cores where nothing is timed, but one case at a time on GPUs
        jobs = sensible_jobs() if experiment.untimed and asked.device != "cuda" else 1
    with lines_only() if arguments.json else nullcontext(print_line) as emit:

        def on_record(record: Record, saved: bool) -> None:
            if arguments.json or not saved:
                emit(encode(record))

        result = run_experiment(
            experiment, asked, store, reporter=show, jobs=jobs,
            command=printable(shlex.join(["python", "-m", "experiments", *arguments.arguments])),
            on_record=on_record,
        )  # fmt: skip
        if result.signal is not None:  # who asked for the end wants no comparison
            finished = len(result.records)
            show.warn(f"interrupted; {finished} finished cases are kept, the same command goes on from there")
            return interrupted(result.signal)
        with within(SCREEN):
            shown = _shown(experiment, asked, store, result)
        where = "" if arguments.is_own else f" --results {shlex.quote(str(arguments.results))}"
        if not arguments.json:
            say(screen(shown, f"{program()} compare {experiment.name}{where} --full"))
        for path in _figures(experiment, shown, store.root / "figures", show):
            if not arguments.json:
                print(f"figure: {short_path(path)}")
    return _status(result, shown.comparisons, arguments)


def usual_options(
    experiment: Experiment, profile: str, device: str = "auto", engine: str | None = None
) -> RunOptions:
    """Options of a run without further arguments. ValueError for an unknown device or engine."""
    return RunOptions(profile=profile, device=_device(device, experiment), engine=_engine(engine, experiment))


def _asked(arguments: argparse.Namespace, experiment: Experiment) -> RunOptions:
    """All that the options say. Paths of the user's own data are absolute."""
    own: dict[str, Any] = {}
    if arguments.data is not None:
        if "data" not in experiment.options:
            taken = f"--data {arguments.data}: {experiment.name} takes no data"
            raise ValueError(f"{taken}; leave the option out")
        own["data"] = str(arguments.data.resolve())
    only = only_of(arguments.only)
    device = _device(arguments.device, experiment)
    # Models that are scaled to two cores keep a GPU waiting for its host, and nothing else is timed.
    profile = arguments.profile or ("full" if device == "cuda" else "short")
    return replace(
        usual_options(experiment, profile, device, arguments.engine),
        only=only, tf32=_tf32(arguments, device), fresh=arguments.fresh, **own,
    )  # fmt: skip


def _device(asked: str, experiment: Experiment) -> str:
    """`cpu` or `cuda`, where the experiment depends on it. Importing torch to ask takes a second, so a build
    for processors alone, which says so in its version, is not asked.
    """
    if asked == "cpu" or (asked == "auto" and "device" not in experiment.options):
        return asked
    if asked == "auto" and metadata.version("torch").endswith("+cpu"):
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise ValueError(
            "--device cuda: torch sees no CUDA device here; use --device cpu, or see `list --machine`"
        )
    return "cpu"


def _tf32(arguments: argparse.Namespace, device: str) -> bool:
    """Whether TF32 is allowed, which this process and all that it starts are told, and records say."""
    if not arguments.tf32:
        return False
    if device != "cuda":
        raise ValueError("--tf32 is for GPUs, and none is used here; leave the option out")
    import torch

    os.environ[TF32] = "1"
    torch.set_float32_matmul_precision("high")
    return True


def _engine(asked: str | None, experiment: Experiment) -> str | None:
    if asked is None:
        return experiment.engines[0] if experiment.engines else None
    if not experiment.engines:
        raise ValueError(f"--engine {asked}: {experiment.name} runs no engine; leave the option out")
    if asked in experiment.engines:
        return asked
    names = asked.split(",") if "engines" in experiment.takes else [asked]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--engine {asked}: {', '.join(sorted(twice))} is given twice; name each once")
    return ",".join(_own_engine(name, experiment) for name in names)


def _own_engine(asked: str, experiment: Experiment) -> str:
    if ":" not in asked:
        raise ValueError(
            f"unknown engine {asked!r}{suggestion(asked, experiment.engines)}; "
            f"known: {', '.join(experiment.engines)}, or your own as module:attribute"
        )
    from ..engines.setup import pinned

    return pinned(asked)


def _shown(experiment: Experiment, options: RunOptions, store: Store, result: RunResult) -> Shown:
    """Results on record for these options, also from earlier runs, and those this run could not write."""
    stored = select_records(store.load(experiment.name).records, experiment.revision, options.profile)
    wanted = experiment.relevant(options)
    known = [record for record in stored if record.options == wanted]
    records = list(latest([*known, *result.records]).values())  # on a full disk new ones are not stored
    return shown_of(experiment, records)


def _figures(experiment: Experiment, shown: Shown, folder: Path, show: Reporter) -> list[Path]:
    if experiment.figures is None or not shown.records:
        return []
    try:
        return draw(experiment, shown.records, folder)
    except OSError as error:  # the numbers are worth showing without the pictures
        show.warn(f"can't write figures to {folder}: {error.strerror or error}")
    except ImportError as error:
        show.warn(
            f"figures are not drawn: {error}; `{program()} list --machine` says how to get what is missing"
        )
    return []


def _status(result: RunResult, comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> int:
    results = short_path(arguments.results)
    said = [f"failed: {record.label}: {record.reason}" for record in result.failed]
    if result.failed:
        said += [f"tracebacks are in the records, {results}/{arguments.name}.jsonl; run again to retry"]
    if any("No module named" in record.reason for record in result.failed):
        said += [f"`{program()} list --machine` says how to get what is missing"]
    if result.unsaved:
        said += [f"error: {len(result.unsaved)} results could not be written to {results}"]
    status = CASE_FAILED if said else DONE
    if arguments.assert_ and not said:
        bad = [each for each in comparisons if each.answer == "differs"]
        said += [f"{c.verdict}: {c.table} / {c.row} / {c.column}: {c.reason}" for c in bad]
        if not any(each.verdict in JUDGED for each in comparisons):
            said += ["nothing to assert: no cell has a number of ours and a comparable one of the paper"]
        if said:
            status = VERDICT_FAILED
    for line in said:
        print(line, file=sys.stderr)
    return status

"""`run NAME`: runs what is not on record, then shows table and verdicts and writes the figures."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import lines_only, print_line, say
from gpipe_bench.experiments.registry import load, suggestion
from gpipe_bench.experiments.report.figures import draw
from gpipe_bench.experiments.report.readings import Shown, readable, shown_of
from gpipe_bench.experiments.report.records import merge, select_records
from gpipe_bench.harness.experiment import Experiment, RunOptions
from gpipe_bench.harness.progress import Reporter, reporter
from gpipe_bench.harness.record import Record, encode, printable
from gpipe_bench.harness.runner import RunResult, run_experiment
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.verdict import DIFFERS, JUDGED, Comparison
from gpipe_bench.harness.workers import sensible_jobs


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb."""
    experiment = load(arguments.name)
    options = replace(
        usual_options(experiment, arguments.profile, arguments.device, arguments.engine),
        only=_only(arguments.only),
        scratch=arguments.results / "unfinished" / experiment.name,
        fresh=arguments.fresh,
        **_own_data(arguments, experiment),
    )
    store = Store(arguments.results)
    command = printable(shlex.join(["python", "-m", "experiments", *arguments.arguments]))
    show = reporter()

    def go(on_record: Callable[[Record, bool], None]) -> RunResult:
        return run_experiment(
            experiment,
            options,
            store,
            reporter=show,
            fresh=arguments.fresh,
            jobs=_jobs(arguments.jobs, experiment, options.device),
            command=command,
            on_record=on_record,
        )

    if arguments.json:
        with lines_only() as emit:
            result = go(lambda record, saved: emit(encode(record)))
            if result.signal is not None:
                return _interrupted(result.signal, result, show)
            shown = _shown(experiment, options, store, result, show)
            _figures(experiment, shown, store.root / "figures", show)
    else:
        result = go(lambda record, saved: None if saved else print_line(encode(record)))
        if result.signal is not None:
            return _interrupted(result.signal, result, show)
        shown = _shown(experiment, options, store, result, show)
        say(shown.text)
        for path in _figures(experiment, shown, store.root / "figures", show):
            print(f"figure: {_short(path)}")
    return _status(result, shown.comparisons, arguments)


def usual_options(
    experiment: Experiment, profile: str, device: str = "auto", engine: str | None = None
) -> RunOptions:
    """What a run without further options asks for. ValueError for a device or an engine that there is not."""
    return RunOptions(profile=profile, device=_device(device, experiment), engine=_engine(engine, experiment))


def _interrupted(number: int, result: RunResult, show: Reporter) -> int:
    """Who asked for the end wants no comparison."""
    show.warn(
        f"interrupted; {len(result.records)} finished cases are kept, the same command goes on from there"
    )
    return exits.interrupted(number)


def _shown(
    experiment: Experiment, options: RunOptions, store: Store, result: RunResult, show: Reporter
) -> Shown:
    """What is on record for these options, also from earlier runs, and what this run could not write."""
    stored = select_records(store.load(experiment.name).records, experiment, options.profile)
    wanted = experiment.relevant(options)
    records = merge([record for record in stored if record.options == wanted], result.records)
    shown, left_out = readable(experiment.name, records, lambda usable: shown_of(experiment, usable))
    for line in left_out:
        show.warn(line)
    return shown or shown_of(experiment, records)  # a mistake of the experiment itself shall be seen


def _figures(experiment: Experiment, shown: Shown, folder: Path, show: Reporter) -> list[Path]:
    if experiment.figures is None or not shown.records:
        return []
    try:
        return draw(experiment, shown.records, folder)
    except OSError as error:  # the numbers are worth showing without the pictures
        show.warn(f"can't write figures to {folder}: {error.strerror or error}")
        return []


def _status(result: RunResult, comparisons: Sequence[Comparison], arguments: argparse.Namespace) -> int:
    results = _short(arguments.results)
    for record in result.failed:
        print(f"failed: {record.label}: {record.reason}", file=sys.stderr)
    if result.failed:
        print(
            f"tracebacks are in the records, {results}/{arguments.name}.jsonl; run again to retry",
            file=sys.stderr,
        )
    if result.unsaved:
        print(f"error: {len(result.unsaved)} results could not be written to {results}", file=sys.stderr)
    if result.failed or result.unsaved:
        return exits.CASE_FAILED
    if arguments.assert_:
        bad = [c for c in comparisons if c.verdict in DIFFERS]
        for c in bad:
            print(f"{c.verdict}: {c.table} / {c.row} / {c.column}: {c.reason}", file=sys.stderr)
        if not any(c.verdict in JUDGED for c in comparisons):
            print(
                "nothing to assert: no cell has a number of ours and a comparable one of the paper",
                file=sys.stderr,
            )
            return exits.VERDICT_FAILED
        if bad:
            return exits.VERDICT_FAILED
    return exits.DONE


def _device(asked: str, experiment: Experiment) -> str:
    """`cpu` or `cuda`, where the experiment depends on it; torch is asked only where it could see one."""
    if asked == "cpu" or (asked == "auto" and "device" not in experiment.options):
        return asked
    if asked == "auto" and "torch" not in sys.modules:
        found = importlib.util.find_spec("torch")
        if found is not None and found.origin and sees_no_cuda(Path(found.origin).with_name("version.py")):
            return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise ValueError(
            "--device cuda: torch sees no CUDA device here; use --device cpu, or see what doctor says"
        )
    return "cpu"


def sees_no_cuda(version: Path) -> bool:
    """Whether the torch with this version file surely finds no device: it is built for none, or for CUDA and
    there is no driver. Importing torch to ask would take a second.
    """
    try:
        built_for = dict(
            re.findall(r"^(cuda|hip)\b[^=\n]*= *(\S+)", version.read_text(encoding="utf-8"), re.M)
        )
    except OSError:
        return False
    if built_for.get("hip") != "None" or "cuda" not in built_for:
        return False
    if built_for["cuda"] == "None":
        return True
    if sys.platform != "linux":
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


def _jobs(asked: int | None, experiment: Experiment, device: str) -> int:
    """As asked, or what is sensible: all cores where nothing is timed, but one case at a time on GPUs."""
    if asked is not None:
        return asked
    return sensible_jobs() if experiment.untimed and device != "cuda" else 1


def _engine(asked: str | None, experiment: Experiment) -> str | None:
    if asked is None:
        return experiment.engines[0] if experiment.engines else None
    if not experiment.engines:
        raise ValueError(f"--engine {asked}: {experiment.name} runs no engine; leave the option out")
    if asked in experiment.engines:
        return asked
    names = asked.split(",") if experiment.several_engines else [asked]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"--engine {asked}: {', '.join(sorted(twice))} is given twice; name each once")
    return ",".join(_own_engine(name, experiment) for name in names)


def _own_engine(asked: str, experiment: Experiment) -> str:
    if ":" not in asked:
        raise ValueError(
            f"unknown engine {asked!r}{suggestion(asked, experiment.engines)}; "
            f"known: {', '.join(experiment.engines)}, or your own as module:attribute"
        )
    from gpipe_bench.experiments.engines.setup import check_step, pinned

    name = pinned(asked)
    check_step(name)
    return name


def _own_data(arguments: argparse.Namespace, experiment: Experiment) -> dict[str, Any]:
    """Absolute paths of the user's own data; refused where the experiment trains on none."""
    found: dict[str, Any] = {}
    for name in ("data", "text", "parallel_text"):
        path = getattr(arguments, name)
        if path is None:
            continue
        if name not in experiment.options:
            raise ValueError(
                f"--{name.replace('_', '-')} {path}: {experiment.name} takes no data; leave the option out"
            )
        found[name] = str(path.resolve())
    return found


def _only(texts: list[str]) -> dict[str, tuple[str, ...]]:
    wanted: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ValueError(f"--only {text!r} is not KEY=VALUE")
        wanted[key] = (*wanted.get(key, ()), value)
    return wanted


def _short(path: Path) -> str:
    """The path as one would type it from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)

"""`list`: the experiments and how long each profile takes; `list --machine`: what this machine can run and
what it lacks; `list --models`: the model zoo.

At first little but the standard library is imported, because `list --machine` has to run where packages are
missing, and name them. A separate process imports torch: some builds crash on some processors.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import gpu
from ..registry import EXPERIMENTS, load, program
from .output import DONE, VERDICT_FAILED, tell, warn

if TYPE_CHECKING:
    from gpipe_bench.harness.experiment import Experiment
    from gpipe_bench.harness.store import Store


def options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--models", action="store_true", help="show models, not experiments: layers and exact parameters"
    )
    verb.add_argument(
        "--machine", action="store_true", help="show what this machine can run and lacks, with remedies"
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb; 1 where this machine lacks something."""
    if arguments.machine:
        return _machine_shown(arguments)
    if arguments.models:
        from gpipe_bench.models.zoo import rows
    else:
        from gpipe_bench.harness.store import Store

        store = Store(arguments.results)
    found = rows() if arguments.models else (_entry(name, store) for name in EXPERIMENTS)
    tell(arguments, found, lambda: _zoo_text(found) if arguments.models else _text(found))
    return DONE


def _entry(name: str, store: Store) -> dict[str, Any]:
    try:
        experiment = load(name)
    except ImportError as error:  # one experiment that lacks a package must not hide the others
        warn(f"{name} can't be loaded: {error}")
        nothing = {"source": "", "describe": "", "profiles": []}
        return {"name": name, "title": f"can't be loaded: {error}", **nothing}
    return {
        "name": name,
        "title": experiment.title,
        "source": experiment.source,
        "describe": experiment.describe,
        "profiles": [
            {"profile": profile, "does": does, **_time(experiment, profile, store)}
            for profile, does in experiment.profiles.items()
        ],
    }


def _time(experiment: Experiment, profile: str, store: Store) -> dict[str, Any]:
    """The number of cases, how many of them are on record, and the expected seconds: those that a case took
    here, at any revision of the experiment, else its estimate.
    """
    from gpipe_bench.harness.experiment import RunOptions
    from gpipe_bench.harness.record import FINAL
    from gpipe_bench.harness.runner import sensible_jobs
    from gpipe_bench.harness.store import latest

    from .run import usual_options

    cases = experiment.cases(RunOptions(profile=profile))
    stored = latest(store.load(experiment.name).records)
    took = {
        record.label: record.duration_s
        for record in stored.values()
        if record.profile == profile and record.status == "done"
    }
    known = 0
    if any(case.label in took for case in cases):  # else torch need not be imported
        options = usual_options(experiment, profile)
        found = [stored.get(experiment.identity(case, options)) for case in cases]
        known = sum(record is not None and record.status in FINAL for record in found)
    jobs = min(sensible_jobs(), len(cases)) if experiment.untimed else 1
    return {
        "cases": len(cases),
        "on_record": known,
        "expected_s": sum(took.get(case.label, case.estimate_s) for case in cases) / jobs,
    }


def _text(entries: Iterable[dict[str, Any]]) -> str:
    from gpipe_bench.harness.report.grid import fill
    from gpipe_bench.harness.runner import words

    blocks = []
    for entry in entries:
        lines = [fill(f"{entry['name']}: {entry['title']} ({entry['source']})", "", "  ")]
        for each in entry["profiles"]:
            summary = f"{each['cases']:>3} cases, {each['on_record']} on record: {each['does']}"
            lines.append(fill(summary, f"  {each['profile']:<6} {words(each['expected_s']):>12}  ", " " * 23))
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, f"run one with: {program()} run NAME --profile PROFILE"])


def _zoo_text(found: Iterable[dict[str, Any]]) -> str:
    from gpipe_bench.harness.report.grid import Grid

    lines = []
    for row in found:
        configuration = " ".join(f"{key}={value}" for key, value in row["configuration"].items())
        lines.append([row["model"], configuration, row["layers"], f"{row['parameters']:,}"])
    columns = ["model", "configuration", "layers", "parameters"]
    return Grid(columns=columns, lines=lines, right=frozenset({2, 3})).text()


# What this machine can run

_MEMORY_GIB = 3.0  # what Table 1 takes at the paper's full size
_INSTALL = "python -m pip install torch"
OK, MISSING, OPTIONAL = "ok", "missing", "optional"


@dataclass(frozen=True)
class Check:
    """One finding. "missing": the short profiles can't run; "optional": they can."""

    name: str
    status: str
    found: str
    remedy: str = ""


def _machine_shown(arguments: argparse.Namespace) -> int:
    """Exit status: 0 if the short profiles run here, else 1."""
    checks = list(examine(arguments.results))
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines += [f"{check.status:<9}{check.name:<{width}}  {check.found}"]
        lines += [f"{'':<{9 + width}}  -> {check.remedy}"] * bool(check.remedy)
    missing = [check.name for check in checks if check.status == MISSING]
    all_present = "this machine can run the smoke and short profiles"
    lines += ["", f"missing: {', '.join(missing)}" if missing else all_present]
    tell(arguments, checks, lambda: "\n".join(lines))
    return VERDICT_FAILED if missing else DONE


def _check(name: str, is_met: bool, found: str, remedy: str, status: str = MISSING) -> Check:
    return Check(name, OK, found) if is_met else Check(name, status, found, remedy)


def examine(results: Path) -> Iterator[Check]:
    """All findings, the needed ones first."""
    python = platform.python_version()
    yield _check("python", sys.version_info >= (3, 11), python, "install Python 3.11 or newer")
    wanted = gpu.declared()
    absent = gpu.absent(wanted)
    names, _, remedy = gpu.how_to_install(absent).partition(": ")
    yield _check("packages", not absent, names or f"all {len(wanted)} that the project needs", remedy)
    torch = gpu.ask_torch()
    if isinstance(torch, str):
        yield Check("torch", MISSING, torch, f"{_INSTALL}; for a build that fits your device see pytorch.org")
    else:
        build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU only"
        what = f"({build}), {torch['threads']} threads"
        if not torch["distributed"]:
            what = "built without torch.distributed"
        yield _check("torch", torch["distributed"], f"{torch['version']} {what}", _INSTALL)
    yield from _hardware()
    yield _results(results)
    gpus = torch["gpus"] if isinstance(torch, dict) else []
    found = f"{len(gpus)} x {gpus[0]}: the full profiles can run" if gpus else "none that torch sees"
    yield _check("gpus", bool(gpus), found, "only the full profiles need one", OPTIONAL)


def _hardware() -> Iterator[Check]:
    from gpipe_bench.harness.environment import environment

    try:
        here = environment()
    except ImportError as error:
        yield Check("machine", MISSING, f"can't be examined: {error}", "python -m pip install psutil")
        return
    cores = len(here["affinity"] or []) or here["cores_logical"]
    quota = here["cgroup_cpus"]
    limit = f", of which a quota allows {quota:g}" if quota is not None and quota < cores else ""
    yield Check("processor", OK, f"{here['cpu_model'] or here['architecture']}, {cores} cores{limit}")
    total = min(here["memory_total_gib"], here["cgroup_memory_gib"] or here["memory_total_gib"])
    free = min(here["memory_available_gib"], total)
    remedy = f"Table 1 takes up to {_MEMORY_GIB:g} GiB; close other programs, or run --profile smoke"
    yield _check("memory", free >= _MEMORY_GIB, f"{free:.1f} GiB free of {total:.1f} GiB", remedy)


def _results(folder: Path) -> Check:
    """Whether records can be written, tried with a real file."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as error:
        found = f"{folder}: {error.strerror or error}"
        return Check("results", MISSING, found, "choose another with --results DIR")
    free_gib = shutil.disk_usage(existing).free / 2**30
    return Check("results", OK, f"{folder} can be written, {free_gib:.1f} GiB free")

"""`list`: the experiments and how long each profile takes; `list --machine`: what this machine can run and
what it lacks; `list --models`: the model zoo.

Nothing but the standard library is imported before it is known what is asked: a machine that lacks a package
is to be told which.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.commands.output import DONE, tell, warn
from gpipe_bench.experiments.registry import EXPERIMENTS, load, program

if TYPE_CHECKING:
    from gpipe_bench.harness.experiment import Experiment
    from gpipe_bench.harness.store import Store


def options(verb: argparse.ArgumentParser) -> None:
    """Adds the verb's options to its parser."""
    verb.add_argument(
        "--models", action="store_true", help="instead the model zoo: layers and exact parameters"
    )
    verb.add_argument(
        "--machine",
        action="store_true",
        help="instead what this machine can run, what it lacks, and the remedy",
    )
    verb.add_argument(
        "--device", choices=("auto", "cuda"), default="auto",
        help="cuda, with --machine: what .ci/gpu would run here, how long each step takes and what it needs",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb; 1 where this machine lacks something."""
    if arguments.machine:
        from gpipe_bench.experiments.commands import machine

        return machine.run(arguments)
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
    """How many cases `run` would take from the records; expected seconds: the time that a case took here, at
    whichever revision, or its declared estimate.
    """
    from gpipe_bench.experiments.commands.run import usual_options
    from gpipe_bench.harness.experiment import RunOptions
    from gpipe_bench.harness.record import FINAL
    from gpipe_bench.harness.store import latest
    from gpipe_bench.harness.workers import sensible_jobs

    cases = experiment.cases(RunOptions(profile=profile))
    stored = latest(store.load(experiment.name).records)
    took = {
        record.label: record.duration_s
        for record in stored.values()
        if record.profile == profile and record.status == "done"
    }
    known = 0
    if any(case.label in took for case in cases):  # torch may have to be asked for a device
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
        lines += [
            fill(
                f"{each['cases']:>3} cases, {each['on_record']} on record: {each['does']}",
                f"  {each['profile']:<6} {words(each['expected_s']):>12}  ", " " * 23,
            )
            for each in entry["profiles"]
        ]  # fmt: skip
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, f"run one with: {program()} run NAME --profile PROFILE"])


def _zoo_text(found: Iterable[dict[str, Any]]) -> str:
    from gpipe_bench.harness.report.grid import Grid

    lines = [
        [
            row["model"],
            " ".join(f"{key}={value}" for key, value in row["configuration"].items()),
            row["layers"],
            f"{row['parameters']:,}",
        ]
        for row in found
    ]
    columns = ["model", "configuration", "layers", "parameters"]
    return Grid(columns=columns, lines=lines, right=frozenset({2, 3})).text()

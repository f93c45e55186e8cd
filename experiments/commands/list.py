"""`list`: the experiments and how long each profile takes; `list --models`: the model zoo."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from gpipe_bench.experiments.commands.output import DONE, tell, warn
from gpipe_bench.experiments.commands.run import usual_options
from gpipe_bench.experiments.registry import EXPERIMENTS, load, program
from gpipe_bench.harness.experiment import Experiment, RunOptions
from gpipe_bench.harness.record import FINAL
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.runner import words
from gpipe_bench.harness.store import Store, latest
from gpipe_bench.harness.workers import sensible_jobs


def options(verb: argparse.ArgumentParser) -> None:
    """Of the verb."""
    verb.add_argument(
        "--models", action="store_true", help="instead the model zoo: layers and exact parameters"
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb."""
    if arguments.models:
        from gpipe_bench.models.zoo import rows
    else:
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
    blocks = []
    for entry in entries:
        lines = [f"{entry['name']}: {entry['title']} ({entry['source']})"]
        lines += [
            f"  {each['profile']:<6} {words(each['expected_s']):>12}  "
            f"{each['cases']:>3} cases, {each['on_record']} on record: {each['does']}"
            for each in entry["profiles"]
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, f"run one with: {program()} run NAME --profile PROFILE"])


def _zoo_text(found: Iterable[dict[str, Any]]) -> str:
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

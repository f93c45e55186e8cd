"""Records for the tests of harness and command line."""

from __future__ import annotations

from typing import Any

from gpipe_bench.harness.experiment import Case, Experiment, RunOptions
from gpipe_bench.harness.record import SCHEMA, Metric, Record, Scalar


def record(step: Scalar = 1, **changes: Any) -> Record:
    """A finished case of the experiment "fake", with `changes`."""
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "experiment": "fake",
        "profile": "short",
        "case": {"step": step},
        "status": "done",
        "reason": "",
        "metrics": (metric(),),
        "details": {"stages": [1, 2]},
        "environment": {"cpu_model": "a processor"},
        "command": "python -m experiments run fake",
        "started_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 0.5,
    }
    return Record(**{**fields, **changes})


def ran(experiment: Experiment, key: dict[str, Scalar], profile: str = "short") -> Record:
    """Runs a case; returns its record."""
    found = experiment.run(Case(key), RunOptions(profile=profile))
    return record(
        experiment=experiment.name, profile=profile, case=key, status=found.status, reason=found.reason,
        metrics=found.metrics, details=found.details,
    )  # fmt: skip


def all_ran(experiment: Experiment, **wanted: Scalar) -> list[Record]:
    """Runs the cases of the short profile with these values; returns their records."""
    keys = [case.key for case in experiment.cases(RunOptions())]
    return [ran(experiment, key) for key in keys if wanted.items() <= key.items()]


def metric(value: float | int | None = 1.5, **changes: Any) -> Metric:
    """A measured time, with `changes`."""
    fields: dict[str, Any] = {"name": "time", "value": value, "unit": "s", "provenance": "measured"}
    return Metric(**{**fields, **changes})

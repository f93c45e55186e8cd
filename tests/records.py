"""Records for the tests of harness and command line."""

from __future__ import annotations

from typing import Any

from gpipe_bench.harness.records.record import SCHEMA, Quantity, Record, Scalar


def record(step: Scalar = 1, **changes: Any) -> Record:
    """A finished case of the experiment "fake", with whatever is to differ."""
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "experiment": "fake",
        "profile": "short",
        "case": {"step": step},
        "status": "done",
        "reason": "",
        "quantities": (quantity(),),
        "details": {"stages": [1, 2]},
        "environment": {"cpu_model": "a processor"},
        "command": "python -m experiments run fake",
        "started_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 0.5,
    }
    return Record(**{**fields, **changes})


def quantity(value: float | int | None = 1.5, **changes: Any) -> Quantity:
    """A measured time, with whatever is to differ."""
    fields: dict[str, Any] = {"name": "time", "value": value, "unit": "s", "provenance": "measured"}
    return Quantity(**{**fields, **changes})

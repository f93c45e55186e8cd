"""What a guard run measured, in the formats that trend tools read.

A trend over months is for looking at, never for failing a change; so nothing here is read back by the guard.
github-action-benchmark takes a list of {name, unit, value} ("customBiggerIsBetter"); Bencher an object of
measures by benchmark; pytest-benchmark a folder of numbered files, as its own `--benchmark-autosave` leaves
there. The speed of this machine is in all; that relative to the base, which machines share, in the first two.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gpipe_bench.harness.guard.judge import Judgement
from gpipe_bench.harness.records.files import write_whole


@dataclass(frozen=True)
class Entry:
    """One benchmark's last run: what it is, what was judged, seconds per step of every sample of the head."""

    name: str
    describe: str
    judgement: Judgement
    samples_s: tuple[float, ...]
    repeats: int  # steps per sample


@dataclass(frozen=True)
class Commit:
    """The code that was measured."""

    id: str
    dirty: bool
    branch: str


def github(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """github-action-benchmark, tool `customBiggerIsBetter`: two series per benchmark."""
    found = []
    for entry in entries:
        judged = entry.judgement
        low, high = 1 / (1 + judged.head.high), 1 / (1 + judged.head.low)
        extra = f"{entry.describe}\nverdict: {judged.verdict} after {judged.rounds} rounds"
        rates = [1 / sample for sample in entry.samples_s]
        found += [
            {
                "name": entry.name, "unit": "steps/s", "value": statistics.median(rates),
                "range": f"± {_spread(rates):.3g}", "extra": extra,
            },
            {
                "name": f"{entry.name} against its base", "unit": "x", "value": 1 / (1 + judged.head.value),
                "range": f"{low:.4f} to {high:.4f}", "extra": extra,
            },
        ]  # fmt: skip
    return found


def bencher(entries: Sequence[Entry]) -> dict[str, dict[str, dict[str, float]]]:
    """Bencher Metric Format: its own measure `latency`, in nanoseconds, and the time against the base's."""
    found = {}
    for entry in entries:
        head, ordered = entry.judgement.head, sorted(1e9 * sample for sample in entry.samples_s)
        found[entry.name] = {
            "latency": {
                "value": statistics.median(ordered), "lower_value": ordered[0], "upper_value": ordered[-1],
            },
            "time-against-base": {
                "value": 1 + head.value, "lower_value": 1 + head.low, "upper_value": 1 + head.high,
            },
        }  # fmt: skip
    return found


def pytest_benchmark(entries: Sequence[Entry], commit: Commit, now: datetime) -> dict[str, Any]:
    """The content of one file of pytest-benchmark's storage."""
    return {
        "machine_info": {
            "node": platform.node(),
            "processor": platform.processor(),
            "machine": platform.machine(),
            "python_implementation": platform.python_implementation(),
            "python_version": platform.python_version(),
            "release": platform.release(),
            "system": platform.system(),
            "cpu": {},
        },
        "commit_info": {"id": commit.id, "dirty": commit.dirty, "branch": commit.branch, "project": "guard"},
        "benchmarks": [
            {
                "group": "guard",
                "name": entry.name,
                "fullname": f"guard::{entry.name}",
                "params": None,
                "param": None,
                "extra_info": {
                    "describe": entry.describe,
                    "verdict": entry.judgement.verdict,
                    "head_against_base": entry.judgement.head.value,
                },
                "options": {
                    "disable_gc": False, "timer": "perf_counter", "min_rounds": len(entry.samples_s),
                    "max_time": 0.0, "min_time": 0.0, "warmup": True,
                },
                "stats": stats(entry.samples_s, entry.repeats),
            }
            for entry in entries
        ],
        "datetime": now.isoformat(),
        "version": "5.1.0",
    }  # fmt: skip


def stats(samples_s: Sequence[float], repeats: int) -> dict[str, Any]:
    """pytest-benchmark's statistics of two or more samples, each the mean of `repeats` steps, in s."""
    ordered = sorted(samples_s)
    mean, deviation = statistics.fmean(ordered), statistics.stdev(ordered)
    q1, median, q3 = statistics.quantiles(ordered, method="inclusive")
    iqr = q3 - q1
    outside = [s for s in ordered if not q1 - 1.5 * iqr <= s <= q3 + 1.5 * iqr]
    far = [s for s in ordered if abs(s - mean) > deviation]
    inside = [s for s in ordered if q1 - 1.5 * iqr <= s <= q3 + 1.5 * iqr]
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": deviation,
        "rounds": len(ordered),
        "median": median,
        "iqr": iqr,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": len(outside),
        "stddev_outliers": len(far),
        "outliers": f"{len(far)};{len(outside)}",
        "ld15iqr": inside[0],
        "hd15iqr": inside[-1],
        "ops": 1 / mean,
        "total": math.fsum(ordered),
        "iterations": repeats,
        "data": list(samples_s),
    }


def save(folder: Path, entries: Sequence[Entry], commit: Commit, now: datetime) -> list[Path]:
    """Writes all: `github.json` and `bencher.json`, which their tools read after every run and append by
    themselves, and the next numbered file of pytest-benchmark's storage, which grows. Raises ValueError where
    the folder can't be written.
    """
    system = (
        f"{platform.system()}-{platform.python_implementation()}-{_version()}-{platform.architecture()[0]}"
    )
    storage = folder / system
    try:
        number = (
            max((int(path.name[:4]) for path in storage.glob("[0-9][0-9][0-9][0-9]_*.json")), default=0) + 1
        )
        dirty = "_uncommitted" if commit.dirty else ""
        run = storage / f"{number:04}_{commit.id[:12] or 'unversioned'}_{now:%Y%m%d_%H%M%S}{dirty}.json"
        latest = [folder / "github.json", folder / "bencher.json"]
        _write(run, pytest_benchmark(entries, commit, now))
        _write(latest[0], github(entries))
        _write(latest[1], bencher(entries))
    except OSError as error:
        raise ValueError(f"the history can't be written to {folder}: {error}") from error
    return [*latest, run]


def _write(path: Path, content: Mapping[str, Any] | Sequence[Any]) -> None:
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _version() -> str:
    major, minor, _ = platform.python_version_tuple()
    return f"{major}.{minor}"


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0

"""What a guard run measured, as github-action-benchmark reads it: a list of {name, unit, value}.

A trend over months is for looking at, never for failing a change; so nothing here is read back by the guard.
Other tools (Bencher, pytest-benchmark's storage) get the same from `--json` in a few lines.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpipe_bench.harness.guard.judge import Judgement
from gpipe_bench.harness.store import write_whole


@dataclass(frozen=True)
class Entry:
    """One benchmark's last run: what it is, what was judged, seconds per step of every sample of the head."""

    name: str
    describe: str
    judgement: Judgement
    samples_s: tuple[float, ...]


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


def save(folder: Path, entries: Sequence[Entry]) -> Path:
    """Writes `github.json`, which the tool reads after every run and appends by itself; the path.

    Raises ValueError where the folder can't be written.
    """
    path = folder / "github.json"
    try:
        write_whole(path, json.dumps(github(entries), indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ValueError(f"the history can't be written to {folder}: {error}") from error
    return path


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0

"""How often the guard cries wolf, and how often it sees the wolf, on this machine as busy as it is.

    python -m experiments.guard_trials                   # go on with the trials; may be stopped at any time
    python -m experiments.guard_trials --seconds 200     # begin no further trial after that
    python -m experiments.guard_trials --summary         # what the records say

A trial is a guard run on one benchmark; the benchmarks take turns. Both arms are the same commit: in trials
of kind "same" they are identical, in those of kind "slower" the head's engine stays busy for another tenth of
every step. One line of JSON per finished trial; those on record are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.guard_benchmarks import BENCHMARKS
from experiments.guard_run import guard
from harness.guard_process import terminate_like_interrupt
from harness.guard_tree import base_tree

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "results" / "guard" / "trials.jsonl"
TRIALS = {"same": 40, "slower": 20}
SLOW_DOWN = {"same": 0.0, "slower": 0.10}
BUDGET_S = 120.0  # of one trial


def plan() -> Iterator[tuple[str, int, str]]:
    """(kind, number, benchmark) of every trial, the kinds mixed: stopping early leaves some of each."""
    names = list(BENCHMARKS)
    numbers = dict.fromkeys(TRIALS, 0)
    while any(numbers[kind] < count for kind, count in TRIALS.items()):
        # The kind that is furthest behind its share.
        kind = min(TRIALS, key=lambda each: numbers[each] / TRIALS[each])
        yield kind, numbers[kind], names[numbers[kind] % len(names)]
        numbers[kind] += 1


def load(path: Path) -> list[dict[str, Any]]:
    """The records; a last line that was cut off is not one."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if line.endswith("\n"):
                raise ValueError(f"{path}:{number}: no JSON ({error}); remove the line") from error
    return records


def trial(kind: str, number: int, benchmark: str, tree: Path, commit: str) -> dict[str, Any]:
    """Runs one trial; its record."""
    started = datetime.now(UTC)
    begin_s, load_before = time.monotonic(), os.getloadavg()[0]
    seed = 1000 * number + (kind == "slower")
    (finding,) = guard(tree, tree, [benchmark], seed, budget_s=BUDGET_S, slow_down=SLOW_DOWN[kind])
    return {
        "kind": kind,
        "number": number,
        "benchmark": benchmark,
        "slow_down": SLOW_DOWN[kind],
        "confirmed": finding.confirmed,
        "runs": [asdict(run) for run in finding.runs],
        "notes": finding.notes,
        "commit": commit,
        "started_at": started.isoformat(timespec="seconds"),
        "duration_s": round(time.monotonic() - begin_s, 2),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }


def append(path: Path, record: Mapping[str, Any]) -> None:
    """One line, on disk before the next trial begins; what a crash left of a line is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    whole = before[: before.rfind(b"\n") + 1]
    with path.open("r+b" if before else "wb") as file:
        file.truncate(len(whole))
        file.seek(len(whole))
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """How many trials there are, false alarms and power with exact 95 % intervals, how the runs were."""
    lines = []
    for kind, wanted in TRIALS.items():
        found = [record for record in records if record["kind"] == kind]
        lines.append(f"{kind}: {len(found)} of {wanted} trials")
        if not found:
            continue
        runs = [run for record in found for run in record["runs"]]
        any_regression = sum("regression" in [run["verdict"] for run in each["runs"]] for each in found)
        confirmed = sum(each["confirmed"] for each in found)
        lines.append(f"  a run said regression: {rate(any_regression, len(found))}")
        lines.append(f"  confirmed, which fails: {rate(confirmed, len(found))}")
        for name in BENCHMARKS:
            of_name = [each for each in found if each["benchmark"] == name]
            hits = sum(each["confirmed"] for each in of_name)
            lines.append(f"    {name}: {hits} of {len(of_name)}")
        verdicts = Counter(run["verdict"] for run in runs)
        lines.append(f"  {len(runs)} runs: " + ", ".join(f"{n} {v}" for v, n in verdicts.most_common()))
        lines.append(
            f"  seconds per trial: median {_median(found, 'duration_s'):.0f}, "
            f"most {max(each['duration_s'] for each in found):.0f}; "
            f"load average of {found[-1]['cores']} cores: {_median(found, 'load_after'):.1f}"
        )
        lines.append(
            f"  half-width of a run's interval: median "
            f"{sorted((run['head']['high'] - run['head']['low']) / 2 for run in runs)[len(runs) // 2]:.1%}"
        )
    return "\n".join(lines)


def rate(hits: int, trials: int) -> str:
    """`1 of 40 (2.5 %, 95 % interval 0.1 to 13.2 %)`, Clopper and Pearson's."""
    from scipy.stats import binomtest

    interval = binomtest(hits, trials).proportion_ci(0.95, method="exact")
    return (
        f"{hits} of {trials} ({hits / trials:.1%}, 95 % interval {interval.low:.1%} to {interval.high:.1%})"
    )


def _median(records: Sequence[Mapping[str, Any]], name: str) -> float:
    values = sorted(float(record[name]) for record in records)
    return values[len(values) // 2]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.guard_trials", description=__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args(arguments)
    if options.summary:
        print(summary(load(options.records)))
        return 0
    end_s = time.monotonic() + options.seconds
    done = {(record["kind"], record["number"]) for record in load(options.records)}
    with terminate_like_interrupt(), base_tree(ROOT, "HEAD") as tree:
        for kind, number, benchmark in plan():
            if (kind, number) in done:
                continue
            if time.monotonic() > end_s:
                break
            record = trial(kind, number, benchmark, tree.path, tree.commit)
            append(options.records, record)
            verdicts = " ".join(run["verdict"] for run in record["runs"])
            print(f"{kind} {number} {benchmark}: {verdicts} ({record['duration_s']} s)", flush=True)
    print(summary(load(options.records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How often the guard cries wolf, and how often it sees the wolf, on this machine as busy as it is.

    python -m gpipe_bench.experiments.guard.trials                 # go on; may be stopped at any time
    python -m gpipe_bench.experiments.guard.trials --seconds 200   # begin no further trial after that
    python -m gpipe_bench.experiments.guard.trials --summary       # what the records say
    python -m gpipe_bench.experiments.guard.trials --write-docs    # the same, into docs/guard.md

A trial is a guard run on one benchmark, as `guard --only NAME` makes it; the benchmarks take turns. In trials
of this project both arms are the same commit: in those of kind "same" they are identical, in those of kind
"slower" the head's engine stays busy for another tenth of every step. In trials of another repository
(`scene`) its owner has committed since: nothing, or an engine that takes a tenth longer. One line of JSON per
finished trial; those on record are not run again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpipe_bench.experiments.guard import scene
from gpipe_bench.experiments.guard.benchmarks import BENCHMARKS
from gpipe_bench.experiments.guard.run import BUDGET_S, Finding, guard
from gpipe_bench.experiments.guard.subject import repository
from gpipe_bench.harness.guard.tree import base_tree
from gpipe_bench.harness.places import PUBLISHED, ROOT
from gpipe_bench.harness.trials import Series, rate, timed

TRIALS = {"same": 40, "slower": 20, "other repository, same": 20, "other repository, slower": 8}
SLOW_DOWN = {"same": 0.0, "slower": 0.10, "other repository, same": 0.0, "other repository, slower": 0.10}
ELSEWHERE = ("other repository, same", "other repository, slower")
Which = tuple[str, int, str]  # kind, number, benchmark


def plan() -> Iterator[Which]:
    """(kind, number, benchmark) of every trial, the kinds mixed: stopping early leaves some of each."""
    numbers = dict.fromkeys(TRIALS, 0)
    while any(numbers[kind] < count for kind, count in TRIALS.items()):
        # The kind that is furthest behind its share.
        kind = min(TRIALS, key=lambda each: numbers[each] / TRIALS[each])
        yield kind, numbers[kind], _benchmark(numbers[kind])
        numbers[kind] += 1


def _benchmark(number: int) -> str:
    names = list(BENCHMARKS)
    return names[number % len(names)]


def trial(kind: str, number: int, benchmark: str, tree: Path, commit: str) -> dict[str, Any]:
    """Runs one trial; its record."""

    def found() -> dict[str, Any]:
        seed = 1000 * number + list(TRIALS).index(kind)
        if kind in ELSEWHERE:
            finding = _elsewhere(benchmark, seed, SLOW_DOWN[kind])
        else:
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
        }

    return timed(found)


def _elsewhere(benchmark: str, seed: int, slow_down: float) -> Finding:
    """The guard in a repository of somebody else, whose last commit slows the engine down by that share."""
    with TemporaryDirectory() as folder:
        theirs = scene.make(Path(folder) / "theirs")
        scene.slow_down(theirs, slow_down)
        scene.commit(theirs, "one more commit")
        subject = repository(theirs, scene.ENGINE, None, ())
        with base_tree(subject.root, "HEAD~1") as base:
            (finding,) = guard(
                base.path, subject.root, [benchmark], seed, budget_s=BUDGET_S,
                benchmarks=subject.benchmarks, program=subject.program,
            )  # fmt: skip
    return finding


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
        told = ", ".join(f"{n} {v}" for v, n in verdicts.most_common())
        confidences = " or ".join(f"{each:.1%}" for each in sorted({run["confidence"] for run in runs}))
        lines.append(f"  {len(runs)} runs, of which a look has {confidences}: {told}")
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


def _median(records: Sequence[Mapping[str, Any]], name: str) -> float:
    values = sorted(float(record[name]) for record in records)
    return values[len(values) // 2]


@contextmanager
def _ready() -> Iterator[Callable[[Which], dict[str, Any]]]:
    with base_tree(ROOT, "HEAD") as tree:
        yield lambda which: trial(*which, tree.path, tree.commit)


def _said(record: Mapping[str, Any]) -> str:
    verdicts = " ".join(run["verdict"] for run in record["runs"])
    return f"{record['kind']} {record['number']} {record['benchmark']}: {verdicts}"


SERIES = Series(
    program="gpipe_bench.experiments.guard.trials",
    about=__doc__ or "",
    records=PUBLISHED / "guard" / "trials.jsonl",
    docs=ROOT / "docs" / "guard.md",
    plan=plan,
    which=lambda record: (record["kind"], record["number"], _benchmark(record["number"])),
    ready=_ready,
    said=_said,
    summary=summary,
)

if __name__ == "__main__":
    sys.exit(SERIES.main())

"""How often the guard cries wolf, and how often it sees the wolf, on this machine as busy as it is.

    python tests/guard_trials.py                 go on; may be stopped at any time
    python tests/guard_trials.py --seconds 200   begin no further trial after that
    python tests/guard_trials.py --summary       what the records say
    python tests/guard_trials.py --write-docs    the same, into docs/guard.md

A trial is a guard run on one benchmark, as `guard --only NAME` makes it; the benchmarks take turns. In trials
of this project both arms are the same commit: in those of kind "same" they are identical, in those of kind
"slower" the head's engine stays busy for another tenth of every step. In trials of another repository
(`their_repository.py`) its owner has committed since: nothing, or an engine that takes a tenth longer. In
trials of a command that is a program in C, which prints what it counted with noise of 5 % a run: seeded, so
that the machine has no part in it. One line of JSON per finished trial; those on record are not run again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import their_repository
from trials import Series, rate, timed

from gpipe_bench.experiments.guard.arms import base_tree, repository, this_project
from gpipe_bench.experiments.guard.command import Command
from gpipe_bench.experiments.guard.run import Finding, guard
from gpipe_bench.experiments.guard.worker import BENCHMARKS
from gpipe_bench.harness import PUBLISHED, ROOT

TRIALS = {
    "same": 40, "slower": 20, "other repository, same": 20, "other repository, slower": 8,
    "command in C, same": 20, "command in C, slower": 8,
}  # fmt: skip
SLOW_DOWN = 0.10
Which = tuple[str, int, str]  # kind, number, benchmark

# After the engine's actions it stays busy for that share of the time they took.
_SLOW = """

def run(*arguments, _run=run, **options):
    from time import perf_counter
    begin_s = perf_counter()
    _run(*arguments, **options)
    end_s = perf_counter() + {share} * (perf_counter() - begin_s)
    while perf_counter() < end_s:
        pass
"""


def slow_down(tree: Path, share: float) -> None:
    """From here on a revision of this project is slower by that share of its engine's time."""
    with (tree / "pipeline" / "step.py").open("a", encoding="utf-8") as file:
        file.write(_SLOW.format(share=share))


def plan() -> Iterator[Which]:
    """(kind, number, benchmark) of every trial, the kinds mixed: stopping early leaves some of each."""
    numbers = dict.fromkeys(TRIALS, 0)
    while any(numbers[kind] < count for kind, count in TRIALS.items()):
        # The kind that is furthest behind its share.
        kind = min(TRIALS, key=lambda each: numbers[each] / TRIALS[each])
        yield kind, numbers[kind], _benchmark(numbers[kind])
        numbers[kind] += 1


def _benchmark(number: int) -> str:
    return list(BENCHMARKS)[number % len(BENCHMARKS)]


@contextmanager
def ready() -> Iterator[Callable[[Which], dict[str, Any]]]:
    """What runs a trial, with a checkout of HEAD and another one whose engine is slower."""
    with base_tree(ROOT, "HEAD") as tree, base_tree(ROOT, "HEAD") as slower:
        slow_down(slower.path, SLOW_DOWN)
        heads = {"same": tree.path, "slower": slower.path}

        def run(which: Which) -> dict[str, Any]:
            kind, number, benchmark = which
            seed = 1000 * number + list(TRIALS).index(kind)
            slow = SLOW_DOWN if "slower" in kind else 0.0

            def found() -> dict[str, Any]:
                if kind in heads:
                    subject = replace(this_project(), root=heads[kind])
                    (finding,) = guard(subject, tree.path, [benchmark], seed)
                elif "command" in kind:
                    finding = in_c(seed, slow)
                else:
                    finding = elsewhere(benchmark, seed, slow)
                return {
                    "kind": kind, "number": number, "benchmark": finding.benchmark.partition(" ")[0],
                    "slow_down": slow,
                    "confirmed": finding.confirmed, "runs": [asdict(each) for each in finding.runs],
                    "notes": finding.notes, "commit": tree.commit,
                }  # fmt: skip

            return timed(found)

        yield run


def elsewhere(benchmark: str, seed: int, share: float) -> Finding:
    """The guard in a repository of somebody else, whose last commit slows the engine down by that share."""
    with TemporaryDirectory() as folder:
        theirs = their_repository.make(Path(folder) / "theirs")
        their_repository.slow_down(theirs, share)
        their_repository.commit(theirs, "one more commit")
        subject = repository(theirs, their_repository.ENGINE, None, ())
        with base_tree(subject.root, "HEAD~1") as base:
            (finding,) = guard(subject, base.path, [benchmark], seed)
    return finding


def in_c(seed: int, share: float) -> Finding:
    """The guard in a repository of a program in C, whose last commit makes it count more by that share."""
    with TemporaryDirectory() as folder:
        theirs = their_repository.make_counter(Path(folder) / "theirs")
        their_repository.count_more(theirs, share)
        counted = Path(folder) / "counted"  # one for all arms, so that every run has noise of its own
        counted.write_text(str(1_000_000 * seed))
        command = Command(f"./work {counted}")
        subject = repository(theirs, "", None, (), "make", command)
        with base_tree(theirs, "HEAD~1") as base, base_tree(theirs, "HEAD~1") as control:
            for tree in (base.path, control.path, theirs):
                subject.prepare(tree, str(tree))
            (finding,) = guard(subject, base.path, [command.name], seed, control=control.path)
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
            if not (of_name := [each for each in found if each["benchmark"] == name]):
                continue
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


def brief(records: Sequence[Mapping[str, Any]]) -> str:
    """How often it failed, for each kind."""
    lines = ["| trials | the guard failed | longest |", "|---|---|---|"]
    for kind in TRIALS:
        found = [record for record in records if record["kind"] == kind]
        if not found:
            continue
        failed = rate(sum(record["confirmed"] for record in found), len(found))
        lines.append(f"| {kind} | {failed} | {max(each['duration_s'] for each in found):.0f} s |")
    return "\n".join(lines)


def _median(records: Sequence[Mapping[str, Any]], name: str) -> float:
    values = sorted(float(record[name]) for record in records)
    return values[len(values) // 2]


def said(record: Mapping[str, Any]) -> str:
    """Of a record, on a terminal."""
    verdicts = " ".join(run["verdict"] for run in record["runs"])
    return f"{record['kind']} {record['number']} {record['benchmark']}: {verdicts}"


SERIES = Series(
    program="python tests/guard_trials.py",
    about=__doc__ or "",
    records=PUBLISHED / "guard" / "trials.jsonl",
    docs=ROOT / "docs" / "guard.md",
    plan=plan,
    which=lambda record: (record["kind"], record["number"], _benchmark(record["number"])),
    ready=ready,
    said=said,
    summary=summary,
    brief=brief,
)

if __name__ == "__main__":
    sys.exit(SERIES.main())

"""`guard`: exact counters against the committed file, and timed benchmarks against a base revision.

Exit status 0: counters equal and no confirmed regression; 1: counters differ or a regression was confirmed;
2: bad usage; 3: a benchmark failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import print_line
from gpipe_bench.experiments.guard.benchmarks import BENCHMARKS
from gpipe_bench.experiments.guard.run import Finding, guard
from gpipe_bench.experiments.guard.text import conclusion, table
from gpipe_bench.experiments.registry import suggestion
from gpipe_bench.harness.guard.counters import differences, encode, load
from gpipe_bench.harness.guard.process import WorkerError, terminate_like_interrupt
from gpipe_bench.harness.guard.tree import Base, base_tree
from gpipe_bench.harness.places import PUBLISHED, ROOT
from gpipe_bench.harness.records.environment import code_state
from gpipe_bench.harness.records.files import write_whole

COUNTERS = PUBLISHED / "guard" / "counters.json"
SEED = 1811


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError for bad usage."""
    names = selected(arguments.only)
    if arguments.budget_s <= 0:
        raise ValueError(f"--budget-s is {arguments.budget_s:g}; give seconds, such as 150")
    if arguments.history is not None and arguments.base is None:
        raise ValueError("--history keeps what was timed; give a revision to compare with, --base REF")
    say = _teller(arguments.json)
    try:
        with terminate_like_interrupt():
            status = check_counters(arguments, say)
            if arguments.base is not None:
                status = max(status, check_time(arguments, names, say))
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        annotate("error", str(error).splitlines()[0])
        return exits.CASE_FAILED
    say("guard: passed" if status == exits.DONE else "guard: FAILED")
    return status


def selected(only: Sequence[str]) -> list[str]:
    """The benchmarks asked for, all without a choice. Raises ValueError for an unknown one."""
    for name in only:
        if name not in BENCHMARKS:
            close = suggestion(name, BENCHMARKS)
            raise ValueError(f"unknown benchmark {name!r}{close}; known: {', '.join(BENCHMARKS)}")
    return [name for name in BENCHMARKS if name in only or not only]


def check_counters(arguments: argparse.Namespace, say: Any) -> int:
    """The first tier."""
    import torch

    from gpipe_bench.experiments.guard.counters import content

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = content()
    finally:
        torch.set_num_threads(threads)
    if arguments.update:
        try:
            write_whole(COUNTERS, encode(found))
        except OSError as error:
            raise ValueError(f"{COUNTERS} can't be written: {error}") from error
        say(f"counters: wrote {COUNTERS.relative_to(ROOT)}; commit it with the reason for the change")
    expected = load(COUNTERS)
    problems = differences(expected.get("counters", {}), found["counters"])
    problems += benchmark_changes(expected.get("benchmarks", []), found["benchmarks"])
    if arguments.json:
        for problem in problems:
            print_line(msgspec.json.encode({"tier": "counters", "problem": problem}))
    if not problems:
        say(f"counters: {len(found['counters'])} cases equal {COUNTERS.relative_to(ROOT)}")
        return exits.DONE
    say(f"counters: differ from {COUNTERS.relative_to(ROOT)}, be it for the better:")
    for problem in problems:
        say(f"  {problem}")
        annotate("error", problem)
    say("the file as it would be now (--update writes it; commit it with the reason for the change):\n")
    say(encode(found))
    return exits.VERDICT_FAILED


def benchmark_changes(expected: Sequence[str], found: Sequence[str]) -> list[str]:
    """What is timed is part of the file too: a benchmark must not vanish unnoticed."""
    lines = [f"benchmark {name}: missing, but in the file" for name in expected if name not in found]
    return lines + [f"benchmark {name}: new, not in the file" for name in found if name not in expected]


def check_time(arguments: argparse.Namespace, names: Sequence[str], say: Any) -> int:
    """The second tier, and the third where a history is kept."""
    with base_tree(ROOT, arguments.base) as base:
        refuse_vanished(base, arguments.removed)
        state = code_state(ROOT)
        changed = ", with uncommitted changes" if state["git_dirty"] else ""
        say(
            f"base: {base.commit[:12]}, where HEAD left {base.ref}; "
            f"head: {(state['git_commit'] or '')[:12]}{changed}"
        )
        if base.commit == state["git_commit"] and not state["git_dirty"]:
            say("both are the same code: any difference is noise")
        findings = guard(base.path, ROOT, names, SEED, budget_s=arguments.budget_s, tell=say)
    say(f"\n{table(findings)}\n")
    for finding in findings:
        say(conclusion(finding))
        if finding.confirmed:
            annotate("error", conclusion(finding))
        elif finding.verdicts[-1] != "same" or finding.notes:
            annotate("warning", conclusion(finding))
    if arguments.json:
        for finding in findings:
            print_line(msgspec.json.encode({"tier": "time", "base": base.commit, **as_data(finding)}))
    if arguments.history is not None:
        for path in save_history(arguments.history, findings):
            say(f"history: {path}")
    return exits.VERDICT_FAILED if any(finding.confirmed for finding in findings) else exits.DONE


def refuse_vanished(base: Base, removed: Sequence[str]) -> None:
    """Raises ValueError for benchmarks that the base has and the working tree has lost."""
    path = base.path / COUNTERS.relative_to(ROOT)
    known = load(path).get("benchmarks", []) if path.exists() else []
    lost = [name for name in known if name not in BENCHMARKS and name not in removed]
    if lost:
        options = " ".join(f"--removed {name}" for name in lost)
        raise ValueError(
            f"the base has benchmarks that are gone: {', '.join(lost)}; if that is intended, say {options}"
        )


def as_data(finding: Finding) -> dict[str, Any]:
    """A finding as plain data."""
    runs = [
        {
            **asdict(each),
            "noise_floor": each.noise_floor,
            "smallest_detectable": each.smallest_detectable,
        }
        for each in finding.runs
    ]
    return {
        "benchmark": finding.benchmark, "confirmed": finding.confirmed, "notes": finding.notes, "runs": runs,
    }  # fmt: skip


def save_history(folder: Path, findings: Sequence[Finding]) -> list[Path]:
    """Writes what was measured for trend tools; the paths."""
    from datetime import UTC, datetime

    from gpipe_bench.harness.guard.history import Commit, Entry, save

    state = code_state(ROOT)
    entries = [
        Entry(
            finding.benchmark, BENCHMARKS[finding.benchmark].describe, finding.runs[-1],
            tuple(finding.samples_s), finding.repeats,
        )
        for finding in findings
    ]  # fmt: skip
    branch = os.environ.get("GITHUB_HEAD_REF") or os.environ.get("GITHUB_REF_NAME") or ""
    commit = Commit(state["git_commit"] or "", bool(state["git_dirty"]), branch)
    return save(folder, entries, commit, datetime.now(UTC))


def _teller(is_json: bool) -> Any:
    """Prints for people; under --json not between the lines that a program reads."""

    def say(line: str) -> None:
        print(line, file=sys.stderr if is_json else sys.stdout, flush=True)

    return say


def annotate(level: str, text: str) -> None:
    """Marks a line for GitHub's summary of the run; nothing anywhere else."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        line = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        print(f"::{level} title=guard::{line}", file=sys.stderr, flush=True)

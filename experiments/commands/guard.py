"""`guard`: exact counters against the committed file, and timed benchmarks against a base revision.

With `--repo` the benchmarks alone, of an engine or of functions in another repository. Exit status 0:
counters equal and no confirmed regression, also where nothing could be told (1 with
`--require-conclusive`); 1: counters differ or a regression was confirmed; 2: bad usage; 3: a benchmark
failed.
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
from gpipe_bench.experiments.guard.run import Finding, guard
from gpipe_bench.experiments.guard.subject import Subject, repository, this_project
from gpipe_bench.experiments.guard.text import conclusion, ending, markdown, table, untold
from gpipe_bench.experiments.registry import suggestion
from gpipe_bench.harness.environment import code_state
from gpipe_bench.harness.guard.counters import differences, encode, load
from gpipe_bench.harness.guard.process import WorkerError
from gpipe_bench.harness.guard.tree import Base, base_tree, check_place, top_of
from gpipe_bench.harness.places import PUBLISHED, ROOT
from gpipe_bench.harness.report.width import fitted
from gpipe_bench.harness.store import write_whole

COUNTERS = PUBLISHED / "guard" / "counters.json"
SEED = 1811


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError for bad usage."""
    if arguments.budget_s <= 0:
        raise ValueError(f"--budget-s is {arguments.budget_s:g}; give seconds, such as 150")
    for option in ("history", "markdown"):
        if getattr(arguments, option) is not None and arguments.base is None:
            raise ValueError(f"--{option} keeps what was timed; give a revision to compare with, --base REF")
    if arguments.require_conclusive and arguments.base is None:
        raise ValueError("--require-conclusive is about what is timed; give a revision, --base REF")
    say = _teller(arguments.json)
    status, findings = exits.DONE, []
    try:
        subject = subject_of(arguments)
        names = selected(arguments.only, subject)
        if subject.is_own:
            status = check_counters(arguments, say)
        if arguments.base is not None:
            findings = check_time(arguments, subject, names, say)
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        annotate("error", str(error).splitlines()[0])
        return exits.CASE_FAILED
    if any(finding.confirmed for finding in findings):
        status = exits.VERDICT_FAILED
    last = ending(status != exits.DONE, findings)
    if status == exits.DONE and arguments.require_conclusive and untold(findings):
        status = exits.VERDICT_FAILED
        last += "; that is a failure, by --require-conclusive"
    say(last)
    if arguments.markdown is not None:
        append_text(arguments.markdown, markdown(findings, last))
    return status


def subject_of(arguments: argparse.Namespace) -> Subject:
    """What is to be measured. Raises ValueError where that is not clear, or nothing is."""
    theirs = ("engine", "benchmarks", "path", "build")
    if arguments.repo is None:
        for option in theirs:
            if getattr(arguments, option):
                raise ValueError(
                    f"--{option} is about another repository; name it: --repo DIR (. for the one here)"
                )
        check_place(ROOT, "experiments/commands/guard.py", Path.cwd())
        return this_project()
    for option, said in (("update", arguments.update), ("removed", arguments.removed)):
        if said:
            raise ValueError(f"--{option} is about this project's own counters, not about --repo")
    if arguments.base is None:
        raise ValueError("--repo times a repository against one of its revisions; give it, --base REF")
    return repository(
        arguments.repo, arguments.engine or "", arguments.benchmarks, arguments.path, arguments.build or ""
    )


def selected(only: Sequence[str], subject: Subject) -> list[str]:
    """The benchmarks asked for, all without a choice. Raises ValueError for an unknown one."""
    for name in only:
        if name not in subject.benchmarks:
            close = suggestion(name, subject.benchmarks)
            raise ValueError(f"unknown benchmark {name!r}{close}; known: {', '.join(subject.benchmarks)}")
    return [name for name in subject.benchmarks if name in only or not only]


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
    say(encode(found), whole=True)
    return exits.VERDICT_FAILED


def benchmark_changes(expected: Sequence[str], found: Sequence[str]) -> list[str]:
    """What is timed is part of the file too: a benchmark must not vanish unnoticed."""
    lines = [f"benchmark {name}: missing, but in the file" for name in expected if name not in found]
    return lines + [f"benchmark {name}: new, not in the file" for name in found if name not in expected]


def check_time(
    arguments: argparse.Namespace, subject: Subject, names: Sequence[str], say: Any
) -> list[Finding]:
    """The second tier, and the third where a history is kept."""
    with base_tree(subject.root, arguments.base) as base:
        if subject.is_own:
            refuse_vanished(base, arguments.removed)
        state = code_state(top_of(subject.root) or subject.root)
        changed = ", with uncommitted changes" if state["git_dirty"] else ""
        say(
            f"base: {base.commit[:12]}, where HEAD left {base.ref}; "
            f"head: {(state['git_commit'] or '')[:12]}{changed}"
        )
        if base.commit == state["git_commit"] and not state["git_dirty"]:
            say("both are the same code: any difference is noise")
        subject.prepare(base.path)
        findings = guard(
            base.path, subject.root, names, SEED, budget_s=arguments.budget_s,
            benchmarks=subject.benchmarks, program=subject.program, tell=say,
        )  # fmt: skip
    if not any(finding.runs for finding in findings):
        reasons = "; ".join(f"{finding.benchmark}: {finding.refused}" for finding in findings)
        raise WorkerError(f"nothing was timed: {reasons}")
    say(f"\n{table(findings)}\n")
    for finding in findings:
        say(conclusion(finding))
        if finding.confirmed:
            annotate("error", conclusion(finding))
        elif finding.refused or finding.verdicts[-1] != "same" or finding.notes:
            annotate("warning", conclusion(finding))
    if arguments.json:
        for finding in findings:
            print_line(msgspec.json.encode({"tier": "time", "base": base.commit, **as_data(finding)}))
    if arguments.history is not None:
        say(f"history: {save_history(arguments.history, findings, subject)}")
    return findings


def refuse_vanished(base: Base, removed: Sequence[str]) -> None:
    """Raises ValueError for benchmarks that the base has and the working tree has lost."""
    path = base.path / COUNTERS.relative_to(ROOT)
    known = load(path).get("benchmarks", []) if path.exists() else []
    lost = [name for name in known if name not in this_project().benchmarks and name not in removed]
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
        "benchmark": finding.benchmark, "confirmed": finding.confirmed, "refused": finding.refused,
        "notes": finding.notes, "runs": runs,
    }  # fmt: skip


def save_history(folder: Path, findings: Sequence[Finding], subject: Subject) -> Path:
    """Writes what was measured for a trend tool; the path."""
    from gpipe_bench.harness.guard.history import Entry, save

    entries = [
        Entry(
            finding.benchmark, subject.benchmarks[finding.benchmark].describe, finding.runs[-1],
            tuple(finding.samples_s),
        )
        for finding in findings
        if finding.runs
    ]  # fmt: skip
    return save(folder, entries)


def append_text(path: Path, text: str) -> None:
    """Adds to a file that others add to as well, such as a job's summary. Raises ValueError."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error}") from error


def _teller(is_json: bool) -> Any:
    """Prints for people; under --json not between the lines that a program reads. Files stay whole."""

    def say(line: str, *, whole: bool = False) -> None:
        print(line if whole else fitted(line), file=sys.stderr if is_json else sys.stdout, flush=True)

    return say


def annotate(level: str, text: str) -> None:
    """Marks a line for GitHub's summary of the run; nothing anywhere else."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        line = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        print(f"::{level} title=guard::{line}", file=sys.stderr, flush=True)

"""`guard`: exact counters against the committed file, and timed benchmarks against a base revision.

With `--repo` the benchmarks alone, of an engine, of functions or of a command in another repository. Exit
status 0: counters equal and no confirmed regression, also where nothing could be told (1 with
`--require-conclusive`); 1: counters differ or a regression was confirmed; 2: bad usage, or a command that
prints no number; 3: a benchmark failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from gpipe_bench.experiments.commands.output import CASE_FAILED, DONE, VERDICT_FAILED, print_line
from gpipe_bench.experiments.guard.arms import (
    Base,
    Subject,
    WorkerError,
    base_tree,
    check_place,
    merge_base,
    repository,
    this_project,
    top_of,
)
from gpipe_bench.experiments.guard.command import TIMEOUT_S, Command
from gpipe_bench.experiments.guard.counters import differences, encode, load
from gpipe_bench.experiments.guard.run import BUDGET_S, LEGEND, Finding, ending, guard, table, trend
from gpipe_bench.harness import PUBLISHED, ROOT
from gpipe_bench.harness.environment import code_state
from gpipe_bench.harness.report.grid import fill
from gpipe_bench.harness.store import write_whole
from gpipe_bench.pipeline.plan.names import suggestion

COUNTERS = PUBLISHED / "guard" / "counters.json"
SEED = 1811

Say = Callable[[str], None]


def options(verb: argparse.ArgumentParser) -> None:
    """Of the verb."""
    verb.add_argument(
        "--base", metavar="REF", help="time the working tree against where it left this revision"
    )
    verb.add_argument(
        "--update", action="store_true",
        help="write the committed counters anew; say in the commit why they changed",
    )  # fmt: skip
    verb.add_argument(
        "--only", action="append", default=[], metavar="BENCHMARK", help="time only this one; may be repeated"
    )
    verb.add_argument(
        "--removed", action="append", default=[], metavar="BENCHMARK",
        help="a benchmark of the base that is gone on purpose",
    )  # fmt: skip
    verb.add_argument(
        "--budget-s", type=float, default=BUDGET_S, metavar="S",
        help="time for all rounds; default: %(default)g",
    )  # fmt: skip
    verb.add_argument("--history", type=Path, metavar="DIR", help="also write a file for a trend tool there")
    verb.add_argument(
        "--markdown", type=Path, metavar="FILE",
        help="also add the result to this file, as to a job's summary",
    )  # fmt: skip
    verb.add_argument(
        "--require-conclusive", action="store_true", help="exit with 1 where nothing can be told, too"
    )
    verb.add_argument(
        "--repo", type=Path, metavar="DIR",
        help="guard this repository instead, by --engine, --benchmarks or --command",
    )  # fmt: skip
    verb.add_argument(
        "--engine", metavar="MODULE:ATTRIBUTE", help="its engine, timed by this project's benchmarks"
    )
    verb.add_argument(
        "--benchmarks", type=Path, metavar="FILE",
        help="a file of its own benchmarks, below DIR: functions in a dictionary BENCHMARKS",
    )  # fmt: skip
    verb.add_argument(
        "--path", action="append", default=[], metavar="FOLDER",
        help="where its modules are, below DIR; default: DIR and DIR/src",
    )  # fmt: skip
    verb.add_argument(
        "--build", metavar="COMMAND", help="run in the base's checkout and in DIR before they are timed"
    )
    verb.add_argument(
        "--command",
        metavar="LINE",
        help="a command that prints a number, in any language; the last one counts",
    )
    verb.add_argument(
        "--setup", metavar="COMMAND", help="run once in every checkout that --command is run in, such as make"
    )
    verb.add_argument(
        "--number", metavar="REGEX",
        help="of the command's number, or its one group; of several matches the geometric mean counts",
    )  # fmt: skip
    verb.add_argument("--higher-is-better", action="store_true", help="the command's number is a rate")
    verb.add_argument(
        "--timeout-s", type=float, metavar="S", help=f"of one run of the command; default: {TIMEOUT_S:g}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError for bad usage."""
    if arguments.budget_s <= 0:
        raise ValueError(f"--budget-s is {arguments.budget_s:g}; give seconds, such as 150")
    for option in ("history", "markdown"):
        if getattr(arguments, option) is not None and arguments.base is None:
            raise ValueError(f"--{option} keeps what was timed; give a revision to compare with, --base REF")
    if arguments.require_conclusive and arguments.base is None:
        raise ValueError("--require-conclusive is about what is timed; give a revision, --base REF")

    def say(line: str) -> None:  # for people; under --json not between the lines that a program reads
        print(line, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    failed, findings = False, []
    try:
        subject = subject_of(arguments)
        if arguments.base is not None:
            merge_base(subject.root, arguments.base)  # before anything is counted
        for name in arguments.only:
            if name not in subject.benchmarks:
                close, known = suggestion(name, subject.benchmarks), ", ".join(subject.benchmarks)
                raise ValueError(f"unknown benchmark {name!r}{close}; known: {known}")
        if arguments.base is not None:
            merge_base(subject.root, arguments.base)  # before anything that takes time
        if subject.is_own:
            failed = not check_counters(arguments, say)
        if arguments.base is not None:
            findings = check_time(arguments, subject, say)
    except ValueError as error:
        summarize(arguments, f"### guard: not run\n\n{error}\n")
        raise
    except WorkerError as error:
        summarize(arguments, f"### guard: failed\n\n```text\n{error}\n```\n")
        print(f"error: {error}", file=sys.stderr)
        annotate("error", str(error).splitlines()[0])
        return CASE_FAILED
    failed = failed or any(finding.confirmed for finding in findings)
    last = ending(failed, findings)
    if not failed and arguments.require_conclusive and not all(f.is_told or f.is_new for f in findings):
        failed = True
        last += "; that is a failure, by --require-conclusive"
    say(last)
    broken = [finding.benchmark for finding in findings if finding.failed]
    if arguments.markdown is not None:
        told = "".join(f"- {finding.conclusion()}\n" for finding in findings)
        page = f"### {last}\n\n{told}\n{table(findings).markdown()}\n\n{LEGEND}\n"
        append_text(arguments.markdown, page)
    if broken:
        print(f"error: failed: {', '.join(broken)}", file=sys.stderr)
        return CASE_FAILED
    return VERDICT_FAILED if failed else DONE


def summarize(arguments: argparse.Namespace, text: str) -> None:
    """A summary of what could not be timed."""
    if arguments.markdown is not None:
        append_text(arguments.markdown, text)


def subject_of(arguments: argparse.Namespace) -> Subject:
    """What is to be measured. Raises ValueError where that is not clear, or nothing is."""
    command = arguments.command
    for option in ("setup", "number", "higher_is_better", "timeout_s"):
        if command is None and getattr(arguments, option):
            raise ValueError(f"--{option.replace('_', '-')} is about a command; give it, --command LINE")
    if arguments.repo is None:
        for option in ("engine", "benchmarks", "path", "build", "command"):
            if getattr(arguments, option):
                raise ValueError(
                    f"--{option} is about another repository; name it: --repo DIR (. for the one here)"
                )
        check_place(ROOT, "experiments/commands/guard.py", Path.cwd())
        return this_project()
    for option in ("update", "removed"):
        if getattr(arguments, option):
            raise ValueError(f"--{option} is about this project's own counters, not about --repo")
    if arguments.base is None:
        raise ValueError("--repo times a repository against one of its revisions; give it, --base REF")
    if command is not None:
        if arguments.build:
            raise ValueError("--build is for --engine and --benchmarks; a command's checkouts take --setup")
        timeout_s = TIMEOUT_S if arguments.timeout_s is None else arguments.timeout_s
        command = Command(command, arguments.number or "", arguments.higher_is_better, timeout_s)
    return repository(
        arguments.repo, arguments.engine or "",
        arguments.benchmarks and arguments.repo / arguments.benchmarks, arguments.path,
        arguments.build or arguments.setup or "", command,
    )  # fmt: skip


def check_counters(arguments: argparse.Namespace, say: Say) -> bool:
    """The first tier: whether the numbers are the committed ones."""
    import torch

    from gpipe_bench.experiments.guard import counters

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = counters.content()
    finally:
        torch.set_num_threads(threads)
    name = COUNTERS.relative_to(ROOT)
    if arguments.update:
        try:
            write_whole(COUNTERS, encode(found))
        except OSError as error:
            raise ValueError(f"{COUNTERS} can't be written: {error}") from error
        say(f"counters: wrote {name}; commit it with the reason for the change")
    problems = differences(load(COUNTERS), found)
    if arguments.json:
        for problem in problems:
            print_line(msgspec.json.encode({"tier": "counters", "problem": problem}))
    if not problems:
        say(f"counters: {len(found['counters'])} cases equal {name}")
        return True
    say(f"counters: differ from {name}, be it for the better:")
    for problem in problems:
        say(f"  {problem}")
        annotate("error", problem)
    say("the file as it would be now (--update writes it; commit it with the reason for the change):\n")
    say(encode(found))
    return False


def check_time(arguments: argparse.Namespace, subject: Subject, say: Say) -> list[Finding]:
    """The second tier, and the third where a history is kept."""
    names = [name for name in subject.benchmarks if name in arguments.only or not arguments.only]
    with ExitStack() as stack:
        base = control = stack.enter_context(base_tree(subject.root, arguments.base))
        if subject.command:
            control = stack.enter_context(base_tree(subject.root, arguments.base))
        if subject.is_own:
            refuse_vanished(base, arguments.removed)
        state = code_state(top_of(subject.root) or subject.root)
        changed = ", with uncommitted changes" if state["git_dirty"] else ""
        say(
            f"base: {base.commit[:12]}, where HEAD left {base.ref}; "
            f"head: {(state['git_commit'] or '')[:12]}{changed}"
        )
        if base.commit == state["git_commit"] and not state["git_dirty"]:
            say("both are the same code, so any difference is noise; for the commit before: --base HEAD~1")
        subject.prepare(base.path, "the base's checkout")
        if subject.command:
            subject.prepare(control.path, "the control's checkout")
        if not subject.is_own:
            subject.prepare(subject.root, "the working tree")
        findings = guard(
            subject, base.path, names, SEED, control=control.path, budget_s=arguments.budget_s, tell=say
        )
    if not any(finding.runs or finding.is_new for finding in findings):
        reasons = "; ".join(
            f"{finding.benchmark}: {finding.failed or finding.refused}" for finding in findings
        )
        raise WorkerError(f"nothing was timed: {reasons}")
    say(f"\n{table(findings).text()}\n\n{fill(LEGEND)}\n")
    for finding in findings:
        said = finding.conclusion()
        say(said)
        if finding.confirmed or finding.failed:
            annotate("error", said)
        elif not finding.runs or finding.runs[-1].verdict != "same" or finding.notes:
            annotate("warning", said)
    if arguments.json:
        for finding in findings:
            print_line(msgspec.json.encode({"tier": "time", "base": base.commit, **finding.as_data()}))
    if arguments.history is not None:
        describe = {name: each.describe for name, each in subject.benchmarks.items()}
        text = json.dumps(trend(findings, describe), indent=1, ensure_ascii=False)
        path = arguments.history / "github.json"
        try:
            write_whole(path, f"{text}\n")
        except OSError as error:
            raise ValueError(f"the history can't be written to {arguments.history}: {error}") from error
        say(f"history: {path}")
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


def append_text(path: Path, text: str) -> None:
    """Adds to a file that others add to as well, such as a job's summary. Raises ValueError."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error}") from error


def annotate(level: str, text: str) -> None:
    """Marks a line for GitHub's summary of the run; nothing anywhere else."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        line = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        print(f"::{level} title=guard::{line}", file=sys.stderr, flush=True)

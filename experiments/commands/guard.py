"""`guard`: exact counters against the committed file, and timed benchmarks against a base revision.

With `--benchmarks` or `--command` what is timed is somebody else's, in any repository. Exit status 0:
counters equal and no regression, also where nothing could be told (1 with `--require-conclusive`);
1: counters differ or a regression was found; 2: bad usage, or the first runs of a command fail; 3: a
benchmark or a later run fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from gpipe_bench.harness import PUBLISHED, ROOT, is_checkout
from gpipe_bench.harness.environment import code_state
from gpipe_bench.harness.report.grid import fill
from gpipe_bench.harness.store import write_whole
from gpipe_bench.pipeline.plan.named import suggestion

from ..guard.arms import (
    TIMEOUT_S,
    Command,
    Subject,
    WorkerError,
    base_tree,
    benchmarks_of,
    merge_base,
    subject_of,
    top_of,
)
from ..guard.run import BUDGET_S, LEGEND, Finding, ending, guard, table
from .output import CASE_FAILED, DONE, VERDICT_FAILED, print_line

COUNTERS = PUBLISHED / "guard" / "counters.json"
OWN = "experiments/guard/own.py"

Say = Callable[[str], None]
OF_TIME = ("markdown", "require_conclusive", "only")
OF_COMMANDS = ("number", "higher_is_better", "timeout_s")


def options(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("--base", metavar="REF", help="time the working tree against where it left this revision")
    add(
        "--update", action="store_true",
        help="write the committed counters anew; say in the commit why they changed",
    )  # fmt: skip
    several = partial(add, action="append", default=[])
    several("--only", metavar="BENCHMARK", help="time only this one; may be repeated")
    seconds = partial(add, type=float, metavar="S")
    seconds("--budget-s", default=BUDGET_S, help="time for all trials; default: %(default)g")
    add(
        "--markdown", type=Path, metavar="FILE",
        help="also add the result to this file, as to a job's summary",
    )  # fmt: skip
    add("--require-conclusive", action="store_true", help="exit with 1 where nothing can be told, too")
    add("--repo", type=Path, metavar="DIR", help="guard this repository, by --benchmarks or --command")
    add(
        "--benchmarks", type=Path, metavar="FILE",
        help="a file of its benchmarks, below DIR: functions in a dictionary BENCHMARKS",
    )  # fmt: skip
    add(
        "--command", metavar="LINE",
        help="a command that prints a number, in any language; the last one counts",
    )  # fmt: skip
    add("--build", metavar="COMMAND", help="run once in every checkout that is timed, such as make")
    several("--path", metavar="FOLDER", help="where its modules are, below DIR; default: DIR and DIR/src")
    add("--number", metavar="REGEX", help="of the command's number, or its one group; the last match counts")
    add("--higher-is-better", action="store_true", help="the command's number is a rate")
    seconds("--timeout-s", help=f"of one run of the command; default: {TIMEOUT_S:g}")


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError for bad usage. Whatever comes of it is in the summary."""

    def say(line: str) -> None:  # for people; under --json not between the lines that a program reads
        print(line, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    try:
        return _run(arguments, say)
    except ValueError as error:
        summarize(arguments, f"### guard: not run\n\n{error}\n")
        raise
    except WorkerError as error:
        summarize(arguments, f"### guard: failed\n\n```text\n{error}\n```\n")
        print(f"error: {error}", file=sys.stderr)
        annotate("error", str(error).splitlines()[0])
        return CASE_FAILED


def _run(arguments: argparse.Namespace, say: Say) -> int:
    if not arguments.budget_s > 0:
        raise ValueError(f"--budget-s is {arguments.budget_s:g}; give seconds, such as 300")
    if arguments.base is None:
        refuse(arguments, OF_TIME, "is about what is timed; give a revision, --base REF")
    is_own = not (arguments.repo or arguments.benchmarks or arguments.command)
    subject = own_subject(arguments) if is_own else their_subject(arguments)
    is_equal = check_counters(arguments, say) if is_own else True
    is_counted = is_own and is_equal
    findings = check_time(arguments, subject, say, is_counted=is_counted) if arguments.base else []
    failed = not is_equal or any(finding.is_slower or finding.failed for finding in findings)
    last = ending(failed, findings)
    if not failed and arguments.require_conclusive and not all(finding.is_told for finding in findings):
        failed = True
        last += "; that is a failure, by --require-conclusive"
    say(last)
    told = "".join(f"- {finding.conclusion()}\n" for finding in findings)
    summarize(arguments, f"### {last}\n\n{told}\n{table(findings).markdown()}\n\n{LEGEND}\n")
    if broken := [finding.benchmark for finding in findings if finding.failed]:
        print(f"error: failed: {', '.join(broken)}", file=sys.stderr)
        return CASE_FAILED
    return VERDICT_FAILED if failed else DONE


def refuse(arguments: argparse.Namespace, options: Sequence[str], why: str) -> None:
    """Raises ValueError where one of these options is given."""
    for option in options:
        if getattr(arguments, option):
            raise ValueError(f"--{option.replace('_', '-')} {why}")


def own_subject(arguments: argparse.Namespace) -> Subject:
    """This project as the subject. Raises ValueError outside its folder, and for a wrong revision."""
    why = "is about --benchmarks or --command; name what is to be timed"
    refuse(arguments, ("path", "build", *OF_COMMANDS), why)
    here = Path.cwd().resolve()
    if not (is_checkout() and here.is_relative_to(ROOT)):  # it would vouch for another than was changed
        which = here if is_checkout() else "it"
        raise ValueError(
            f"without --benchmarks and --command this guard measures {ROOT}, where it runs from, and {which} "
            "is no checkout of it; cd to one, or name what is to be timed here"
        )
    if arguments.base is None:
        return Subject(ROOT, [])
    return with_benchmarks(subject_of(ROOT, ROOT / OWN, None, ["."]), arguments)


def their_subject(arguments: argparse.Namespace) -> Subject:
    """A repository's. Raises ValueError where that is not clear, or nothing is."""
    repo, file, command = arguments.repo or Path(), arguments.benchmarks, None
    if arguments.base is None:
        raise ValueError("--repo times a repository against one of its revisions; give it, --base REF")
    refuse(arguments, ["update"], "is about this project's own counters, not about another repository's")
    if arguments.command is None:
        refuse(arguments, OF_COMMANDS, "is about a command; give it, --command LINE")
    else:
        timeout_s = TIMEOUT_S if arguments.timeout_s is None else arguments.timeout_s
        command = Command(arguments.command, arguments.number or "", arguments.higher_is_better, timeout_s)
    subject = subject_of(repo, file and repo / file, command, arguments.path, arguments.build or "")
    return with_benchmarks(subject, arguments)


def with_benchmarks(subject: Subject, arguments: argparse.Namespace) -> Subject:
    """The subject with its benchmarks, all or those of `--only`. ValueError for an unknown one, or revision.

    What its file needs must be built in the working tree before it can be loaded.
    """
    merge_base(subject.root, arguments.base)  # before anything that takes time
    subject.prepare(subject.root, "the working tree")
    known = subject.benchmarks if subject.command else benchmarks_of(subject)
    for name in arguments.only:
        if name not in known:
            close = suggestion(name, known)
            raise ValueError(f"unknown benchmark {name!r}{close}; known: {', '.join(known)}")
    chosen = [name for name in known if name in arguments.only or not arguments.only]
    return replace(subject, benchmarks=chosen)


def check_counters(arguments: argparse.Namespace, say: Say) -> bool:
    """The first tier: whether the numbers are the committed ones."""
    import torch

    from ..guard import own

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = own.content()
    finally:
        torch.set_num_threads(threads)
    name = COUNTERS.relative_to(ROOT)
    if arguments.update:
        try:
            write_whole(COUNTERS, own.encode(found))
        except OSError as error:
            raise ValueError(f"{COUNTERS} can't be written: {error}") from error
        say(f"counters: wrote {name}; commit it with the reason for the change")
    problems = own.differences(own.load(COUNTERS), found)
    if not problems:
        say(f"counters: {len(found['counters'])} cases equal {name}")
        return True
    say(f"counters: differ from {name}, be it for the better:")
    for problem in problems:
        if arguments.json:
            print_line(msgspec.json.encode({"tier": "counters", "problem": problem}))
        say(f"  {problem}")
        annotate("error", problem)
    say("the file as it would be now (--update writes it; commit it with the reason for the change):\n")
    say(own.encode(found))
    return False


def check_time(
    arguments: argparse.Namespace, subject: Subject, say: Say, *, is_counted: bool
) -> list[Finding]:
    with ExitStack() as stack:
        base = control = stack.enter_context(base_tree(subject.root, arguments.base))
        if subject.command:
            control = stack.enter_context(base_tree(subject.root, arguments.base))
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
        findings = guard(
            subject, base.path, control=control.path, is_counted=is_counted, budget_s=arguments.budget_s,
            tell=say,
        )  # fmt: skip
    if not any(finding.trials or finding.lacking for finding in findings):
        raise WorkerError("; ".join(finding.conclusion() for finding in findings))
    say(f"\n{table(findings).text()}\n\n{fill(LEGEND)}\n")
    for finding in findings:
        said = finding.conclusion()
        say(said)
        if finding.is_slower or finding.failed:
            annotate("error", said)
        elif not finding.is_told or finding.lacking or finding.notes:
            annotate("warning", said)
        if arguments.json:
            print_line(msgspec.json.encode({"tier": "time", "base": base.commit, **finding.as_data()}))
    return findings


def summarize(arguments: argparse.Namespace, text: str) -> None:
    """Adds to the file of `--markdown`, which others add to as well. Raises ValueError."""
    if arguments.markdown is None:
        return
    try:
        with arguments.markdown.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"{arguments.markdown} can't be written: {error}") from error


def annotate(level: str, text: str) -> None:
    """Marks a line for GitHub's summary of the run; nothing anywhere else."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        line = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        print(f"::{level} title=guard::{line}", file=sys.stderr, flush=True)

"""Mistakes planted one at a time: which tests notice them.

    python tests/mutants.py                           each mistake of `planted`, and the tests named there
    python tests/mutants.py --only "NAME"             one of them (may be repeated)
    python tests/mutants.py --list                    what there is, and which tests must notice
    python tests/mutants.py pipeline/plan harness     changes by rule, of modules or folders
    python tests/mutants.py pipeline --sample 900     so many of them, at random
    python tests/mutants.py --matrix                  of 1,500 in all packages every test that notices
    python tests/mutants.py --compare BEFORE.jsonl AFTER.jsonl    what was noticed and no longer is

A test suite that is green on right code shows little; this shows that it turns red on wrong code. `planted`
holds mistakes that somebody has made or could, and that no rule makes; `mutation_rules` makes the others.

Everything happens in one session of pytest. It collects the tests; a fork runs them once, and where mistakes
are made by rule it notes the lines of each. Then each mistake gets a fork, in which its function is given the
changed code and the tests that run the line, or that are named, are run, the fastest first, until one fails.
Processes and interpreters that a test starts import the changed code, too (`planting`). No line of theirs is
noted, so changes of `LAUNCHED` that no other test runs get the tests that launch processes.

Results of rules go to results/mutants (kills.jsonl, matrix.jsonl), a line each as it is known; who starts
again goes on where the last run ended. A test that stands still without any mistake ends the run, with the
stacks of its threads. Exit status 1 where a planted mistake is not noticed or `--compare` finds a loss, 2
where `planted` does not fit the code: a text to replace that is not there, or twice.
"""

from __future__ import annotations

import argparse
import ast
import faulthandler
import gc
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType

import coverage
import psutil
import pytest
from _pytest.runner import runtestprotocol
from mutation_rules import Mutant, by_rule, first_line, functions
from planted import MISTAKES, Mistake

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "mutants"
PACKAGES = ("pipeline", "planner", "models", "harness", "experiments")
LAUNCHED = ("pipeline/ranks", "pipeline/mesh", "pipeline/checkpoint")
LIMIT_S = 60  # of processor time, for one test; a change by rule that never ends is noticed, too
STILL_S = 120.0  # that a fork and all that it has started do next to nothing, before this is the end
IDLE = 0.02  # of a core, which is next to nothing
FIRST_TIER = (
    "-m",
    "not deep and not alone and not gpu",
    "--ignore",
    "tests/checks",
    "--ignore",
    "tests/benchmarks",
)
NOTICED = ("killed", "timed out")


# Mistakes by hand


def by_hand(mistake: Mistake) -> Mutant:
    """As it is to be planted; `ValueError` unless there is one place for it and its tests exist."""
    file, _, function = mistake.place.partition("::")
    path = ROOT / file
    whole = path.read_text(encoding="utf-8") if path.is_file() else ""
    start, part = 1, whole
    if function:
        for name, node in functions(ast.parse(whole)):
            if name == function:
                start = first_line(node)
                part = "".join(whole.splitlines(keepends=True)[start - 1 : node.end_lineno])
                break
        else:
            raise ValueError(f"{mistake.name!r} does not fit: there is no {mistake.place}")
    count = part.count(mistake.old)
    if count != 1 or mistake.new == mistake.old:
        raise ValueError(
            f"{mistake.name!r} does not fit: its text occurs {count} times in {mistake.place}, or is not "
            f"changed; adapt it to the code\n{mistake.old}"
        )
    for node in mistake.tests:
        path, name = ROOT / node.partition("::")[0], node.partition("::")[2].partition("[")[0]
        if not path.is_file() or f"\ndef {name}(" not in path.read_text(encoding="utf-8"):
            raise ValueError(f"{mistake.name!r} must be noticed by {node}, which is not there")
    line = start + part[: part.index(mistake.old)].count("\n")
    return Mutant(
        mistake.name, file, function, line, mistake.old, mistake.new,
        lambda: whole.replace(part, part.replace(mistake.old, mistake.new)), tests=mistake.tests,
    )  # fmt: skip


# Planting


def plant(mutant: Mutant, folder: Path) -> int:
    """Gives every function object of this process that has the original code the changed one; how many. What
    is started from now on imports the changed module.
    """
    path = ROOT / mutant.file
    kept = folder / "planted.py"
    text = mutant.make()
    kept.write_text(text, encoding="utf-8")
    os.environ["PLANTED"] = os.pathsep.join(map(str, (path, kept)))
    paths = (str(ROOT / "tests" / "planting"), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if (ROOT / "gpipe_bench").exists():
        importlib.import_module(f"gpipe_bench.{module}".removesuffix(".__init__"))
    if not mutant.function:
        return _plant_statement(mutant, path, text)
    original = dict(_codes(path.read_text(encoding="utf-8"), mutant))
    changed = dict(_codes(text, mutant))
    count = 0
    gc.unfreeze()  # what is frozen is not among the objects
    for each in gc.get_objects():
        if type(each) is not FunctionType or each.__code__.co_qualname != mutant.function:
            continue
        code = each.__code__
        if code.co_firstlineno in original and Path(code.co_filename).resolve() == path:
            with suppress(KeyError, ValueError):  # gone, or without the `super()` that it had
                each.__code__ = changed[code.co_firstlineno].replace(co_filename=code.co_filename)
                count += 1
    return count


def _codes(text: str, mutant: Mutant) -> Iterator[tuple[int, CodeType]]:
    """The code of the mutant's function, by its first line."""
    waiting = [compile(text, mutant.file, "exec")]
    while waiting:
        code = waiting.pop()
        if code.co_qualname == mutant.function:
            yield code.co_firstlineno, code
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]


def _plant_statement(mutant: Mutant, path: Path, text: str) -> int:
    before, after = (ast.parse(each).body for each in (path.read_text(encoding="utf-8"), text))
    (new,) = [new for old, new in zip(before, after, strict=True) if ast.dump(old) != ast.dump(new)]
    found = [m for m in sys.modules.values() if Path(getattr(m, "__file__", "") or "").resolve() == path]
    for module in found:
        exec(compile(ast.Module([new], []), mutant.file, "exec"), vars(module))
    return len(found)


# Judging


class Session:
    """A plugin that, instead of running the collected tests, judges mutants with them."""

    def __init__(self, mutants: Sequence[Mutant], options: argparse.Namespace) -> None:
        self.mutants, self.options = mutants, options
        self.by_rule = not any(mutant.tests for mutant in mutants)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.session, items = session, list(session.items)
        if session.testsfailed:  # while they were collected
            return True
        in_processes = [item for item in items if item.get_closest_marker("processes") is not None]
        if self.by_rule:
            lines, seconds = self.tried([item for item in items if item not in set(in_processes)])
        else:
            lines, seconds = self.tried(items)
        by_name = {item.nodeid: item for item in items}
        running: dict[int, tuple[Mutant, Path, float]] = {}
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            for number, mutant in enumerate(self.mutants):
                names = sorted(lines.get((mutant.file, mutant.line), ()), key=lambda name: seconds[name])
                chosen = [by_name[name] for name in names]
                if mutant.tests:
                    named = [item for item in items if item.nodeid.startswith(mutant.tests)]
                    chosen = [item for item in named if _is_one_of(item.nodeid, mutant.tests)]
                    if failing := [item.nodeid for item in chosen if item.nodeid not in seconds]:
                        raise pytest.UsageError(f"without any mistake these do not pass: {failing}")
                elif not chosen and mutant.file.startswith(LAUNCHED):
                    chosen = in_processes
                if not chosen:
                    self.done(mutant, "no test here", 0.0)
                    continue
                while len(running) >= self.options.jobs:
                    self.reap(running)
                path = Path(folder, str(number))
                path.mkdir()
                if (pid := os.fork()) == 0:
                    self.judge(mutant, chosen, path)
                running[pid] = mutant, path, time.monotonic()
            while running:
                self.reap(running)
        return True

    def tried(self, items: Sequence[pytest.Item]) -> tuple[dict[tuple[str, int], set[str]], dict[str, float]]:
        """In a fork, without any mistake: of each line of the modules the tests that run it, where this is to
        be known; and the seconds of each test that passes.
        """
        files = {mutant.file for mutant in self.mutants} if self.by_rule else set()
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            data_file, times = Path(folder, "coverage"), Path(folder, "seconds")
            running, stacks = Path(folder, "running"), Path(folder, "stacks")
            if (pid := os.fork()) == 0:
                os.setsid()
                silence()
                faulthandler.register(signal.SIGUSR1, file=stacks.open("w"))
                self.session.items[:] = items
                # As they are imported, through the package, and as they lie here.
                included = [str(place / file) for file in files for place in (ROOT, ROOT / "gpipe_bench")]
                watched = coverage.Coverage(str(data_file), config_file=False, include=included)
                seconds = {}
                if files:
                    watched.start()
                for item, following in zip(items, [*items[1:], None], strict=True):
                    running.write_text(item.nodeid)
                    if files:
                        watched.switch_context(item.nodeid)
                    start_s = time.process_time()
                    reports = runtestprotocol(item, log=False, nextitem=following)
                    if all(report.passed for report in reports):  # others tell nothing
                        seconds[item.nodeid] = time.process_time() - start_s
                if files:
                    watched.stop()
                    watched.save()
                times.write_text(json.dumps(seconds))
                os._exit(0)  # the session goes on in its own process alone
            if not ended(pid):
                os.kill(pid, signal.SIGUSR1)
                time.sleep(1.0)  # until it has said where it is
                _end_group(pid)
                os.waitpid(pid, 0)
                said = f"{running.read_text()} stands still without any mistake\n{stacks.read_text()}"
                raise pytest.UsageError(said)
            _end_group(pid)
            seconds = json.loads(times.read_text())
            lines: dict[tuple[str, int], set[str]] = {}
            if files:
                data = coverage.CoverageData(str(data_file))
                data.read()
                for path in data.measured_files():
                    file = str(Path(path).resolve().relative_to(ROOT))
                    for line, names in data.contexts_by_lineno(path).items():
                        lines[file, line] = {name for name in names if name in seconds}
            return lines, seconds

    def judge(self, mutant: Mutant, items: Sequence[pytest.Item], folder: Path) -> None:
        """In a fork: plants the mutant, runs the tests, writes which failed."""
        os.setsid()  # so that what a test has started ends with it
        silence()
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
        self.session.items[:] = items
        status = 3
        try:
            if plant(mutant, folder):
                status = 1
                for item, following in zip(items, [*items[1:], None], strict=True):
                    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
                    signal.setitimer(signal.ITIMER_REAL, 10 * LIMIT_S)
                    if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                        with (folder / "killers").open("a") as file:
                            file.write(f"{item.nodeid}\n")
                        if not self.options.matrix:
                            break
                status = 0
        finally:  # the session goes on in its own process alone
            os._exit(status)

    def reap(self, running: dict[int, tuple[Mutant, Path, float]]) -> None:
        """Waits for one fork and takes down what it found."""
        pid, status = os.wait()
        if pid not in running:
            return
        _end_group(pid)
        mutant, folder, start_s = running.pop(pid)
        killers, code = folder / "killers", os.waitstatus_to_exitcode(status)
        mutant.killers = killers.read_text().splitlines() if killers.exists() else []
        verdict = "killed" if mutant.killers else "survived"
        if code == 3:
            verdict = "unclear" if mutant.tests else "no test here"
        elif code in (-signal.SIGVTALRM, -signal.SIGALRM):
            verdict = "timed out"
        elif code and not mutant.killers:  # a test that takes the process down has noticed, too
            verdict = "unclear" if mutant.tests else "killed"
        self.done(mutant, verdict, time.monotonic() - start_s)

    def done(self, mutant: Mutant, verdict: str, duration_s: float) -> None:
        mutant.verdict = verdict
        if self.by_rule:
            with self.options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(mutant.record()) + "\n")
        if mutant.tests:
            detail = ", ".join(mutant.killers or mutant.tests)
            print(f"{verdict:8} {duration_s:5.1f} s  {mutant.name}: {detail}", flush=True)
        elif verdict == "survived":
            change = f"{mutant.before} -> {mutant.after or 'nothing'}"
            print(f"{verdict:8} {mutant.name} (line {mutant.line}): {change}", flush=True)


def ended(pid: int) -> bool:
    """Waits for a child, but no longer than it does something, it or what it has started."""
    since_s, before_s = time.monotonic(), 0.0
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        time.sleep(min(1.0, STILL_S / 10))
        spent_s, waited_s = 0.0, time.monotonic() - since_s
        with suppress(psutil.Error):  # whatever ends meanwhile did something
            family = psutil.Process(pid)
            spent_s = sum(sum(each.cpu_times()[:4]) for each in [family, *family.children(recursive=True)])
        if abs(spent_s - before_s) > IDLE * max(STILL_S, waited_s):
            since_s, before_s = time.monotonic(), spent_s
        elif waited_s > STILL_S:
            return False
    return True


def _is_one_of(node: str, names: Sequence[str]) -> bool:
    return any(node == name or node.startswith(f"{name}[") for name in names)


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)


# The command


def modules(names: Sequence[str]) -> list[str]:
    """Those of modules and folders, from the root."""
    roots = [ROOT / name for name in names]
    paths = [path for root in roots for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    return [str(path.relative_to(ROOT)) for path in paths]


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """The mutants that are asked for; `ValueError` for what there is not. Of those by rule only the ones that
    have no result yet.
    """
    if not options.places:
        known = {mistake.name: mistake for mistake in MISTAKES}
        if unknown := [name for name in options.only or () if name not in known]:
            raise ValueError(f"there is no mistake {unknown[0]!r}; --list shows their names")
        return [by_hand(mistake) for mistake in MISTAKES if mistake.name in (options.only or known)]
    found = [mutant for file in modules(options.places) for mutant in by_rule(file, ROOT)]
    if options.sample and options.sample < len(found):
        found = random.Random(options.seed).sample(found, options.sample)
    results = options.output.read_text(encoding="utf-8").splitlines() if options.output.exists() else []
    done = {(each["name"], each["digest"]) for each in map(json.loads, results)}
    return [mutant for mutant in found if (mutant.name, mutant.digest) not in done]


def compare(before: Path, after: Path) -> list[str]:
    """Names of mutants that were killed before, are still made and are no longer killed."""
    old, new = (
        {each["name"]: each["verdict"] for each in map(json.loads, path.read_text().splitlines())}
        for path in (before, after)
    )
    return [name for name in old if old[name] in NOTICED and new.get(name, "killed") not in NOTICED]


def main(arguments: Sequence[str] | None = None) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("places", nargs="*", help="modules or folders, from the root of the project")
    parser.add_argument("--only", action="append", metavar="NAME", help="this mistake (may be repeated)")
    parser.add_argument("--list", action="store_true", help="show the mistakes and plant none")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files (default: the first tier)")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of the mutants, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matrix", action="store_true", help="every test that notices, not only the first")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at a time (default 2)")
    parser.add_argument("--fresh", action="store_true", help="judge again what has a result")
    parser.add_argument("--output", type=Path, help="instead of a file in results/mutants")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args(arguments)
    if options.compare:
        lost = compare(*options.compare)
        print("\n".join(lost) or "all that was noticed before still is")
        return bool(lost)
    if options.list:
        for each in MISTAKES:
            print(f"{each.name}\n    {each.place}: {each.why}\n    {', '.join(each.tests)}")
        return 0
    if options.matrix and not options.places:
        options.places, options.sample = list(PACKAGES), options.sample or 1500
    if options.places:
        options.output = options.output or RESULTS / ("matrix.jsonl" if options.matrix else "kills.jsonl")
        options.output.parent.mkdir(parents=True, exist_ok=True)
        if options.fresh:
            options.output.unlink(missing_ok=True)
    try:
        if options.jobs < 1:
            raise ValueError(f"--jobs is {options.jobs}; plant at least 1 at a time")
        mutants = chosen(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ["CI"] = "true"  # the same examples each time
    tests = [*FIRST_TIER, *options.tests]
    if not options.places:
        tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    session = Session(mutants, options)
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT), *tests], [session]
    )
    verdicts = [mutant.verdict for mutant in mutants]
    if options.places:
        print(
            ", ".join(f"{verdicts.count(each)} {each}" for each in sorted(set(verdicts)))
            or "nothing to judge"
        )
        return int(status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED))
    print(f"{verdicts.count('killed')} of {len(verdicts)} mistakes noticed")
    return int(verdicts.count("killed") < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())

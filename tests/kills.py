"""Which tests notice which mistakes: small changes of code by rule, against the tests that run their line.

    python tests/kills.py pipeline/plan/replay.py harness/verdict.py     modules, or folders of them
    python tests/kills.py pipeline --sample 900                          so many of all mutants, at random
    python tests/kills.py pipeline/plan --all-killers                    the matrix: every test that notices
    python tests/kills.py --compare BEFORE.jsonl AFTER.jsonl             what was noticed and no longer is

`mutant_table` holds mistakes that somebody has made or could; these are what nobody thought of. A mutant is
named by file, function, operator and a number within the function, so it keeps its name when lines move.

Everything happens in one session of pytest. It collects the tests; a fork runs them once and notes the lines
of each; then each mutant gets a fork, in which its function is given the changed code and the tests that run
the line are run, the fastest first, until one fails. Nothing is copied and nothing is imported again. This
does not reach code that only launched processes run ("no test here"): such mistakes are for `mutants.py`.

Results go to results/mutants/kills.jsonl, a line each as it is known. Exit status 1 where `--compare` finds
what was noticed before and no longer is.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "results" / "mutants" / "kills.jsonl"
LIMIT_S = 60  # of processor time, for the tests of one mutant; a mistake that never ends is noticed, too
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass
class Mutant:
    """One change of a function; `verdict` is "killed", "timed out", "survived" or "no test here"."""

    name: str
    line: int
    before: str
    after: str
    verdict: str = ""
    killers: list[str] = field(default_factory=list)

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def function(self) -> str:
        return self.name.split("::")[1]


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """What may stand in place of a node: the operator's name, and the new node (None: nothing at all)."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            yield "compare", ast.Compare(node.left, [SWAPS[type(operator)]()], node.comparators)
        case ast.BinOp(op=operator) if type(operator) in SWAPS and not _is_text(node):
            yield "arithmetic", ast.BinOp(node.left, SWAPS[type(operator)](), node.right)
        case ast.BoolOp(op=operator):
            yield "and-or", ast.BoolOp(SWAPS[type(operator)](), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node.operand
        case ast.UnaryOp(op=ast.USub()):
            yield "sign", node.operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            changed = copy.copy(node)
            changed.test = ast.UnaryOp(ast.Not(), test)
            yield "condition", changed
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "dropped call", None
        case ast.Call(args=[first, second, *others]) if not {type(first), type(second)} & {ast.Starred}:
            yield "swapped arguments", ast.Call(node.func, [second, first, *others], node.keywords)
        case ast.Return(value=value) if value and ast.unparse(value) != "None":
            yield "early return", ast.Return(ast.Constant(None))
        case ast.AugAssign(op=operator) if type(operator) in SWAPS:
            yield "arithmetic", ast.AugAssign(node.target, SWAPS[type(operator)](), node.value)


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    texts = [isinstance(s, ast.Constant) and isinstance(s.value, str) for s in sides]
    return any(texts) or any(isinstance(side, ast.JoinedStr) for side in sides)


class _Replace(ast.NodeTransformer):
    """Puts a node in the place of another one."""

    def __init__(self, old: ast.AST, new: ast.AST | None) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        if node is not self.old:
            return super().visit(node)
        return ast.copy_location(self.new or ast.Pass(), node)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """The outermost functions of a module, with their qualified names."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        prefix, scope = waiting.pop()
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, Function):
                yield prefix + node.name, node
            elif isinstance(node, ast.ClassDef):
                waiting.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.If | ast.Try | ast.With):
                waiting.append((prefix, node))


def places(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function that count: no annotations, messages of errors, assertions or docstrings."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
            continue
        yield node
        children = [child for name, child in ast.iter_fields(node) if name not in ("annotation", "returns")]
        flat = [each for child in children for each in (child if isinstance(child, list) else [child])]
        waiting += reversed([each for each in flat if isinstance(each, ast.AST)])


def mutants_of(file: str) -> Iterator[tuple[Mutant, Function, ast.AST, ast.AST | None]]:
    """Each mutant of a module, with the function, the node and what takes its place."""
    for name, function in functions(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        counts: dict[str, int] = {}
        for node in places(function):
            for operator, new in changes(node):
                number = counts[operator] = counts.get(operator, 0) + 1
                before = ast.unparse(node).splitlines()[0]
                after = "" if new is None else ast.unparse(ast.fix_missing_locations(new)).splitlines()[0]
                mutant = Mutant(f"{file}::{name}::{operator} {number}", node.lineno, before, after)
                yield mutant, function, node, new


def plant(mutant: Mutant) -> int:
    """Gives every function object of this process that has the original code the changed one; how many."""
    _, function, old, new = next(found for found in mutants_of(mutant.file) if found[0].name == mutant.name)
    changed = ast.fix_missing_locations(_Replace(old, new).visit(function))
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    # Classes around it give the code its name and `super()` its cell.
    for name in reversed(mutant.function.split(".")[:-1]):
        changed = ast.ClassDef(name, [], [], [changed], [])
    module = ast.fix_missing_locations(ast.Module([_FUTURE, changed], []))
    waiting = [compile(module, mutant.file, "exec")]
    while waiting[-1].co_qualname != mutant.function:
        waiting += [each for each in waiting.pop().co_consts if isinstance(each, CodeType)]
    count = 0
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_qualname == mutant.function:
            code = each.__code__
            if code.co_firstlineno == first and Path(code.co_filename).resolve() == ROOT / mutant.file:
                each.__code__ = waiting[-1].replace(co_filename=code.co_filename)
                count += 1
    return count


_FUTURE = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)


class Session:
    """A plugin that, instead of running the collected tests, judges mutants with them."""

    def __init__(self, files: Sequence[str], options: argparse.Namespace) -> None:
        self.files, self.options = files, options
        self.verdicts: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = [item for item in session.items if item.get_closest_marker("processes") is None]
        lines, seconds = self.covered(items)
        by_name = {item.nodeid: item for item in items}
        planted = [found[0] for file in self.files for found in mutants_of(file)]
        if self.options.sample and self.options.sample < len(planted):
            planted = random.Random(self.options.seed).sample(planted, self.options.sample)
        running: dict[int, tuple[Mutant, Path]] = {}
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            for number, mutant in enumerate(planted):
                names = sorted(lines.get((mutant.file, mutant.line), ()), key=lambda name: seconds[name])
                if not names:
                    self.done(mutant, "no test here")
                    continue
                while len(running) >= self.options.jobs:
                    self.reap(running)
                path = Path(folder, str(number))
                pid = os.fork()
                if pid == 0:
                    self.judge(mutant, [by_name[name] for name in names], path)
                running[pid] = mutant, path
            while running:
                self.reap(running)
        return True

    def covered(
        self, items: Sequence[pytest.Item]
    ) -> tuple[dict[tuple[str, int], set[str]], dict[str, float]]:
        """Of each line of the modules the tests that run it; and the seconds that each test takes."""
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            data_file, times = Path(folder, "coverage"), Path(folder, "seconds")
            if (pid := os.fork()) == 0:
                silence()
                # As they are imported, through the package, and as they lie here.
                included = [
                    str(place / file) for file in self.files for place in (ROOT, ROOT / "gpipe_bench")
                ]
                watched = coverage.Coverage(str(data_file), config_file=False, include=included)
                seconds = {}
                watched.start()
                for item, following in zip(items, [*items[1:], None], strict=True):
                    watched.switch_context(item.nodeid)
                    start_s = time.process_time()
                    reports = runtestprotocol(item, log=False, nextitem=following)
                    if all(report.passed for report in reports):  # others tell nothing
                        seconds[item.nodeid] = time.process_time() - start_s
                watched.stop()
                watched.save()
                times.write_text(json.dumps(seconds))
                os._exit(0)
            os.waitpid(pid, 0)
            seconds = json.loads(times.read_text())
            data = coverage.CoverageData(str(data_file))
            data.read()
            lines: dict[tuple[str, int], set[str]] = {}
            for path in data.measured_files():
                file = str(Path(path).resolve().relative_to(ROOT))
                for line, names in data.contexts_by_lineno(path).items():
                    lines[file, line] = {name for name in names if name in seconds}
        return lines, seconds

    def judge(self, mutant: Mutant, items: Sequence[pytest.Item], path: Path) -> None:
        """In a fork: plants the mutant, runs the tests, writes which failed."""
        silence()
        gc.unfreeze()  # what is frozen is not among the objects
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
        signal.setitimer(signal.ITIMER_REAL, 20 * LIMIT_S)
        if plant(mutant) == 0:
            os._exit(3)
        for item, following in zip(items, [*items[1:], None], strict=True):
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                with path.open("a") as file:
                    file.write(f"{item.nodeid}\n")
                if not self.options.all_killers:
                    break
        os._exit(0)

    def reap(self, running: dict[int, tuple[Mutant, Path]]) -> None:
        """Waits for one fork and takes down what it found."""
        pid, status = os.wait()
        if pid not in running:
            return
        mutant, path = running.pop(pid)
        mutant.killers = path.read_text().splitlines() if path.exists() else []
        code = os.waitstatus_to_exitcode(status)
        if code == 3:
            self.done(mutant, "no test here")
        elif code in (-signal.SIGVTALRM, -signal.SIGALRM):
            self.done(mutant, "timed out")
        else:  # a test that takes the process down has noticed, too
            self.done(mutant, "killed" if mutant.killers or code else "survived")

    def done(self, mutant: Mutant, verdict: str) -> None:
        mutant.verdict = verdict
        self.verdicts.append(verdict)
        with self.options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(mutant)) + "\n")
        if verdict == "survived":
            change = f"{mutant.before} -> {mutant.after or 'nothing'}"
            print(f"{verdict:12} {mutant.name} (line {mutant.line}): {change}", flush=True)


def silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)


def compare(before: Path, after: Path) -> list[str]:
    """Names of mutants that were killed before, are still made and are no longer killed."""
    old, new = (
        {each["name"]: each["verdict"] for each in map(json.loads, path.read_text().splitlines())}
        for path in (before, after)
    )
    noticed = ("killed", "timed out")
    return [name for name in old if old[name] in noticed and new.get(name, "killed") not in noticed]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", nargs="*", help="modules or folders, from the root of the project")
    parser.add_argument(
        "--tests", nargs="+", default=["tests"], help="files of tests (default: the first tier)"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="so many of the mutants, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--all-killers", action="store_true", help="run all tests of a mutant, not only to the first"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args(arguments)
    if options.compare:
        lost = compare(*options.compare)
        print("\n".join(lost) or "all that was noticed before still is")
        return bool(lost)
    roots = [ROOT / place for place in options.places]
    paths = [path for root in roots for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    session = Session([str(path.relative_to(ROOT)) for path in paths], options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("")
    os.environ["CI"] = "true"  # the same examples each time
    chosen = [
        "-m",
        "not deep and not alone and not gpu",
        "--ignore",
        "tests/checks",
        "--ignore",
        "tests/benchmarks",
    ]
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen, *options.tests], [session]
    )
    counts = [f"{session.verdicts.count(each)} {each}" for each in sorted(set(session.verdicts))]
    print(f"{', '.join(counts)} of {len(session.verdicts)}")
    return int(status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED))


if __name__ == "__main__":
    sys.exit(main())

"""Plants one mistake at a time in a copy of the code and checks that the tests notice.

    python tests/mutants.py                       every mutant of `mutant_table`
    python tests/mutants.py --only "NAME"         one of them (may be repeated)
    python tests/mutants.py --list                what there is, and which tests must notice

The packages and the tests are copied to a temporary folder, where the selected tests must pass first. Each
mutant then gets a copy of its own, with one text replaced, and the tests that must notice it run there in a
process of their own, forked from one that has imported torch and pytest already. Failing tests are the aim:
exit status 0 says that every mutant was killed, 1 that one survived or could not be judged (its tests hung or
broke in another way than by failing), 2 that the table does not fit the code: a text to replace that is no
longer there, or stands there twice, is an error and not a mutant less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "gpipe_bench", "pipeline", "planner", "models", "harness", "experiments", "tests", "pyproject.toml",
    "results/paper.csv", "results/unknowns.toml", "results/consistency-protocol.toml",
)  # fmt: skip
TIMEOUT_S = 120.0  # of the tests of one mutant, which take seconds
PRELOADED = (
    "torch",
    "torch.distributed.tensor",
    "torch.utils.flop_counter",
    "hypothesis",
    "msgspec",
    "pytest",
)
PASSED, FAILED = 0, 1  # exit statuses of pytest; others mean that no test was judged


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: `verdict` is "killed", "survived" or "unclear"."""

    mutant: Mutant
    verdict: str
    detail: str  # the test that noticed, or pytest's last words
    duration_s: float


def check(mutants: Iterable[Mutant], root: Path | None = None) -> None:
    """`ValueError` unless every mutant applies exactly once and every test that it names is there."""
    root = root or ROOT
    for mutant in mutants:
        mutated(mutant, (root / mutant.file).read_text())
        if not mutant.tests:
            raise ValueError(f"mutant {mutant.name!r} names no tests that must notice it")
        for node in mutant.tests:
            file, _, function = node.partition("::")
            path, name = root / file, function.partition("[")[0]
            if not path.is_file() or f"\ndef {name}(" not in path.read_text():
                raise ValueError(
                    f"mutant {mutant.name!r} must be noticed by {node}, which is not there; name an "
                    "existing test"
                )


def mutated(mutant: Mutant, text: str) -> str:
    """The text of the mutant's file with its mistake; `ValueError` unless there is one place for it."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(
            f"mutant {mutant.name!r} does not apply: its text occurs {count} times in {mutant.file}; adapt "
            f"the mutant to the code\n{mutant.old}"
        )
    if mutant.new == mutant.old:
        raise ValueError(f"mutant {mutant.name!r} changes nothing")
    return text.replace(mutant.old, mutant.new)


@contextmanager
def pristine(mutants: Sequence[Mutant], root: Path | None = None) -> Iterator[Path]:
    """A copy of the code in which the tests of all `mutants` pass; `ValueError` if they do not."""
    root = root or ROOT
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "pristine")
        copy.mkdir()
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(
                    root / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                (copy / name).parent.mkdir(exist_ok=True)
                shutil.copy2(root / name, copy / name)
        check(mutants, copy)
        nodes = tuple(dict.fromkeys(node for mutant in mutants for node in mutant.tests))
        status, output = run_tests(copy, nodes, TIMEOUT_S * max(len(nodes), 1))
        if status != PASSED:
            raise ValueError(f"the tests do not pass without any mutant (pytest says {status}):\n{output}")
        yield copy


def judge(mutant: Mutant, copy: Path) -> Outcome:
    """Plants a mutant beside the `pristine` copy and runs the tests that must notice it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=copy.parent) as parent:
        folder = Path(parent, "code")
        shutil.copytree(copy, folder, symlinks=True)  # with the compiled files, which saves a second
        path = folder / mutant.file
        path.write_text(mutated(mutant, path.read_text()))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
        status, output = run_tests(folder, mutant.tests, TIMEOUT_S)
    failures = re.findall(r"^FAILED (.+?)(?: - |$)", output, re.MULTILINE)
    if status == FAILED and failures:
        verdict, detail = "killed", failures[0]
    elif status == PASSED:
        verdict, detail = "survived", f"{', '.join(mutant.tests)} passed"
    else:
        verdict, detail = "unclear", f"pytest ended with {status}\n{output[-2000:]}"
    return Outcome(mutant, verdict, detail, time.monotonic() - start)


def run_tests(folder: Path, nodes: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit status (None: still running after `timeout_s`) and output of pytest in a copy of the code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    log = folder.with_suffix(".log")
    process = context.Process(target=_pytest, args=(folder, log, list(nodes)))
    process.start()
    process.join(timeout_s)
    hangs = process.exitcode is None
    process.kill()
    # The process leads a group of its own, so that what a test has started ends with it.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    output = log.read_text(errors="replace") if log.exists() else ""
    if hangs:
        return None, f"{output}\nno result after {timeout_s:g} s"
    return process.exitcode, output


def _pytest(folder: Path, log: Path, nodes: list[str]) -> None:
    """Runs pytest in a copy of the code, in a process that has imported nothing of this project."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(folder)
    here = str(Path(__file__).parent)
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", here, str(ROOT)))]
    paths = (str(folder), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    os.environ["CI"] = "true"  # the same examples each time
    os.environ.pop("PYTEST_ADDOPTS", None)
    import pytest

    # Without plugins, and so without their options in pyproject.toml: importing them is a third of the time.
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-o", "addopts=-ra --strict-markers"]
    status = pytest.main([*options, *nodes])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def judge_all(mutants: Sequence[Mutant], jobs: int = 2, root: Path | None = None) -> Iterator[Outcome]:
    """The outcomes of all mutants, in their order, `jobs` at a time."""
    with pristine(mutants, root) as copy, ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda mutant: judge(mutant, copy), mutants)


def chosen(names: Sequence[str] | None) -> tuple[Mutant, ...]:
    """The mutants of these names, all without; `ValueError` for a name that there is not."""
    known = {mutant.name: mutant for mutant in MUTANTS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"there is no mutant {name!r}; --list shows their names")
    return tuple(known[name] for name in names) if names else MUTANTS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks that the tests notice deliberate mistakes.")
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant (may be repeated)")
    parser.add_argument("--list", action="store_true", help="show the mutants and plant none")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at a time (default 2)")
    options = parser.parse_args(arguments)
    try:
        if options.jobs < 1:
            raise ValueError(f"--jobs is {options.jobs}; plant at least 1 at a time")
        mutants = chosen(options.only)
        if options.list:
            for mutant in mutants:
                print(f"{mutant.name}\n    {mutant.file}: {mutant.why}\n    {', '.join(mutant.tests)}")
            return 0
        lost = 0
        for outcome in judge_all(mutants, options.jobs):
            lost += outcome.verdict != "killed"
            line = f"{outcome.verdict:8} {outcome.duration_s:5.1f} s  {outcome.mutant.name}: {outcome.detail}"
            print(line, flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(mutants) - lost} of {len(mutants)} mutants killed")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())

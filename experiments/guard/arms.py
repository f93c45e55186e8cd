"""The arms of a guard run: head, base, and the base again as the control, in two checkouts.

The base is the commit where HEAD left a given revision, checked out by `git worktree`; the next guard removes
what a killed guard left. Pipes carry JSON, never pickles: the process may run any revision's code.

For a command, a sample is one run in the folder of its revision, and its value the number that it prints:
seconds, instructions, or a rate. So start-up only counts if the command counts it. Only PYTHONPATH is set, so
that a Python program imports its own revision's modules.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from gpipe_bench.harness.processes import program, run
from gpipe_bench.harness.rounds import ARMS, LOOKS, Sample

WORKER = Path(__file__).with_name("worker.py")
START_S, BUILD_S, ANSWER_S = 120.0, 180.0, 60.0  # seconds; a longer answer counts as hung
BUILD_TIMEOUT_S = 900  # seconds for `--build`
GIT_TIMEOUT_S = 120
TAIL_BYTES = 2000  # of a process's standard error, in error messages

TIMEOUT_S = 60.0
TAIL = 5  # lines of a command's output, in error messages
UNIT_DIGITS = 0.5  # a factor of 3 around a power of 1000
SHOWN = 40  # characters of a command in a table

_NUMBER = re.compile(r"(?<![\w.,])[-+]?(?:\d[\d.,]*|\.\d+)(?:[eE][-+]?\d+)?")
"""`12`, `1,234.5`, `15,16` and `3e-4`, also before a unit as in `12ms`; not the digits of `cpu0`."""
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""Escape sequences such as colours, whose digits are no numbers."""


@dataclass(frozen=True)
class Command:
    """A command line, and how to find the number in its standard output.

    Args:
        line: for the shell
        pattern: a regular expression for the number, or with one group; "": any number. The last match counts
        higher_is_better: whether the number is a rate
        timeout_s: seconds after which a run counts as hung

    Raises ValueError for an empty line, a time that is not positive, and an invalid expression.
    """

    line: str
    pattern: str = ""
    higher_is_better: bool = False
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if not self.line.strip():
            raise ValueError('--command is empty; give what prints a number, such as "python bench.py"')
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"--timeout-s is {self.timeout_s:g}; give the seconds that one run may take")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"--number {self.pattern!r} is no regular expression: {error}") from error
        if groups > 1:
            raise ValueError(
                f"--number {self.pattern!r} has {groups} groups; put one around the number, and (?:...) "
                "elsewhere"
            )

    @property
    def name(self) -> str:
        """Name of the benchmark: the command line, shortened if it is long."""
        return self.line if len(self.line) <= SHOWN else f"{self.line[: SHOWN - 3]}..."

    def number(self, said: str) -> float:
        """The number of an output that counts. Raises ValueError where there is none, or none above 0."""
        said = _ESCAPES.sub("", said)
        found = re.findall(self.pattern, said, re.MULTILINE) if self.pattern else _NUMBER.findall(said)
        if not found:
            what = f"nothing that --number {self.pattern!r} matches" if self.pattern else "no number"
            raise ValueError(f"printed {what} on standard output, but {_tail(said) or 'nothing at all'}")
        try:
            number = _value(found[-1])
        except ValueError as error:
            raise ValueError(f"printed {found[-1]!r}, which is no number; --number REGEX names it") from error
        if not 0 < number < math.inf:
            raise ValueError(f"printed {number:g}; ratios are compared, so print numbers above 0")
        return number


class CommandArm:
    """One revision, measured by a command that is run in its folder."""

    def __init__(self, name: str, tree: Path, command: Command, modules: str) -> None:
        self._where, self._tree, self.command = f"{name} ({tree})", tree, command
        self._environment = {**os.environ, "PYTHONPATH": modules}

    def sample(self) -> Sample:
        """Sample of one run; its `wall_s` is the number that is compared, larger if worse.

        Raises ValueError, with the revision, for a run that fails, hangs, or prints no number.
        """
        command = self.command
        what = f"--command {command.line!r} of {self._where}"
        said = _said(
            what, command.line, command.timeout_s, "; --timeout-s gives it more",
            "; what the base has not yet can lie outside of the repository, and --build builds what must be "
            "built", cwd=self._tree, env=self._environment,
        )  # fmt: skip
        try:
            number = command.number(said)
        except ValueError as error:
            raise ValueError(f"{what} {error}") from error
        return Sample(1 / number if command.higher_is_better else number)


def check_numbers(numbers: Mapping[str, Sequence[float]], command: Command) -> None:
    """ValueError if no number ever changes before the first look and no pattern names it, and if a number is
    about a power of 1000 times the base's: its unit has changed, as timeit's does. Larger numbers are worse.
    """

    def told(level: float) -> float:
        return 1 / level if command.higher_is_better else level

    base = statistics.median(numbers["base"])
    is_late = len(numbers["base"]) >= 2 * LOOKS[0]  # short numbers may be equal a few times
    if is_late and not command.pattern and all(len({*each}) == 1 for each in numbers.values()):
        raise ValueError(
            f"--command {command.line!r} printed {told(base):g} last in every run of the base, and no "
            "revision's number ever changed, as no time does; --number REGEX names the number, also an exact "
            "one"
        )
    for arm, levels in numbers.items():
        for level in levels:
            digits = math.log10(level / base)
            power = round(digits / 3)
            if power and abs(digits - 3 * power) < UNIT_DIGITS:
                raise ValueError(
                    f"the command's number is {told(level):g} of the {arm} and {told(base):g} of the base, "
                    "about a power of 1000 apart: its unit changes; print one unit, as `python -m timeit -u "
                    "msec` does"
                )


def _value(text: str) -> float:
    """The value of `1,234.5` or `15,16`. Raises ValueError if it is ambiguous."""
    text = text.rstrip(".,") if not text.endswith("e") else text
    if _THOUSANDS.fullmatch(text):
        return float(text.replace(",", ""))
    return float(text.replace(",", ".") if "." not in text else text)


def _said(
    what: str, command: str | Sequence[str], timeout_s: float, if_late: str = "", if_failed: str = "",
    **options: Any,
) -> str:  # fmt: skip
    """A program's standard output. Raises ValueError, which begins with `what`, if it fails or hangs."""
    try:
        done = run(command, timeout_s, **options)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{what} has not ended for {timeout_s:g} s{if_late}") from None
    if done.returncode:
        told = _tail(done.stderr or done.stdout)
        raise ValueError(f"{what} failed with status {done.returncode}: {told}{if_failed}")
    return done.stdout


def _tail(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-TAIL:])


@dataclass(frozen=True)
class Subject:
    """What is measured: a folder, by the benchmarks of a file or by a command.

    Args:
        root: the folder, inside a git work tree; measured with uncommitted changes
        benchmarks: names of the benchmarks
        folders: import paths, below `root`
        file: a Python file with a dictionary BENCHMARKS of functions, unless a `command` is timed
        command: the command to measure instead
        build: a command that prepares a checkout
    """

    root: Path
    benchmarks: Sequence[str]
    folders: Sequence[str] = (".",)
    file: Path | None = None
    command: Command | None = None
    build: str = ""

    def prepare(self, tree: Path, where: str) -> None:
        """Runs the build command in a checkout. Raises ValueError with the end of its output."""
        if self.build:
            _said(f"--build {self.build!r} in {where}", self.build, BUILD_TIMEOUT_S, cwd=tree)

    def modules(self, tree: Path) -> str:
        """PYTHONPATH for measuring a checkout; installed packages come after it."""
        places = [str(tree / folder) for folder in self.folders]
        return os.pathsep.join(filter(None, (*places, os.environ.get("PYTHONPATH"))))


def subject_of(
    folder: Path, file: Path | None, command: Command | None, folders: Sequence[str] = (), build: str = ""
) -> Subject:
    """The subject in a repository, by a file of benchmarks or a command.

    Default `folders`: the repository's top, and its `src` if there is one. Raises ValueError, with the
    remedy, if nothing can be measured.
    """
    if not folder.is_dir():
        raise ValueError(f"--repo {folder} is no folder; name the repository to be guarded")
    root = folder.resolve()
    if top_of(root) is None:
        raise ValueError(
            f"{root} is in no git repository that can be read; two revisions are compared, so name a clone"
        )
    if (file is None) == (command is None):
        raise ValueError(
            "name one thing to be timed: --benchmarks FILE for functions, or --command LINE for what prints "
            "a number"
        )
    for each in folders:
        if not (root / each).is_dir():
            raise ValueError(f"--path {each}: {root} has no such folder")
    folders = folders or ((".", "src") if (root / "src").is_dir() else (".",))
    if command is not None:
        return Subject(root, [command.name], folders, None, command, build)
    if file is None or not file.is_file():
        raise ValueError(f"--benchmarks {file} is no file")
    return Subject(root, [], folders, file.resolve(), None, build)


def benchmarks_of(subject: Subject) -> list[str]:
    """The names of the benchmarks in a subject's file; their code does not run in this process.

    Raises ValueError if there are none.
    """
    with tempfile.TemporaryDirectory(prefix="guard-") as folder, ExitStack() as stack:
        arm = Arm("head", subject.root, subject, folder, stack)
        try:
            arm.receive(START_S)
            names: list[str] = arm.ask(ANSWER_S, do="names")["names"]
            return names
        except WorkerError as error:
            raise ValueError(f"--benchmarks {subject.file} can't be used: {error}") from error


@contextmanager
def arms_of(
    subject: Subject, base: Path, control: Path | None = None, order: Sequence[str] = ARMS
) -> Iterator[dict[str, Any]]:
    """The arms by name, each an `Arm` in a fresh process or a `CommandArm`, started in this order, ended and
    cleaned up after the block. `control` is a second checkout of the base, if any. Raises WorkerError if a
    revision can't be loaded.
    """
    trees = {"base": base, "head": subject.root, "control": control or base}
    named = {"base": "base", "head": "head", "control": "base"}  # in messages
    if subject.command is not None:
        yield {
            name: CommandArm(named[name], trees[name], subject.command, subject.modules(trees[name]))
            for name in order
        }
        return
    with tempfile.TemporaryDirectory(prefix="guard-") as folder, ExitStack() as stack:
        arms = {name: Arm(named[name], trees[name], subject, folder, stack) for name in order}
        for arm in arms.values():
            arm.receive(START_S)
        yield arms


class Built(NamedTuple):
    """Result of building a benchmark."""

    result: float | None = None  # its first step's result, if that is a number
    compiled: Sequence[str] = ()  # compiled modules of the revision, not in git


class WorkerError(RuntimeError):
    """A process failed or hung. `lacks`: its revision lacks what a benchmark uses."""

    lacks = False


class Arm:
    """One revision in a process with one thread and no GPU, which writes nothing into its tree.

    Its output is kept and shown if it fails. If this process ends, the pipe closes and the arm ends, too.
    """

    def __init__(self, name: str, tree: Path, subject: Subject, temporary: str, stack: ExitStack) -> None:
        self.name = f"{name} ({tree})"
        self._said = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._pipe, theirs = Pipe()
        given = (WORKER, theirs.fileno(), tree, subject.root, subject.file)
        environment = {
            **os.environ,
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": subject.modules(tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "TMPDIR": temporary,
        }
        started = program(
            [sys.executable, "-P", *map(str, given)], env=environment, pass_fds=[theirs.fileno()],
            stdout=self._said, stderr=self._said,
        )  # fmt: skip
        self._process = stack.enter_context(started)
        stack.enter_context(self._pipe)
        theirs.close()

    def build(self, benchmark: str) -> Built:
        """Builds the benchmark and runs its first steps."""
        return Built(**self.ask(BUILD_S, do="build", benchmark=benchmark))

    def sample(self, benchmark: str, repeats: int) -> Sample:
        """The mean over so many steps."""
        return Sample(**self.ask(ANSWER_S, do="sample", benchmark=benchmark, repeats=repeats))

    def ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises WorkerError as `receive`."""
        with contextlib.suppress(OSError):  # the arm has ended: `receive` says why
            self._pipe.send_bytes(json.dumps(request).encode())
        return self.receive(timeout_s)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next answer. Raises WorkerError if it is an error or comes too late."""
        try:
            if not self._pipe.poll(timeout_s):
                raise self._failure(f"has not answered for {timeout_s:.0f} s")
            reply: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._failure("ended") from error
        if "error" in reply:
            told = WorkerError(f"{self.name}: {reply['error']}")
            told.lacks = reply["lacks"]
            raise told
        return reply

    def _failure(self, what: str) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)  # waits for its last output
        status = self._process.poll()
        how = "" if status is None else f" with exit status {status}"
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - TAIL_BYTES))
        tail = self._said.read().decode("utf-8", "backslashreplace").strip()
        return WorkerError(f"the process of {self.name} {what}{how}" + (f":\n{tail}" if tail else ""))


# The checkout of the base

DEEPER = "this clone is shallow: git fetch --unshallow, or fetch-depth: 0 in the checkout step"


class Base(NamedTuple):
    """The revision to compare with: its name, commit and checkout."""

    ref: str
    commit: str
    path: Path


@contextlib.contextmanager
def base_tree(root: Path, ref: str) -> Iterator[Base]:
    """Checks out the commit where the working tree at `root` left `ref`, until the block ends.

    Raises ValueError, with the remedy, like `merge_base`, and if a submodule can't be checked out.
    """
    commit = merge_base(root, ref)
    prefix = _git(root, "rev-parse", "--show-prefix")
    _remove_left(root)
    folder = Path(tempfile.mkdtemp(prefix=f"guard-{os.getpid()}-"))
    path = folder / "base"
    try:
        # The user's checkout hooks must not run here.
        without_hooks = ("-c", f"core.hooksPath={os.devnull}")
        _git(root, *without_hooks, "worktree", "add", "--quiet", "--detach", os.fspath(path), commit)
        if (path / ".gitmodules").is_file():
            try:
                _git(path, *without_hooks, "submodule", "update", "--init", "--recursive", "--quiet")
            except ValueError as error:
                raise ValueError(f"the submodules of the base can't be checked out: {error}") from error
        yield Base(ref, commit, path / prefix)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(ValueError):
            _git(root, "worktree", "prune")


def _remove_left(root: Path) -> None:
    """Removes checkouts that killed guards left."""
    for line in _git(root, "worktree", "list", "--porcelain").splitlines():
        folder = Path(line.removeprefix("worktree ")).parent
        name = re.fullmatch(r"guard-(\d+)-\w+", folder.name)
        if line.startswith("worktree ") and name and not psutil.pid_exists(int(name[1])):
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ValueError):
        _git(root, "worktree", "prune")


def merge_base(root: Path, ref: str) -> str:
    """The commit where HEAD left `ref`. Raises ValueError, with the remedy, for an unknown revision, and if a
    shallow clone lacks the common commit.
    """
    is_shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except ValueError as error:
        raise ValueError(
            f"unknown revision {ref!r}; {f'{DEEPER}; ' if is_shallow else ''}fetch it first (git fetch), or "
            "name a branch, tag or commit that `git rev-parse` knows, such as HEAD~1"
        ) from error
    try:
        return _git(root, "merge-base", commit, "HEAD")
    except ValueError as error:
        remedy = DEEPER if is_shallow else "compare with a revision of the same history"
        raise ValueError(f"{ref!r} and HEAD have no common commit here; {remedy}") from error


def top_of(folder: Path) -> Path | None:
    """The top of a folder's git working tree; None outside readable repositories."""
    try:
        return Path(_git(folder, "rev-parse", "--show-toplevel")).resolve()
    except ValueError:
        return None


def _git(root: Path, *arguments: str) -> str:
    """A git command's output, stripped. Raises ValueError with git's message."""
    # In a hook git sets GIT_ variables to the hook's own repository and index.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", os.fspath(root), *arguments]
    try:
        return _said(f"git {arguments[0]}", command, GIT_TIMEOUT_S, env=environment).strip()
    except OSError as error:
        raise ValueError(f"git can't be started: {error}") from error

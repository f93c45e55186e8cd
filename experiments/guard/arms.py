"""What a guard run measures, and the processes of its three arms: base, head, and the base as the control.

What is compared must live in processes of its own, or two versions of a package could not be loaded; and they
must outlive the single measurement, or start-up would be measured. Lines of JSON cross the pipes, never
pickles: the code at the other end may be any revision.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpipe_bench.experiments.guard.command import Command, CommandArm
from gpipe_bench.experiments.guard.trees import top_of
from gpipe_bench.harness.guard import ARMS, Sample

WORKER = Path(__file__).with_name("worker.py")
START_S, BUILD_S, ANSWER_S = 120.0, 180.0, 60.0  # an answer that takes longer is a hang
BUILD_TIMEOUT_S = 900  # for the command of `--build`
TAIL_BYTES = 2000  # of a process's standard error, in the message about its failure


@dataclass(frozen=True)
class Subject:
    """The folder that is measured, by the benchmarks of a file or by a command.

    Args:
        root: in a git work tree; what is measured, as it lies there.
        benchmarks: names, and what they are.
        folders: where modules are imported from, below `root`.
        file: a Python file with a dictionary BENCHMARKS of functions, unless a `command` is timed.
        build: a command that makes a checkout usable.
    """

    root: Path
    benchmarks: Mapping[str, str]
    folders: Sequence[str] = (".",)
    file: Path | None = None
    command: Command | None = None
    build: str = ""

    def prepare(self, tree: Path, where: str) -> None:
        """Runs the build command in a checkout. Raises ValueError with the end of what it said."""
        if not self.build:
            return
        try:
            done = subprocess.run(
                self.build, cwd=tree, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=BUILD_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"--build {self.build!r} has not ended for {BUILD_TIMEOUT_S} s") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()[-5:]
            raise ValueError(
                f"--build {self.build!r} failed with status {done.returncode} in {where}: " + " / ".join(said)
            )


def subject_of(
    folder: Path, file: Path | None, command: Command | None, folders: Sequence[str] = (), build: str = ""
) -> Subject:
    """The subject to measure in a repository, by a file of benchmarks or a command.

    Where no `folders` are given, modules come from the repository's top, and its `src` if there is one.
    Raises ValueError, with the remedy, where nothing can be measured so.
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
        return Subject(root, {command.name: command.line}, folders, None, command, build)
    assert file is not None
    if not file.is_file():
        raise ValueError(f"--benchmarks {file} is no file")
    return Subject(root, {}, folders, file.resolve(), None, build)


def benchmarks_of(subject: Subject) -> dict[str, str]:
    """The benchmarks of a subject's file, with what they are; their code is not run in this process.

    Raises ValueError where there are none.
    """
    with tempfile.TemporaryDirectory(prefix="guard-") as folder, ExitStack() as stack:
        arm = Arm("head", subject.root, subject, folder, stack)
        arm.wait_until_started()
        try:
            return arm.names()
        except WorkerError as error:
            raise ValueError(f"--benchmarks {subject.file} can't be used: {error}") from error


@contextmanager
def arms_of(subject: Subject, base: Path, control: Path | None = None) -> Iterator[dict[str, Any]]:
    """The arms in fresh processes, which are gone afterwards with all that they have left.

    Each is an `Arm`, or a `CommandArm` where a command is timed. The head is the subject's folder as it lies
    there, and `control` another checkout of the base, if there is one. Raises WorkerError where a revision
    can't be loaded.
    """
    trees = {"base": base, "head": subject.root, "control": control or base}
    if subject.command is not None:
        yield {
            name: CommandArm(name, trees[name], subject.command, _modules(trees[name], subject.folders))
            for name in ARMS
        }
        return
    with tempfile.TemporaryDirectory(prefix="guard-") as folder, ExitStack() as stack:
        arms = {name: Arm(name, trees[name], subject, folder, stack) for name in ARMS}
        for arm in arms.values():
            arm.wait_until_started()
        yield arms


class Built(NamedTuple):
    """Result of building a benchmark."""

    result: float | None = None  # what its first step returns, where that is a number
    compiled: Sequence[str] = ()  # modules of the revision that git does not bring


class Arm:
    """One revision, loaded in a process."""

    def __init__(self, name: str, tree: Path, subject: Subject, temporary: str, stack: ExitStack) -> None:
        given = (WORKER, tree, subject.root, subject.file)
        environment = {**environment_of(tree, subject.folders), "TMPDIR": temporary}
        self._worker = Worker(f"{name} ({tree})", [sys.executable, "-P", *map(str, given)], environment)
        stack.callback(self._worker.kill)

    def wait_until_started(self) -> None:
        self._worker.receive(START_S)

    def names(self) -> dict[str, str]:
        """The benchmarks that the file declares, with what they are."""
        names: dict[str, str] = self._ask(ANSWER_S, do="names")["names"]
        return names

    def build(self, benchmark: str) -> Built:
        """Builds the benchmark and takes its first steps."""
        return Built(**self._ask(BUILD_S, do="build", benchmark=benchmark))

    def sample(self, benchmark: str, repeats: int) -> Sample:
        """The mean of so many steps."""
        return Sample(**self._ask(ANSWER_S, do="sample", benchmark=benchmark, repeats=repeats))

    def _ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        self._worker.send(request)
        return self._worker.receive(timeout_s)


def environment_of(tree: Path, folders: Sequence[str]) -> dict[str, str]:
    """The environment of a process with one thread, no GPU, the packages in `folders` of `tree` first, and
    nothing written into `tree`.
    """
    before = os.environ.get("PYTHONPATH")
    modules = _modules(tree, folders)
    return {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{modules}{os.pathsep}{before}" if before else modules,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }


def _modules(tree: Path, folders: Sequence[str]) -> str:
    return os.pathsep.join(str(tree / folder) for folder in folders)


class WorkerError(RuntimeError):
    """A process failed, hung or said something else than a line of JSON.

    `lacks`: its revision has not what a benchmark asks for.
    """

    lacks = False


class Worker:
    """A process that is kept alive. Its standard error is kept, and shown when it fails.

    It leads a session of its own, so that an interrupt at the keyboard ends it through us, after which it is
    certainly gone. If we vanish, its standard input ends, and so does it.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self._process = subprocess.Popen(
            list(command), env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, start_new_session=True, bufsize=0,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out, self.pid = self._process.stdin, self._process.stdout, self._process.pid
        self._pending = b""

    def send(self, request: Mapping[str, Any]) -> None:
        """Writes one line. Raises WorkerError if nobody reads it."""
        try:
            self._in.write(json.dumps(dict(request)).encode() + b"\n")
        except OSError as error:
            raise self._failure("ended") from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises WorkerError if it says "error", does not come in time, or is no JSON."""
        end_s = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            remaining_s = end_s - time.monotonic()
            if remaining_s <= 0 or not select.select([self._out], [], [], remaining_s)[0]:
                raise self._failure(f"has not answered for {timeout_s:.0f} s")
            data = os.read(self._out.fileno(), 1 << 16)
            if not data:
                raise self._failure("ended")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            reply = json.loads(line)
        except ValueError as error:
            raise self._failure(f"answered {line[:200]!r}, which is no JSON") from error
        if not isinstance(reply, dict):
            raise self._failure(f"answered {line[:200]!r}, which is no object")
        if "error" in reply:
            told = WorkerError(f"{self.name}: {reply['error']}")
            told.lacks = bool(reply.get("lacks"))
            raise told
        return reply

    def kill(self) -> None:
        """Ends the process and its children at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._in, self._out, self._errors):
            with contextlib.suppress(OSError):
                stream.close()

    def _failure(self, what: str) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)  # so that its last words are there
        status = self._process.poll()
        how = "" if status is None else f" with exit status {status}"
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - TAIL_BYTES))
        tail = self._errors.read().decode("utf-8", "backslashreplace").strip()
        return WorkerError(f"the process of {self.name} {what}{how}" + (f":\n{tail}" if tail else ""))

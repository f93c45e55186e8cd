"""What a guard run measures, and the processes of its three arms: base, head, and the base as the control.

Be it this project or somebody else's repository, the rounds and statistics are the same; what differs is
which folder is measured, which benchmarks there are, and what the processes import.

What is compared must live in processes of its own, or two versions of a package could not be loaded; and they
must outlive the single measurement, or start-up would be measured. Lines of JSON cross the pipes, never
pickles: the code at the other end may be any revision.

The base is a second checkout of the repository, for as long as two revisions are compared (`base_tree`). `git
worktree` shares the object store, so it takes a second and needs no network; it is removed whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
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
from gpipe_bench.experiments.guard.worker import BENCHMARKS
from gpipe_bench.harness import ROOT
from gpipe_bench.harness.guard import ARMS, Sample

WORKER = Path(__file__).with_name("worker.py")
START_S, BUILD_S, ANSWER_S = 120.0, 180.0, 60.0  # an answer that takes longer is a hang
BUILD_TIMEOUT_S = 900  # for the command of `--build` or `--setup`
TAIL_BYTES = 2000  # of a process's standard error, in the message about its failure


class Timed(NamedTuple):
    """What must be known of a benchmark outside of the processes that run it."""

    describe: str
    num_processes: int = 1


OURS = {name: Timed(each.describe, each.num_processes) for name, each in BENCHMARKS.items()}


@dataclass(frozen=True)
class Subject:
    """The folder that is measured, by what, and the folders in it that modules are imported from.

    `engine` and `file` are what the processes time (`worker.py`), unless a `command` is timed; without all of
    them it is this project. `build` is a command that makes a checkout usable.
    """

    root: Path
    benchmarks: Mapping[str, Timed]
    folders: Sequence[str] = (".",)
    engine: str = ""
    file: str = ""
    build: str = ""
    command: Command | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is this project, with its own revisions."""
        return not (self.engine or self.file or self.command)

    def prepare(self, tree: Path, where: str) -> None:
        """Runs the build command in a checkout. Raises ValueError with the end of what it said."""
        if not self.build:
            return
        option = "--setup" if self.command else "--build"
        try:
            done = subprocess.run(
                self.build, cwd=tree, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=BUILD_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{option} {self.build!r} has not ended for {BUILD_TIMEOUT_S} s") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()[-5:]
            raise ValueError(
                f"{option} {self.build!r} failed with status {done.returncode} in {where}: "
                + " / ".join(said)
            )


def this_project() -> Subject:
    """The checkout whose code is running."""
    return Subject(ROOT, OURS)


def repository(
    folder: Path, engine: str, file: Path | None, folders: Sequence[str], build: str = "",
    command: Command | None = None,
) -> Subject:  # fmt: skip
    """Somebody else's repository.

    folder: in a git work tree; what is measured, as it lies there.
    engine: `module:attribute` of a factory of engines (docs/own-engine.md), or "".
    file: a Python file with a dictionary BENCHMARKS of functions, or None.
    folders: where modules are imported from, below `folder`; none: itself, and its `src` if there is one.
    build: a command to be run in every tree before it is measured.
    command: what prints a number, instead of an engine and functions.

    Raises ValueError, with the remedy, where nothing can be measured so.
    """
    if not folder.is_dir():
        raise ValueError(f"--repo {folder} is no folder; name the repository to be guarded")
    root = folder.resolve()
    if top_of(root) is None:
        raise ValueError(
            f"{root} is in no git repository that can be read; two revisions are compared, so name a clone"
        )
    if not engine and file is None and command is None:
        raise ValueError(
            "--repo needs what is to be timed there: --command LINE for what prints a number, --engine "
            "module:attribute for a pipeline engine (docs/own-engine.md), or --benchmarks FILE for functions"
        )
    if command is not None and (engine or file is not None):
        raise ValueError("--command is timed alone: leave out --engine and --benchmarks, or guard twice")
    module, colon, attribute = engine.partition(":")
    parts = (*module.split("."), *attribute.split("."))
    if engine and not (colon and all(part.isidentifier() for part in parts)):
        raise ValueError(
            f"engine {engine!r} is not module:attribute; write mine:MyEngine for MyEngine in mine.py"
        )
    if file is not None and not file.is_file():
        raise ValueError(f"--benchmarks {file} is no file")
    for each in folders:
        if not (root / each).is_dir():
            raise ValueError(f"--path {each}: {root} has no such folder")
    if not folders:
        folders = (".", "src") if (root / "src").is_dir() else (".",)
    benchmarks = dict(OURS) if engine else {}
    if command is not None:
        benchmarks = {command.name: Timed(command.line)}
    subject = Subject(
        root, benchmarks, tuple(folders), engine, "" if file is None else str(file.resolve()), build, command
    )
    if file is not None:
        with ExitStack() as stack:  # their code is not run in this process
            arm = Arm("head", root, subject, 1, Path("unused"), stack)
            arm.wait_until_started()
            try:
                names = arm.names()
            except WorkerError as error:
                raise ValueError(f"--benchmarks {file} can't be used: {error}") from error
        if twice := sorted(names.keys() & benchmarks.keys()):
            raise ValueError(
                f"{file} declares {', '.join(twice)}, which is a benchmark of every engine; rename it"
            )
        benchmarks |= {name: Timed(describe) for name, describe in names.items()}
    return subject


@contextmanager
def arms_of(
    subject: Subject, base: Path, names: Sequence[str], control: Path | None = None
) -> Iterator[dict[str, Any]]:
    """The arms for these benchmarks, in fresh processes that are gone afterwards.

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
    count = max(subject.benchmarks[name].num_processes for name in names)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="guard-")))
        arms = {name: Arm(name, trees[name], subject, count, folder / name, stack) for name in ARMS}
        for arm in arms.values():
            arm.wait_until_started()
        yield arms


class Built(NamedTuple):
    """What came of building a benchmark."""

    result: float | None  # of its first step, where that is a number
    refused: str = ""  # why the revision can't run it
    what: str = "the first loss"  # that the number is


class Arm:
    """One revision, loaded in a process per stage where a benchmark wants that, else all in the first."""

    def __init__(
        self, name: str, tree: Path, subject: Subject, num_processes: int, store: Path, stack: ExitStack
    ) -> None:
        self._benchmarks = subject.benchmarks
        self._workers = []
        environment = environment_of(tree, subject.folders)
        for rank in range(num_processes):
            asked = (WORKER, tree, rank, num_processes, store, subject.engine, subject.file, subject.root)
            command = [sys.executable, "-P", *map(str, asked)]
            self._workers.append(Worker(f"{name} ({tree})", command, environment))
            stack.callback(self._workers[-1].kill)

    def wait_until_started(self) -> None:
        for worker in self._workers:
            worker.receive(START_S)

    def names(self) -> dict[str, str]:
        """The benchmarks that the repository's own file declares, with what they are."""
        (reply,) = self._ask(1, {"do": "names"}, ANSWER_S)
        names: dict[str, str] = reply["names"]
        return names

    def build(self, benchmark: str) -> Built:
        """Builds it and takes its first step."""
        count = self._benchmarks[benchmark].num_processes
        replies = self._ask(count, {"do": "build", "benchmark": benchmark}, BUILD_S)
        return Built(
            next((reply["result"] for reply in replies if reply.get("result") is not None), None),
            next((reply["refused"] for reply in replies if "refused" in reply), ""),
            next((reply["what"] for reply in replies if "what" in reply), "the first loss"),
        )

    def sample(self, benchmark: str, repeats: int) -> Sample:
        """A step takes as long as its slowest process, and the processor time of all."""
        count = self._benchmarks[benchmark].num_processes
        found = self._ask(count, {"do": "sample", "benchmark": benchmark, "repeats": repeats}, ANSWER_S)
        return Sample(max(each["wall_s"] for each in found), sum(each["cpu_s"] for each in found))

    def _ask(self, count: int, request: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        workers = self._workers[:count]
        for worker in workers:
            worker.send(request)
        return [worker.receive(timeout_s) for worker in workers]


def environment_of(tree: Path, folders: Sequence[str]) -> dict[str, str]:
    """This environment with one thread, no GPU, the packages in `folders` of `tree` first, and nothing
    written into it.
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
    """A process failed, hung or said something else than a line of JSON."""


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
            raise WorkerError(f"{self.name}: {reply['error']}")
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


@dataclass(frozen=True)
class Base:
    """The revision that the working tree is compared with, and where it is checked out."""

    ref: str
    commit: str
    path: Path


@contextlib.contextmanager
def base_tree(root: Path, ref: str) -> Iterator[Base]:
    """Checks out the commit where the working tree at `root` left `ref`, until the block ends.

    Raises ValueError, with the remedy, without git or a repository, for an unknown revision, and where the
    history that was fetched does not reach the common commit.
    """
    commit = merge_base(root, ref)
    prefix = _git(root, "rev-parse", "--show-prefix")
    _remove_left(root)
    folder = Path(tempfile.mkdtemp(prefix=f"guard-{os.getpid()}-"))
    path = folder / "base"
    try:
        # A checkout hook is the user's, for checkouts of the user's.
        without_hooks = ("-c", f"core.hooksPath={os.devnull}")
        _git(root, *without_hooks, "worktree", "add", "--quiet", "--detach", os.fspath(path), commit)
        if (path / ".gitmodules").is_file():
            try:
                _git(path, *without_hooks, "submodule", "update", "--init", "--recursive", "--quiet")
            except ValueError as error:
                raise ValueError(f"the submodules of the base can't be checked out: {error}") from error
        yield Base(ref, commit, path / prefix)
    finally:
        with contextlib.suppress(ValueError):
            _git(root, "worktree", "remove", "--force", os.fspath(path))
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(ValueError):
            _git(root, "worktree", "prune")


def _remove_left(root: Path) -> None:
    """Removes checkouts of guards that were killed."""
    for line in _git(root, "worktree", "list", "--porcelain").splitlines():
        folder = Path(line.removeprefix("worktree ")).parent
        name = re.fullmatch(r"guard-(\d+)-\w+", folder.name)
        if line.startswith("worktree ") and name and not _is_alive(int(name[1])):
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ValueError):
        _git(root, "worktree", "prune")


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def merge_base(root: Path, ref: str) -> str:
    """The commit where HEAD left `ref`."""
    try:
        _git(root, "rev-parse", "--show-toplevel")
    except ValueError as error:
        raise ValueError(
            f"{root} is no git repository that can be read ({error}); "
            "two revisions are compared, so run this in a clone"
        ) from error
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except ValueError as error:
        shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
        raise ValueError(
            f"unknown revision {ref!r}; "
            + (
                "this clone is shallow: git fetch --unshallow, or fetch-depth: 0 in the checkout step; "
                * shallow
            )
            + "fetch it first (git fetch), or name a branch, tag or commit that "
            "`git rev-parse` knows, such as HEAD~1"
        ) from error
    try:
        return _git(root, "merge-base", commit, "HEAD")
    except ValueError as error:
        shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
        remedy = (
            "this clone is shallow: git fetch --unshallow, or fetch-depth: 0 in the checkout step"
            if shallow
            else "compare with a revision of the same history"
        )
        raise ValueError(f"{ref!r} and HEAD have no common commit here; {remedy}") from error


def check_place(root: Path, module: str, cwd: Path) -> None:
    """Raises ValueError, with the remedy, unless `cwd` lies in the checkout whose code is running.

    `root` is the folder of that code and `module` one of its files. A guard that is started elsewhere,
    through PYTHONPATH or an installation, would vouch for another checkout than its user has changed.
    Without any repository, as in an unpacked archive, the folders decide.
    """
    root, cwd = root.resolve(), cwd.resolve()
    ours, theirs = top_of(root), top_of(cwd)
    if ours is None and theirs is None and cwd.is_relative_to(root):
        return
    if ours is None or not _git(root, "ls-files", "--", module):
        raise ValueError(
            f"this guard runs from {root}, which is not a checkout of the repository that is to be guarded; "
            "start the guard in a clone, from its folder"
        )
    if theirs is None:
        raise ValueError(
            f"{cwd} is in no git repository that can be read, and this guard measures {root}; to guard that, "
            f"cd {root}"
        )
    if theirs == ours:
        return
    there = theirs / root.relative_to(ours)
    if (there / module).exists():
        raise ValueError(f"this guard measures {root}; to guard {there}, start from its folder: cd {there}")
    raise ValueError(
        f"{theirs} is another repository, and without --repo this guard measures {root}; to guard an engine "
        f"there: guard --repo {theirs} --engine module:attribute --base REF; to guard this one: cd {root}"
    )


def top_of(folder: Path) -> Path | None:
    """The top of the git working tree that a folder lies in; None in no repository that can be read."""
    try:
        return Path(_git(folder, "rev-parse", "--show-toplevel")).resolve()
    except ValueError:
        return None


def _git(root: Path, *arguments: str) -> str:
    """Output of a git command, stripped. Raises ValueError with what git said."""
    # Inside a hook git points these at the hook's own repository and index.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(root), *arguments],
            capture_output=True, env=environment, stdin=subprocess.DEVNULL, check=False, text=True,
            timeout=120,
        )  # fmt: skip
    except OSError as error:
        raise ValueError(f"git can't be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"git {arguments[0]} has not ended for 120 s") from error
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"git {arguments[0]} failed with status {done.returncode}")
    return done.stdout.strip()

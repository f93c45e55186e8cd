"""What a guard run is about: this project, or an engine or plain functions in somebody else's repository.

The statistics, the rounds and the control are the same for all. What differs is which folder is measured,
which benchmarks there are, and what the processes run.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gpipe_bench.experiments.guard.arms import Arm, Program, Timed
from gpipe_bench.experiments.guard.benchmarks import BENCHMARKS
from gpipe_bench.harness.guard.tree import top_of
from gpipe_bench.harness.places import ROOT

OTHER_WORKER = Path(__file__).with_name("other_worker.py")
BUILD_TIMEOUT_S = 900


@dataclass(frozen=True)
class OwnFunction:
    """A benchmark of the guarded repository's own: a function, in one process."""

    describe: str
    num_processes: int = 1


@dataclass(frozen=True)
class Subject:
    """The folder that is measured, by what, through which program."""

    root: Path
    benchmarks: Mapping[str, Timed]
    program: Program
    build: str = ""  # a command that makes a fresh checkout usable
    is_own: bool = False  # this project, with its own revisions

    def prepare(self, tree: Path) -> None:
        """Runs the build command in a fresh checkout. Raises ValueError with the end of what it said."""
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
                f"--build {self.build!r} failed with status {done.returncode} in the base's checkout: "
                + " / ".join(said)
            )


def this_project() -> Subject:
    """The checkout whose code is running."""
    return Subject(ROOT, BENCHMARKS, Program(), is_own=True)


def repository(
    folder: Path, engine: str, file: Path | None, folders: Sequence[str], build: str = ""
) -> Subject:
    """Somebody else's repository.

    folder: in a git work tree; what is measured, as it lies there.
    engine: `module:attribute` of a factory of engines (docs/own-engine.md), or "".
    file: a Python file with a dictionary BENCHMARKS of functions, or None.
    folders: where modules are imported from, below `folder`; none: itself, and its `src` if there is one.
    build: a command to be run in the base's checkout before it is measured.

    Raises ValueError, with the remedy, where nothing can be measured so, and WorkerError where the file
    can't be loaded.
    """
    if not folder.is_dir():
        raise ValueError(f"--repo {folder} is no folder; name the repository to be guarded")
    root = folder.resolve()
    if top_of(root) is None:
        raise ValueError(
            f"{root} is in no git repository that can be read; two revisions are compared, so name a clone"
        )
    if not engine and file is None:
        raise ValueError(
            "--repo needs what is to be timed there: --engine module:attribute for a pipeline engine "
            "(docs/own-engine.md), --benchmarks FILE for functions of your own, or both"
        )
    if engine and not _is_name(engine):
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
    where = "" if file is None else str(file.resolve())
    program = Program(OTHER_WORKER, (engine, where), tuple(folders))
    benchmarks: dict[str, Timed] = dict(BENCHMARKS) if engine else {}
    if file is not None:
        declared = _declared(root, program)
        twice = sorted(declared.keys() & benchmarks.keys())
        if twice:
            raise ValueError(
                f"{file} declares {', '.join(twice)}, which is a benchmark of every engine; rename it"
            )
        benchmarks |= declared
    return Subject(root, benchmarks, program, build)


def _declared(root: Path, program: Program) -> dict[str, OwnFunction]:
    """The benchmarks of the file, asked of a process: their code is not run in this one."""
    with ExitStack() as stack:
        arm = Arm("head", root, 1, Path("unused"), 0.0, stack, program=program)
        arm.wait_until_started()
        return {name: OwnFunction(describe) for name, describe in arm.names().items()}


def _is_name(engine: str) -> bool:
    module, colon, attribute = engine.partition(":")
    return bool(colon) and all(word.isidentifier() for word in (*module.split("."), *attribute.split(".")))

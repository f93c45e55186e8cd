"""Stores records: one line per case, one file per experiment, only appended to.

A line is on disk before the next case starts, so a killed run loses no finished case. Damage to a file (a
torn tail, an edit, a line of a newer version) costs only its lines and is reported. Several processes may
share the files: an append locks its file, a run its experiment. Without locks (Windows, some network mounts)
single appends stay whole, and work may be done twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .record import Record, decode, encode


class StoreError(OSError):
    """A record could not be stored: file, cause and remedy."""


@dataclass(frozen=True)
class Problem:
    """A line that was skipped, and why. `line` counts from 1; 0 means the whole file."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else f"{self.path}"
        return f"{place}: {self.message}; skipped"


@dataclass(frozen=True)
class Loaded:
    """All readable records of an experiment in file order, and its unreadable lines."""

    records: tuple[Record, ...]
    problems: tuple[Problem, ...]


class Store:
    """The records in a folder, `<root>/<experiment>.jsonl`, or in one file for all experiments, which is only
    read. Safe for several processes.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def path(self, experiment: str) -> Path:
        """The file of an experiment."""
        return self.root / f"{experiment}.jsonl"

    @contextlib.contextmanager
    def held(self, experiment: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Excludes other runs of the experiment from this folder; `waiting` is called if there is one to wait
        for.
        """
        path = self.path(experiment).with_name(f".{experiment}.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:  # a read-only folder needs no lock
            yield
            return
        with os.fdopen(fd), locked(fd, waiting=waiting):
            yield

    def append(self, record: Record) -> None:
        """Appends one line, complete and on disk, or nothing.

        Raises StoreError (disk full, read-only folder, ...) with the file as it was before.
        """
        path = self.path(record.experiment)
        line = encode(record) + b"\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a+b", buffering=0) as file, locked(file.fileno()):
                _append_whole(file.fileno(), line)
            _sync_folder(path.parent)
        except OSError as error:
            # mkdir says "File exists" if the folder is a file
            cause = "Not a directory" if isinstance(error, FileExistsError) else error.strerror or error
            raise StoreError(
                f"can't write to {path}: {cause}; choose another folder with --results"
            ) from error

    def load(self, experiment: str) -> Loaded:
        """The readable records of the experiment; a missing file counts as empty."""
        path = self.root if self.root.is_file() else self.path(experiment)
        try:
            if path.exists() and not path.is_file():  # reading a named pipe waits for a writer
                return Loaded((), (Problem(path, 0, "not a regular file"),))
            with open(path, "rb") as file, locked(file.fileno(), shared=True):
                content = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return Loaded((), ())
        except OSError as error:
            return Loaded((), (Problem(path, 0, f"can't be read: {error.strerror or error}"),))
        records: list[Record] = []
        problems: list[Problem] = []
        for number, line in enumerate(content.split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                record = decode(line)
                if record.experiment != experiment:
                    if path == self.root:
                        continue
                    raise ValueError(
                        f"a record of {record.experiment!r}, which does not belong into this file"
                    )
                records.append(record)
            except ValueError as error:
                problems.append(Problem(path, number, str(error)))
        return Loaded(tuple(records), tuple(problems))


def lines_of(problems: Sequence[Problem], most: int = 5) -> list[str]:
    """The problems of a file as lines of text: the first `most`, and how many more."""
    lines = [str(problem) for problem in problems[:most]]
    if len(problems) > most:
        left, last = len(problems) - most, problems[-1]
        lines.append(f"{last.path}: {left} more lines can't be read, the last is {last.line}")
    return lines


def latest(records: Iterable[Record]) -> dict[str, Record]:
    """The last record of each case by its identity: last in the file, not by the clock."""
    found: dict[str, Record] = {}
    for record in records:
        found.pop(record.identity, None)  # orders cases by their last records
        found[record.identity] = record
    return found


def select_records(records: Sequence[Record], revision: int, profile: str | None) -> list[Record]:
    """The latest record of each case at this revision and profile; default: the latest profile."""
    current = [record for record in records if record.revision == revision]
    if profile is None and current:
        profile = current[-1].profile
    return list(latest(record for record in current if record.profile == profile).values())


def _append_whole(fd: int, line: bytes) -> None:
    """Appends the line to the locked file as a line of its own, or leaves the file as it was."""
    size = os.fstat(fd).st_size
    if size:
        os.lseek(fd, size - 1, os.SEEK_SET)
        if os.read(fd, 1) != b"\n":  # an incomplete line of a killed writer
            line = b"\n" + line
    try:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


def _sync_folder(folder: Path) -> None:
    """Makes a new file's name durable, where the system can."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces the file as a whole, or leaves it as it was; text as UTF-8. Creates the folder.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(name, 0o644)  # temporary files are private
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # a signal may come after the replacement
            os.unlink(name)
        raise


@contextlib.contextmanager
def locked(fd: int, *, shared: bool = False, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Locks the open file against other processes until the block ends; `shared` admits other readers, and
    `waiting` is called if another process has the lock. Child processes do not keep the lock.
    """
    if fcntl is None:
        yield
        return
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.lockf(fd, kind | fcntl.LOCK_NB)
    except OSError as error:  # otherwise the file system has no locks
        if error.errno in (errno.EAGAIN, errno.EACCES):
            waiting()
            fcntl.lockf(fd, kind)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.lockf(fd, fcntl.LOCK_UN)

"""Files that several processes share, and that a kill or a full disk may hit at any moment.

A file is written so that nobody ever reads half of it. Locks come in two kinds, and vanish with the process
that held them: a short one around each append, and a claim on a case while it runs, so that two runs of the
same experiment share the work instead of doing it twice. Where the system or the file system has no such
locks (Windows, some network mounts) both are granted at once: single appends stay whole, only work may be
done twice.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_TAKEN = (errno.EAGAIN, errno.EACCES)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces the file, or leaves the one before as it is; text as UTF-8. Makes the folder.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(name, 0o644)  # a temporary file is its owner's alone
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # a signal may come when all is done already
            os.unlink(name)
        raise


@contextlib.contextmanager
def file_lock(fd: int, *, shared: bool = False) -> Iterator[None]:
    """Holds the whole open file against other holders; `shared` admits other readers."""
    if fcntl is None:
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


class Claims:
    """Claims on cases, as byte ranges of one lock file; a killed run leaves none behind.

    A range lock belongs to the process, so it is not kept alive by workers that a killed run leaves
    behind.
    """

    def __init__(self, path: Path) -> None:
        self._fd: int | None = None
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a read-only folder: there is nothing to protect
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    @contextlib.contextmanager
    def claim(self, identity: str, *, wait: bool) -> Iterator[bool]:
        """Yields whether the case is ours to run; with `wait`, returns only when it is."""
        if fcntl is None or self._fd is None:
            yield True
            return
        offset = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:7], "big")
        refusal: int | None = None
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, offset)
        except OSError as error:
            refusal = error.errno
        try:
            yield refusal not in _TAKEN  # any other refusal: a file system without locks
        finally:
            if refusal is None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, offset)

    def close(self) -> None:
        """Gives up everything still claimed."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

"""A process that is kept alive and spoken to in lines of JSON.

What is compared must live in processes of its own, or two versions of a package could not be loaded; and they
must outlive the single measurement, or start-up would be measured. Lines of JSON cross the pipes, never
pickles: the code at the other end may be any revision.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

STOP_S = 5.0  # until a process that was asked to end is killed
TAIL_BYTES = 2000  # of its standard error, in the message about its failure


class WorkerError(RuntimeError):
    """A process failed, hung or said something else than a line of JSON."""


class Worker:
    """One process. Its standard error is kept, and shown when it fails.

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
        assert self._process.stdout is not None
        self._pending = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: Mapping[str, Any]) -> None:
        """Writes one line. Raises WorkerError if nobody reads it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dict(request)).encode() + b"\n")
        except OSError as error:
            raise self._failure("ended") from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises WorkerError if it says "error", does not come in time, or is no JSON."""
        end_s = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            remaining_s = end_s - time.monotonic()
            if remaining_s <= 0 or not self._selector.select(remaining_s):
                raise self._failure(f"has not answered for {timeout_s:.0f} s")
            assert self._process.stdout is not None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
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

    def stop(self) -> None:
        """Ends the process, gently first; it is gone afterwards."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()

    def kill(self) -> None:
        """Ends the process and its children at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._selector.close()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
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

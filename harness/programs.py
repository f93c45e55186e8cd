"""Starts programs that are not ours: each leads a session of its own, so that an interrupt at the keyboard
reaches it through us, and is ended with all that it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from subprocess import DEVNULL, PIPE
from typing import Any


@contextlib.contextmanager
def program(command: str | Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A running program, given as words or as a line for the shell; gone after the block, whatever ends that.

    `options` are those of `subprocess.Popen`.
    """
    is_line = isinstance(command, str)
    with subprocess.Popen(
        command, shell=is_line, stdin=DEVNULL, start_new_session=True, **options
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def run(command: str | Sequence[str], timeout_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a program said, and its status. Raises subprocess.TimeoutExpired."""
    streams: dict[str, Any] = {"stdout": PIPE, "stderr": PIPE, "text": True, "errors": "replace"}
    with program(command, **streams, **options) as process:
        out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(command, process.returncode, out, err)

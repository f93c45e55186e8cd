"""Starts other programs, and ends a command at SIGINT or SIGTERM, whatever it is doing, with all processes
that it has started.

                 .--> handler in the main thread: raises `Stopped`, and everything is left in good order
    signal ------|
                 '--> a byte in a pipe --> thread: after `GRACE_S`, ends what is left by force

The thread is for operations outside Python, and libraries that catch the exception.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from subprocess import DEVNULL, PIPE
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil


GRACE_S = 1.5  # seconds for an orderly exit; a signal ends a command within two
SETTLE_S = 0.2  # seconds in which a signal to all processes reaches this one after it ended a child
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Stop:
    """The state of signals while one command runs."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.held = False  # the handler waits
        self.raised = False
        self.requested = threading.Event()
        self.over = threading.Event()
        self.family: list[psutil.Process] = []

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if self.number is None:  # before any process ends, whose children would be lost
            self.family = _descendants()
        self.request(number)
        if not self.held:
            self.raise_once()

    def request(self, number: int) -> None:
        self.number = self.number or number
        self.requested.set()

    def raise_once(self) -> None:
        if self.number is not None and not self.raised:
            self.raised = True
            raise Stopped(self.number)

    def watch(self, pipe: socket.socket) -> None:
        """The thread: ends everything by force `GRACE_S` after the first signal."""
        received = 0
        while received not in _NUMBERS:
            received = pipe.recv(1)[0]
            if self.over.is_set():
                return
        if not self.over.wait(GRACE_S):
            self.request(received)
            self.end_family()
            with contextlib.suppress(OSError):
                os.write(2, f"ended by {signal.Signals(received).name}\n".encode())
            os._exit(128 + received)

    def end_family(self) -> None:
        """Kills the descendants at the time of the signal, and those started since."""
        for process in {*self.family, *_descendants()}:
            import psutil  # imported when they were found

            with contextlib.suppress(psutil.Error):
                process.kill()


_active: _Stop | None = None


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise `Stopped` once in the main thread, and end the process by force if
    that is not enough. Nothing changes outside the main thread, inside another `stopping`, and for signals
    that the process was told to ignore.
    """
    with contextlib.suppress(ImportError):  # `list --machine` says so
        import psutil  # noqa: F401  # handlers, which may interrupt an import, must not import

    global _active
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    stop = _active = _Stop()
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    os.register_at_fork(after_in_child=lambda: _forget(stop, before))
    wakeup = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=stop.watch, args=(theirs,), daemon=True, name="stopping")
    thread.start()
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, stop.handle)
        yield
    finally:
        stop.held = True  # clean-up must not be interrupted
        signal.set_wakeup_fd(wakeup)
        stop.over.set()
        with contextlib.suppress(BlockingIOError):  # full: the thread wakes anyway
            ours.send(b"\0")
        thread.join()
        if stop.number is not None:
            stop.end_family()
        for number, handler in before.items():
            signal.signal(number, handler)
        theirs.close()
        ours.close()
        _active = None


def check(wait_s: float = 0.0) -> None:
    """Raises `Stopped`, in any thread, if a signal has come or comes within `wait_s`."""
    stop = _active
    if stop is not None and stop.requested.wait(wait_s):
        assert stop.number is not None
        raise Stopped(stop.number)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delays `Stopped` in the main thread to the end of the block."""
    stop = _active
    if stop is None or stop.held or threading.current_thread() is not threading.main_thread():
        yield
        return
    stop.held = True
    try:
        yield
    finally:
        stop.held = False
    stop.raise_once()


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around the start of a process: blocks keyboard interrupts, which go to all processes of a terminal, for
    the new process until it calls `started`; one might come in the middle of an import.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # its start unblocks interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def started(handler: Any = signal.SIG_DFL) -> None:
    """In a new process: sets the handler of interrupts, which also gets one that came before."""
    signal.signal(signal.SIGINT, handler)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def number_of(interrupt: KeyboardInterrupt) -> int:
    """The number of the signal; SIGINT if unknown."""
    return interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT


def _forget(stop: _Stop, before: dict[signal.Signals, Any]) -> None:
    """In a forked child: restores the signal handlers, which were its parent's."""
    global _active
    if _active is stop:
        _active = None
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


def _descendants() -> list[psutil.Process]:
    """All descendants except multiprocessing's resource tracker, which cleans up last."""
    try:
        import psutil
    except ImportError:
        return []
    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if not any("multiprocessing.resource_tracker" in word for word in process.cmdline()):
                    found.append(process)
    return found


# Other programs


@contextlib.contextmanager
def program(command: str | Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A running program, given as words or as a line for the shell; killed after the block with all that it
    has started. It has a session of its own, so that keyboard interrupts reach it only through us. `options`
    are those of `subprocess.Popen`.
    """
    is_line, given = isinstance(command, str), {"stdin": DEVNULL, "start_new_session": True, **options}
    with subprocess.Popen(command, shell=is_line, **given) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def run(command: str | Sequence[str], timeout_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program; returns its output and status. Raises subprocess.TimeoutExpired."""
    streams: dict[str, Any] = {"stdout": PIPE, "stderr": PIPE, "text": True, "errors": "replace"}
    with program(command, **streams, **options) as process:
        out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(command, process.returncode, out, err)

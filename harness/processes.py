"""Starts programs that are not ours, and ends a command by SIGINT and SIGTERM, whatever it is doing, with all
processes that it has started.

                 .--> handler in the main thread: raises `Stopped`, and everything is left in good order
    signal ------|
                 '--> a byte in a pipe --> thread: after `GRACE_S`, ends what is left by force

The second way is for an operation that is not Python's, or a library that takes the exception for its own.
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


GRACE_S = 1.5  # for an orderly exit; a command that was told to end is gone within two seconds
SETTLE_S = 0.2  # in which a signal for all processes reaches us, too, after it has ended one of ours
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Stop:
    """State of the signals while one command runs."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.held = False  # the handler waits
        self.raised = False
        self.requested = threading.Event()
        self.over = threading.Event()
        self.family: list[psutil.Process] = []

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if self.number is None:  # before anybody ends: later the children of those that did are nobody's
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
        """The thread: from the first signal on, the time runs."""
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
        """Ends what was ours when the signal came, and what was started since."""
        for process in {*self.family, *_descendants()}:
            import psutil  # which has found it

            with contextlib.suppress(psutil.Error):
                process.kill()


_active: _Stop | None = None


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise `Stopped` in the main thread, once, and end the process by force where
    that is not enough. In another thread than the main one, inside another `stopping`, and for a signal that
    the process was told to ignore, nothing changes.
    """
    with contextlib.suppress(ImportError):  # `list --machine` says so
        import psutil  # noqa: F401  # a handler may interrupt an import, and should need none itself

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
        stop.held = True  # the way out must not be left half-way
        signal.set_wakeup_fd(wakeup)
        stop.over.set()
        with contextlib.suppress(BlockingIOError):  # full of signals
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
    """Raises `Stopped`, in any thread, if a signal has come, or comes within `wait_s`."""
    stop = _active
    if stop is not None and stop.requested.wait(wait_s):
        assert stop.number is not None
        raise Stopped(stop.number)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delays `Stopped` until the end of the block, if the main thread runs it."""
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
    """Inside, a process may be started: until it calls `started` it is not reached by a keyboard's interrupt,
    which goes to all processes of a terminal and would find it in the middle of an import.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # which lets interrupts through again once it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def started(handler: Any = signal.SIG_DFL) -> None:
    """Called in a new process: sets the handler of interrupts, which also gets one that came meanwhile."""
    signal.signal(signal.SIGINT, handler)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def number_of(interrupt: KeyboardInterrupt) -> int:
    """The signal behind it; the keyboard's, where nothing else is known."""
    return interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT


def _forget(stop: _Stop, before: dict[signal.Signals, Any]) -> None:
    """A forked child has its parent's handlers and pipe: its signals are its own."""
    global _active
    if _active is stop:
        _active = None
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


def _descendants() -> list[psutil.Process]:
    """Children and theirs, but for multiprocessing's own, which tidies up when the last of us is gone."""
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


# Programs that are not ours


@contextlib.contextmanager
def program(command: str | Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A running program, given as words or as a line for the shell; gone after the block, whatever ends that,
    with all that it has started. It leads a session of its own, so that a keyboard's interrupt reaches it
    through us. `options` are those of `subprocess.Popen`.
    """
    is_line, given = isinstance(command, str), {"stdin": DEVNULL, "start_new_session": True, **options}
    with subprocess.Popen(command, shell=is_line, **given) as process:
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

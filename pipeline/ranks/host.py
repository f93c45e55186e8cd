"""What a process of a pipeline is held to on its host: compute threads, a core, how memory comes from the
system, and what processes that it forks do not inherit.

On CPUs the stages compete for cores unless told otherwise, and glibc gives every large tensor back to the
system when it is freed, only to fault its pages in again a moment later: thousands of page faults a step.

A process that is forked, such as the worker of a `DataLoader`, has copies of all sockets, and as long as it
has, no end of this process or of a connection is seen at the other side. So it closes the pipeline's, and is
ended with this process where that is what it is for.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import register_after_fork
from pathlib import Path

import torch

# glibc's mallopt parameters and a size that no tensor of a micro-batch exceeds.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGE_BYTES = -1, -3, 2**30
_PR_SET_PDEATHSIG = 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_cores: list[set[int]] = []  # that this process had before it was pinned
_sockets: set[int] = set()  # of the pipelines of this process, by inode: descriptors are given out again
_forking: dict[str, int] = {}  # this process, and whether its main thread forks


def prepare_process(local_rank: int, *, threads: int = 1, pin: bool = True) -> None:
    """Gives this process `threads` compute threads, the cores of its turn and an allocator that keeps what it
    has.

    With `pin`, local rank r gets the r-th of the allowed cores, or the r-th run of `threads` cores; ranks
    beyond the last core start over, so that stages share cores evenly. That is for stages that compute on
    CPUs: in front of an accelerator the main thread, the engine of the backward and the threads of the
    network would take turns on the one core, and the device would wait for them.
    """
    torch.set_num_threads(threads)
    if pin and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        turns = max(len(cores) // threads, 1)
        first = (local_rank % turns) * threads
        if not _cores:
            _cores.append(set(cores))
            os.register_at_fork(after_in_child=lambda: os.sched_setaffinity(0, _cores[0]))
        os.sched_setaffinity(0, cores[first : first + threads])
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next allocation; does nothing where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def machine_id() -> str:
    """Equal for two processes only if one kernel runs both."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


@contextmanager
def not_inherited() -> Iterator[None]:
    """Sockets that are opened meanwhile are closed in processes that this one forks later."""
    if not _forking and hasattr(os, "register_at_fork"):
        _forking.update(parent=os.getpid(), by_main_thread=False)
        os.register_at_fork(before=_before_fork, after_in_child=_close_sockets)
        register_after_fork(_end_with_parent, lambda end: end())  # when a process knows what it is for
    before = set(_open_sockets().values())
    yield
    after = set(_open_sockets().values())
    _sockets.intersection_update(after)
    _sockets.update(after - before)


def _open_sockets() -> dict[int, int]:
    """The inodes of this process's sockets, by their descriptors."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # the one that lists them
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _before_fork() -> None:
    by_main_thread = threading.current_thread() is threading.main_thread()
    _forking.update(parent=os.getpid(), by_main_thread=by_main_thread)


def _close_sockets() -> None:
    """In the new process. gloo, whose threads are not there, knows the descriptors: they lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor, inode in _open_sockets().items():
        if inode in _sockets:
            os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


def _end_with_parent() -> None:
    """In a new process of `multiprocessing`: one that is to end with its parent does so however that ends, at
    once. With it end the sockets that others than a pipeline have opened, such as the store's. The system
    looks at the thread that has forked; only the main thread lives as long as its process.
    """
    if multiprocessing.current_process().daemon and _forking["by_main_thread"] and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != _forking["parent"]:
            os.kill(os.getpid(), signal.SIGKILL)

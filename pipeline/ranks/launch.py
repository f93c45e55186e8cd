"""Starts one process per stage on this host, and sets its limits: compute threads, a core, and how memory is
allocated. Without limits, stages on CPUs compete for cores, and glibc returns every large tensor to the
system when it is freed, so that the next one faults its pages in again.

For several hosts, or to start a script, use `torchrun` (docs/running.md); a script calls `start_process`
itself.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context, resource_tracker
from typing import Any

import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from .. import devices

# Queues that the driver makes for a device when it is first used, 8 unless somebody says otherwise. A rank
# has up to nine streams; where two share a queue, a wait at its head holds up the send behind it.
_QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
_LOOPBACK = "127.0.0.1"
# Say which accelerators a process may see.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
START_METHOD = "spawn"
_LOOK_S = 0.05  # between two looks at the processes


def launch(
    function: Callable[..., Any],
    num_processes: int,
    *arguments: Any,
    threads: int = 1,
    pin: bool = True,
    device: str = "auto",
) -> list[Any]:
    """Runs `function(*arguments)` in `num_processes` processes that form the default process group; returns
    their results.

    `function` must be importable by name and its results picklable. If a process fails, the others are ended
    and a `torch.multiprocessing.spawn.ProcessException` shows the failure. An interrupt ends all of them and
    is raised; on Linux they end with this process, whatever ends it. No other host reaches the store that
    they meet in, nor, on CPUs, their connections, unless GLOO_SOCKET_IFNAME names another interface.

    `device` is "cpu", "cuda" or another type of accelerator, of which every process gets one, or "auto": an
    accelerator each where there is any, else the CPU. `ValueError`, before anything is started, where there
    are fewer than processes, for a function that a notebook has defined, and on Windows.
    """
    if getattr(function, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"the processes of launch import the function, and {function.__qualname__} was defined in a "
            "notebook or at a prompt, where they can't; write it to a file beside it and import it from there"
        )
    check_devices(device, num_processes)
    if not hasattr(signal, "pthread_sigmask"):
        raise ValueError(
            f"launch needs the signals of Linux or macOS, which {sys.platform} does not have; on Windows "
            "take WSL, or one process"
        )
    with socket.create_server((_LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        # Which only this host reaches: any process that reaches it can hand the others code to run.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    own = get_context(START_METHOD)
    results, connected = own.SimpleQueue(), own.Barrier(num_processes)
    given = (function, num_processes, port, results, connected, threads, pin, device, *arguments)
    # A process that is just starting would answer a keyboard's interrupt with a traceback out of an import;
    # so it inherits this thread's mask, until `_run` lifts it.
    resource_tracker.ensure_running()  # which lets interrupts through again once it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        context = start_processes(_run, given, num_processes, join=False, start_method=START_METHOD)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    found: dict[int, bytes] = {}
    try:
        is_over = False
        while not is_over:
            is_over = context.join(_LOOK_S)
            while not results.empty():  # a pipe that is full would hold up who writes into it
                found.update([results.get()])
    finally:
        for process in context.processes:
            process.kill()
            process.join()
        del store
    if silent := {*range(num_processes)} - {*found}:
        rank = min(silent)
        text = f"process {rank} ended with exit code 0, before its function had a result"
        raise ProcessExitedException(text, rank, context.pids()[rank], exit_code=0)
    return [pickle.loads(found[rank]) for rank in range(num_processes)]


def check_devices(device: str, num_processes: int) -> str:
    """The type of device that each of `num_processes` processes on this host gets: `device`, or what "auto"
    finds. `ValueError` where there are fewer devices than processes.
    """
    kind = _kind(device)
    count = devices.count(kind)
    if kind != "cpu" and count < num_processes:
        raise ValueError(
            f"{num_processes} process{'es' * (num_processes != 1)}, {count} GPU{'s' * (count != 1)}: each "
            f"process takes a device of type {kind} of its own; start "
            + (f"at most {count}, or " if count else "")
            + "all of them on the CPU with device='cpu'"
        )
    return kind


def _kind(device: str) -> str:
    return devices.default_type() if device == "auto" else torch.device(device).type


@contextmanager
def start_process(
    *, threads: int = 1, pin: bool = True, timeout_s: float = 600.0, device: str = "auto"
) -> Iterator[torch.device]:
    """The set-up of a process that torchrun has started: threads, core or accelerator, process group; gives
    its device.

    `device` is as in `launch`: `ValueError` where this host has fewer accelerators than processes. Where
    CUDA_VISIBLE_DEVICES shows a process one alone, as schedulers do, that one is its own. `pin` is for CPUs.
    A CUDA device has a queue for each stream, unless CUDA_DEVICE_MAX_CONNECTIONS is set. On exit the process
    group is destroyed.
    """
    os.environ.setdefault(*_QUEUES)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    several = int(os.environ.get("LOCAL_WORLD_SIZE", str(local_rank + 1)))
    # Schedulers show each process its own accelerator alone. Two that see the same one NCCL refuses.
    sees_own = any(name in os.environ for name in _VISIBLE) and devices.count(_kind(device)) == 1
    kind = check_devices(device, 1 if sees_own else several)
    prepare_process(local_rank, threads=threads, pin=pin and kind == "cpu")
    own, backend = torch.device("cpu"), "gloo"
    if kind != "cpu":
        own = torch.device(kind, 0 if sees_own else local_rank)
        devices.select(own)
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield own
    finally:
        dist.destroy_process_group()


def _run(
    rank: int,
    function: Callable[..., Any],
    num_processes: int,
    port: int,
    results: Any,
    connected: Any,
    threads: int,
    pin: bool,
    device: str,
    *arguments: Any,
) -> None:
    # A Python handler would wait for an operation that waits for another process. It is also what the system
    # sends when the launcher is gone.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    # As torchrun has them, whose store is in another process, too.
    os.environ.update(MASTER_ADDR=_LOOPBACK, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_processes)))
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)), TORCHELASTIC_RESTART_COUNT="0")
    with start_process(threads=threads, pin=pin, device=device):
        connected.wait()  # one that is soon done would close what another is still connecting to
        # As bytes: torch would share the memory of tensors, which ends with this process.
        results.put((rank, pickle.dumps(function(*arguments))))


# glibc's mallopt parameters and a size that no tensor of a micro-batch exceeds.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGE_BYTES = -1, -3, 2**30
_cores: list[set[int]] = []  # that this process had before it was pinned


def prepare_process(local_rank: int, *, threads: int = 1, pin: bool = True) -> None:
    """Gives this process `threads` compute threads, the cores of its turn and, with glibc, an allocator that
    keeps freed memory for the next allocation.

    With `pin`, local rank r gets the r-th of the allowed cores, or the r-th run of `threads` cores; ranks
    beyond the last core start over. That is for stages that compute on CPUs: in front of an accelerator all
    threads of the process would take turns on the one core, and the device would wait for them.
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
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)

"""What a process of a pipeline is held to on its host: compute threads, a core, and how memory comes from the
system.

On CPUs the stages compete for cores unless told otherwise, and glibc gives every large tensor back to the
system when it is freed, only to fault its pages in again a moment later: thousands of page faults a step.
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch

# glibc's mallopt parameters and a size that no tensor of a micro-batch exceeds.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGE_BYTES = -1, -3, 2**30


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

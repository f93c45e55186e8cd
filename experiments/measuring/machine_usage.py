"""What the machine's cores did while something was timed, so that a disturbed timing can be told."""

from __future__ import annotations

import time


def usage() -> tuple[float, float, float]:
    """Seconds used so far: by this process, by everything on the machine, by the clock on the wall."""
    import psutil

    cores = psutil.cpu_times()
    busy_s = sum(cores) - cores.idle - getattr(cores, "iowait", 0.0) - getattr(cores, "guest", 0.0)
    return time.process_time(), busy_s, time.perf_counter()


class Usage:
    """The machine's cores from here on."""

    def __init__(self) -> None:
        self._before = usage()

    def of_others(self) -> float:
        """Share of all cores that programs other than the processes of this group took. All must call."""
        import psutil
        import torch
        from torch import distributed as dist

        own_s, busy_s, wall_s = (after - start for after, start in zip(usage(), self._before, strict=True))
        used_s = torch.tensor([own_s], dtype=torch.float64)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(used_s)
        return max(0.0, busy_s - float(used_s)) / (wall_s * (psutil.cpu_count() or 1))

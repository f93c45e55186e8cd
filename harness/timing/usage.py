"""What the machine's cores did while something was timed, so that a disturbed timing can be told.

Each process of a measurement knows its own share; only all of them together tell what was not theirs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple


class Usage(NamedTuple):
    """Seconds of one process and of its machine, since it started (`now`) or over a stretch (`since`)."""

    cpu_s: float  # used by this process
    busy_s: float  # of all cores together, this process included
    wall_s: float  # by the clock
    num_cores: int

    @classmethod
    def now(cls) -> Usage:
        import psutil

        cores = psutil.cpu_times()
        busy_s = sum(cores) - cores.idle - getattr(cores, "iowait", 0.0) - getattr(cores, "guest", 0.0)
        return cls(time.process_time(), busy_s, time.perf_counter(), psutil.cpu_count() or 1)

    def since(self, start: Usage) -> Usage:
        """What was used from `start` to this moment."""
        return Usage(
            self.cpu_s - start.cpu_s, self.busy_s - start.busy_s, self.wall_s - start.wall_s, self.num_cores
        )


def used_by_others(of_processes: Sequence[Usage]) -> float:
    """Share of the machine's cores that programs other than these processes took over the same stretch.

    The processes measure the machine a moment apart, so the busiest that any saw counts.
    """
    own_s = sum(each.cpu_s for each in of_processes)
    return max(max(0.0, each.busy_s - own_s) / (each.wall_s * each.num_cores) for each in of_processes)

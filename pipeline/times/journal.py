"""When the collectives of a step began and ended, so that a timeline can show them beside the actions.

On a CPU a collective's end is noticed by the thread that made it, whatever the process does meanwhile. On an
accelerator events tell, the end in a stream that does nothing but wait for collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpipe_bench.pipeline import devices


class Journal:
    """The sums of the latest step, of all stages of this process, which are on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_accelerated = devices.is_accelerator(device)
        self._stream = devices.new_stream(device) if self._is_accelerated else None
        self._begun: dict[tuple[int, int], Any] = {}
        self._ended: dict[tuple[int, int], Any] = {}

    def begin(self) -> None:
        """A step begins."""
        self._begun, self._ended = {}, {}

    def begun(self, stage: int, number: int) -> None:
        """Sum `number` of a stage begins now."""
        self._begun[stage, number] = self._now()

    def watch(self, work: Any, stage: int, number: int) -> None:
        """Notes when it ends."""
        key, ended = (stage, number), self._ended
        if self._stream is not None:
            with devices.using(self._stream):
                work.wait()
                ended[key] = self._now()
        else:
            work.get_future().add_done_callback(lambda _: ended.setdefault(key, time.perf_counter_ns()))

    def waited(self, stage: int, number: int) -> None:
        """It has ended by now."""
        if self._stream is None:
            self._ended.setdefault((stage, number), time.perf_counter_ns())

    def entries(self, happened_ns: Callable[[Any], float]) -> Iterator[tuple[int, int, float, float]]:
        """Stage, number, begin and end of each that is over, in ns of the wall clock; `happened_ns` says when
        an event was.
        """
        for (stage, number), begun in self._begun.items():
            ended = self._ended.get((stage, number))
            if ended is not None:
                times = (begun, ended)
                begin_ns, end_ns = map(happened_ns, times) if self._is_accelerated else times
                yield stage, number, begin_ns, end_ns

    def _now(self) -> Any:
        if not self._is_accelerated:
            return time.perf_counter_ns()
        event = devices.event(self._device, timing=True)
        event.record(devices.current_stream(self._device))
        return event

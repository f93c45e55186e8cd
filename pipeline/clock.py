"""Start and end of every action without disturbing it: the wall clock on CPUs, events on GPUs.

A GPU runs behind the host, so the host's clock would show when an action was enqueued. CUDA events are
recorded into the stream instead and read only when somebody asks for the timeline, so a step never waits for
the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.plan.timeline import Event, Timeline


class Clock:
    """Records start and end of the actions of one program, step after step; keeps the latest step."""

    def __init__(self, actions: Sequence[Action], stage_devices: Sequence[torch.device]) -> None:
        self._actions = tuple(actions)
        self._devices = tuple(stage_devices)  # by stage
        self._start_ns = [0] * len(self._actions)
        self._end_ns = [0] * len(self._actions)
        self._begin_ns = 0
        self._events: list[tuple[torch.Event, torch.Event]] = []
        self._origins: dict[torch.device, torch.Event] = {}
        self._behind = any(devices.is_accelerator(device) for device in self._devices)
        self.complete = False

    def begin(self) -> None:
        self.complete = False
        if self._behind:
            self._begin_ns = time.perf_counter_ns()
            if not self._events:
                self._events = [
                    (self._new_event(action), self._new_event(action)) for action in self._actions
                ]
                self._origins = {device: devices.event(device, timing=True) for device in self._devices}
            for device, event in self._origins.items():
                event.record(devices.current_stream(device))

    def _new_event(self, action: Action) -> torch.Event:
        return devices.event(self._devices[action.stage], timing=True)

    def start(self, position: int) -> None:
        """The action at `position` of the program begins."""
        if self._behind:
            device = self._devices[self._actions[position].stage]
            self._events[position][0].record(devices.current_stream(device))
        else:
            self._start_ns[position] = time.perf_counter_ns()

    def stop(self, position: int) -> None:
        """The action at `position` of the program ends."""
        if self._behind:
            device = self._devices[self._actions[position].stage]
            self._events[position][1].record(devices.current_stream(device))
        else:
            self._end_ns[position] = time.perf_counter_ns()

    def events(self, offset_ns: int = 0) -> tuple[Event, ...]:
        """The latest step in seconds of the wall clock, moved by `offset_ns`. Waits for the device.

        CUDA events are counted from one at the start of the step, whose time on the wall clock is that of its
        enqueuing. `ValueError` before the first complete step.
        """
        if not self.complete:
            raise ValueError("no complete step to show; run a step first")
        events = []
        for position, action in enumerate(self._actions):
            if self._behind:
                origin = self._origins[self._devices[action.stage]]
                start, end = self._events[position]
                end.synchronize()
                begin_s = self._begin_ns / 1e9
                start_s = begin_s + origin.elapsed_time(start) / 1e3
                end_s = begin_s + origin.elapsed_time(end) / 1e3
            else:
                start_s, end_s = self._start_ns[position] / 1e9, self._end_ns[position] / 1e9
            events.append(Event(action, start_s + offset_ns / 1e9, end_s + offset_ns / 1e9))
        return tuple(events)

    def timeline(self, num_stages: int, placement: tuple[int, ...] = ()) -> Timeline:
        """The latest step. Waits for the device. `ValueError` before the first complete step."""
        return Timeline.of(
            self.events(),
            num_stages,
            devices=[str(device) for device in self._devices],
            conditions=conditions(),
            placement=placement,
        )


def conditions() -> dict[str, str]:
    """What this process is held to: compute threads and the cores it may run on."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = bool(cores) and len(cores) < (os.cpu_count() or 0)
    return {
        "threads": str(torch.get_num_threads()),
        "pinned_cores": ",".join(map(str, cores)) if pinned else "not pinned",
    }

"""Start and end of every action without disturbing it: the wall clock on CPUs, events on accelerators.

An accelerator runs behind the host, so events are recorded into its stream and read only when somebody asks
for the timeline: a step never waits for the device. An event only tells the time since another event. So the
reader records one more event and waits for it: it happened just now by the host's clock, and the device says
how long before it the others happened.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from . import devices
from .plan.schedule import Action
from .plan.timeline import Event, Timeline


class Clock:
    """Start and end of the actions of one program in the latest step."""

    def __init__(self, actions: Sequence[Action], stage_devices: Sequence[torch.device]) -> None:
        self._actions = tuple(actions)
        self._devices = tuple(stage_devices)  # by stage
        # Start and end of each action in turn: what tells the time, and what it told, which is nanoseconds of
        # the host or an event of an accelerator.
        self.times: list[int | torch.Event] = [0] * (2 * len(self._actions))
        self.read: list[Callable[[], int | torch.Event]] = [time.perf_counter_ns] * len(self.times)
        self._accelerators = tuple(filter(devices.is_accelerator, dict.fromkeys(self._devices)))
        self._firsts: dict[torch.device, torch.Event] = {}  # of the step, on each accelerator
        self._firsts_ns: dict[torch.device, float] = {}  # when that was, once somebody has asked
        self.begins = bool(self._accelerators)
        self.complete = False

    def begin(self) -> None:
        """Begins a step; the host's clock alone needs no preparation."""
        self.complete = False
        if self._accelerators:
            self._firsts_ns = {}
            if not self._firsts:
                self._firsts = {device: devices.event(device, timing=True) for device in self._accelerators}
                homes = [self._devices[action.stage] for action in self._actions for _ in range(2)]
                self.read = [
                    partial(_recorded, devices.event(home, timing=True), home)
                    if devices.is_accelerator(home)
                    else time.perf_counter_ns
                    for home in homes
                ]
            for device, event in self._firsts.items():
                event.record(devices.current_stream(device))

    def note(self, place: int) -> None:
        """Notes the start of action `place` // 2 of the program, or its end if `place` is odd."""
        self.times[place] = self.read[place]()

    def events(self, offset_ns: int = 0) -> tuple[Event, ...]:
        """The latest step in seconds of the wall clock, moved by `offset_ns`. Waits for the devices.
        `ValueError` before the first complete step.
        """
        if not self.complete:
            raise ValueError("no complete step to show; run a step first")
        for device, first in self._firsts.items():
            if device not in self._firsts_ns:
                self._firsts_ns[device] = _happened_ns(first, device)
        found = []
        for position, action in enumerate(self._actions):
            device = self._devices[action.stage]
            start_ns, end_ns = [
                told
                if isinstance(told, int)
                else self._firsts_ns[device] + self._firsts[device].elapsed_time(told) * 1e6
                for told in self.times[2 * position : 2 * position + 2]
            ]
            found.append(Event(action, (start_ns + offset_ns) / 1e9, (end_ns + offset_ns) / 1e9))
        return tuple(found)

    def timeline(self, num_stages: int, placement: tuple[int, ...] = ()) -> Timeline:
        """The latest step. Waits for the device. `ValueError` before the first complete step."""
        places, limits = [*map(str, self._devices)], conditions()
        return Timeline.of(self.events(), num_stages, devices=places, conditions=limits, placement=placement)


def _recorded(event: torch.Event, device: torch.device) -> torch.Event:
    event.record(devices.current_stream(device))
    return event


def conditions() -> dict[str, str]:
    """The limits of this process: its compute threads and the cores it may run on."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = bool(cores) and len(cores) < (os.cpu_count() or 0)
    return {
        "threads": str(torch.get_num_threads()),
        "pinned_cores": ",".join(map(str, cores)) if pinned else "not pinned",
    }


def _happened_ns(event: torch.Event, device: torch.device) -> float:
    """When an event of the device happened, by the wall clock, within half the time that an idle device takes
    to answer. Waits for all that the device has to do.
    """
    devices.synchronize(device)
    before_ns = time.perf_counter_ns()
    now = devices.event(device, timing=True)
    now.record(devices.current_stream(device))
    now.synchronize()
    after_ns = time.perf_counter_ns()
    return (before_ns + after_ns) / 2 - event.elapsed_time(now) * 1e6

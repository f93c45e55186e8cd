"""Start and end of every action without disturbing it: the wall clock on CPUs, events on accelerators.

An accelerator runs behind the host, so the host's clock would show when an action was enqueued. Events are
recorded into the stream instead and read only when somebody asks for the timeline, so a step never waits for
the device.

What an event tells is the time since another one. When the first of a step happened the host does not know,
because the device may still have had other work to do when it was enqueued, each device its own. So when
somebody asks, one more event is recorded and waited for: it happened just now, and the others as long ago as
the device says.

The sums over replicas that leave meanwhile are noted beside the actions (`Journal`). On a CPU a sum's end is
noticed by the thread that made it, on an accelerator by a stream that does nothing but wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.plan.timeline import Event, Span, Timeline


class Clock:
    """Records start and end of the actions of one program, step after step; keeps the latest step.

    The sums over replicas that leave meanwhile are in a `journal`.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        stage_devices: Sequence[torch.device],
        journal: Journal | None = None,
    ) -> None:
        self._journal = journal
        self._actions = tuple(actions)
        self._devices = tuple(stage_devices)  # by stage
        # Start and end of each action, one after the other: what tells the time, and what it told, which is
        # nanoseconds of the host or an event of an accelerator.
        self.times: list[int | torch.Event] = [0] * (2 * len(self._actions))
        self.read: list[Callable[[], int | torch.Event]] = [time.perf_counter_ns] * len(self.times)
        self._accelerators = tuple(filter(devices.is_accelerator, dict.fromkeys(self._devices)))
        self._firsts: dict[torch.device, torch.Event] = {}  # of the step, on each accelerator
        self._firsts_ns: dict[torch.device, float] = {}  # when that was, once somebody has asked
        self.begins = journal is not None or bool(self._accelerators)
        self.complete = False

    def begin(self) -> None:
        """Begins a step. Without accelerators, the host's clock needs no preparation."""
        self.complete = False
        if self._journal is not None:
            self._journal.begin()
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

    def start(self, position: int) -> None:
        """The action at `position` of the program begins."""
        self.times[2 * position] = self.read[2 * position]()

    def stop(self, position: int) -> None:
        """The action at `position` of the program ends."""
        self.times[2 * position + 1] = self.read[2 * position + 1]()

    def events(self, offset_ns: int = 0) -> tuple[Event, ...]:
        """The latest step in seconds of the wall clock, moved by `offset_ns`. Waits for the devices.

        `ValueError` before the first complete step.
        """
        self._date_firsts()
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

    def collectives(self, offset_ns: int = 0) -> tuple[Span, ...]:
        """The sums over replicas of the latest step, as `events`."""
        self._date_firsts()
        if self._journal is None:
            return ()
        device = next(iter(self._firsts), None)

        def happened_ns(event: torch.Event) -> float:
            assert device is not None
            return self._firsts_ns[device] + self._firsts[device].elapsed_time(event) * 1e6

        return tuple(
            Span(f"reduce {number}", stage, (begin_ns + offset_ns) / 1e9, (end_ns + offset_ns) / 1e9)
            for stage, number, begin_ns, end_ns in self._journal.entries(happened_ns)
        )

    def _date_firsts(self) -> None:
        if not self.complete:
            raise ValueError("no complete step to show; run a step first")
        for device, first in self._firsts.items():
            if device not in self._firsts_ns:
                self._firsts_ns[device] = _happened_ns(first, device)

    def timeline(self, num_stages: int, placement: tuple[int, ...] = ()) -> Timeline:
        """The latest step. Waits for the device. `ValueError` before the first complete step."""
        return Timeline.of(
            self.events(),
            num_stages,
            devices=[str(device) for device in self._devices],
            conditions=conditions(),
            placement=placement,
            collectives=self.collectives(),
        )


class Journal:
    """Begin and end times of the gradient sums in the latest step, for all stages of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_accelerated = devices.is_accelerator(device)
        self._stream = devices.new_stream(device) if self._is_accelerated else None
        self._begun: dict[tuple[int, int], Any] = {}
        self._ended: dict[tuple[int, int], Any] = {}

    def begin(self) -> None:
        """Begins a step: forgets the sums of the one before."""
        self._begun, self._ended = {}, {}

    def begun(self, stage: int, number: int) -> None:
        """Notes that sum `number` of a stage begins now."""
        self._begun[stage, number] = self._now()

    def watch(self, work: Any, stage: int, number: int) -> None:
        """Notes when sum `number` of a stage ends, which is when `work` is done."""
        key, ended = (stage, number), self._ended
        if self._stream is not None:
            with devices.using(self._stream):
                work.wait()
                ended[key] = self._now()
        else:
            work.get_future().add_done_callback(lambda _: ended.setdefault(key, time.perf_counter_ns()))

    def waited(self, stage: int, number: int) -> None:
        """Notes that sum `number` of a stage has ended by now."""
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
        return _recorded(devices.event(self._device, timing=True), self._device)


def _recorded(event: torch.Event, device: torch.device) -> torch.Event:
    event.record(devices.current_stream(device))
    return event


def conditions() -> dict[str, str]:
    """Returns the limits of this process: its compute threads and the cores it may run on."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = bool(cores) and len(cores) < (os.cpu_count() or 0)
    return {
        "threads": str(torch.get_num_threads()),
        "pinned_cores": ",".join(map(str, cores)) if pinned else "not pinned",
    }


def _happened_ns(event: torch.Event, device: torch.device) -> float:
    """When an event of the device happened, by the wall clock. Waits for all that the device has to do.

    It is right within half the time that an idle device takes to answer.
    """
    devices.synchronize(device)
    before_ns = time.perf_counter_ns()
    now = devices.event(device, timing=True)
    now.record(devices.current_stream(device))
    now.synchronize()
    after_ns = time.perf_counter_ns()
    return (before_ns + after_ns) / 2 - event.elapsed_time(now) * 1e6

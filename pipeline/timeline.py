"""What happened when: the common result of running a schedule and of replaying one.

Measured and replayed steps must be comparable action by action, so both end in the same plain data: one event
per action, in seconds from the start of the step. Makespan, bubble and live activations are read off it, and
it is exported in the Chrome trace format, which Perfetto and chrome://tracing open. Only the standard library
is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.schedule import Action, Kind


@dataclass(frozen=True, slots=True)
class Event:
    """One action's start and end, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """The events of one step, ordered by start.

    `provenance` is "measured" or "replayed"; `devices` names the device of each stage; `conditions` says what
    was held fixed (threads, pinned cores), so that a picture can be judged without its producer.
    """

    events: tuple[Event, ...]
    num_stages: int
    provenance: str = "measured"
    devices: tuple[str, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        events: Iterable[Event],
        num_stages: int,
        provenance: str = "measured",
        devices: Iterable[str] = (),
        conditions: Mapping[str, str] | None = None,
    ) -> Timeline:
        """Orders the events and moves the earliest start to 0."""
        ordered = sorted(events, key=lambda event: (event.start_s, event.action))
        origin_s = ordered[0].start_s if ordered else 0.0
        shifted = tuple(Event(e.action, e.start_s - origin_s, e.end_s - origin_s) for e in ordered)
        return cls(shifted, num_stages, provenance, tuple(devices), dict(conditions or {}))

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max((event.end_s for event in self.events), default=0.0)

    def of_stage(self, stage: int) -> tuple[Event, ...]:
        """The events of one stage, in order."""
        return tuple(event for event in self.events if event.action.stage == stage)

    def busy_s(self, stage: int) -> float:
        """Seconds in which the stage is inside an action."""
        return sum(event.duration_s for event in self.of_stage(stage))

    @property
    def bubble(self) -> float:
        """Share of the K x makespan device-seconds that no action fills, 0 to 1. With equal stages, no
        recomputation and a free link it is the paper's (K - 1) / (M + K - 1) (section 2.3).
        """
        total_s = self.num_stages * self.makespan_s
        return 1.0 - sum(event.duration_s for event in self.events) / total_s if total_s else 0.0

    def live_activations(self, stage: int) -> tuple[tuple[float, int], ...]:
        """(time in s, micro-batches whose graph is alive from then on) at every change on this stage.

        A graph lives from the start of the action that builds it (F, or R where the micro-batch is
        recomputed) to the end of the backward.
        """
        events = self.of_stage(stage)
        recomputed = {e.action.microbatch for e in events if e.action.kind is Kind.R}
        halved = {e.action.microbatch for e in events if e.action.kind is Kind.W}
        changes = []
        for event in events:
            microbatch = event.action.microbatch
            if event.action.kind is (Kind.R if microbatch in recomputed else Kind.F):
                changes.append((event.start_s, 1))
            elif event.action.kind is (Kind.W if microbatch in halved else Kind.B):
                changes.append((event.end_s, -1))
        live, steps = 0, []
        for time_s, change in sorted(changes):
            live += change
            steps.append((time_s, live))
        return tuple(steps)

    def to_chrome(self) -> dict[str, Any]:
        """The timeline as a Chrome trace object: one row per stage, times in microseconds."""
        rows: list[dict[str, Any]] = []
        for stage in range(self.num_stages):
            label = f"stage {stage}" + (f" ({self.devices[stage]})" if self.devices else "")
            rows.append(
                {"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": label}},
            )
        for event in self.events:
            action = event.action
            rows.append(
                {
                    "name": str(action),
                    "cat": action.kind.name,
                    "ph": "X",
                    "pid": 0,
                    "tid": action.stage,
                    "ts": event.start_s * 1e6,
                    "dur": event.duration_s * 1e6,
                    "args": {"microbatch": action.microbatch},
                }
            )
        return {
            "traceEvents": rows,
            "displayTimeUnit": "ms",
            "otherData": {"provenance": self.provenance, **self.conditions},
        }

    def save_chrome(self, path: Path | str) -> None:
        """Writes the Chrome trace as JSON; open it in https://ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(self.to_chrome()))

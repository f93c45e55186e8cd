"""The timelines that records keep, as charts for the report and as traces for Perfetto.

Positions are percentages, so that one drawing fits a phone, a screen and paper without being made again.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpipe_bench.experiments.report.drawing import NAMES
from gpipe_bench.harness.experiment import Experiment, KeptTimeline
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.html import data_url
from gpipe_bench.harness.units import show
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.timeline import Timeline

MOST_BOXES = 200
"""Boxes drawn of one experiment: the page stays small enough to be sent."""
MOST_TRACES = 2
"""Charts beyond these boxes that can be downloaded; the records have all."""

LANE_PX = 26
BOX_PX = 22
_ROOM_FOR_TEXT = 1.9
"""Percent of the width below which a box is too narrow for two digits on a screen."""
_LAST_CENTRED = 96.0
_TICKS = 6
_STEPS = (1.0, 2.0, 5.0, 10.0)
_WORK = {"setup": "setup", "update": "weight update"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """One action, in percent of the width and pixels from the top. `title` says all, `text` fits inside."""

    x: str
    width: str
    middle: str
    y: float
    kind: str
    text: str
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A Gantt chart, ready to be drawn; without boxes it is only its trace. `facts` are its caption.

    `ticks` are (place in percent, label) of the axis; few and round.
    """

    name: str
    title: str
    facts: str
    trace: str
    lanes: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    unit: str = "ms"
    legend: tuple[tuple[str, str], ...] = ()
    ticks: tuple[tuple[str, str], ...] = ()

    @property
    def height(self) -> int:
        """In pixels."""
        return LANE_PX * len(self.lanes)

    @property
    def full_to_the_end(self) -> bool:
        """Whether the last label of the axis lies so far right that it has to end there."""
        return bool(self.ticks) and float(self.ticks[-1][0].rstrip("%")) > _LAST_CENTRED


def charts_of(experiment: Experiment, records: Sequence[Record]) -> list[Chart]:
    """A chart for every timeline that is shown; beyond MOST_BOXES in all, a few are only their traces."""
    if experiment.timelines is None:
        return []
    drawn, charts, left_out = 0, [], 0
    for chart in map(_chart, experiment.timelines(records)):
        fits = drawn + len(chart.boxes) <= MOST_BOXES
        drawn += len(chart.boxes) if fits else 0
        left_out += not fits
        if fits or left_out <= MOST_TRACES:
            charts.append(chart if fits else replace(chart, boxes=(), lanes=()))
    return charts


def _chart(kept: KeptTimeline) -> Chart:
    record, timeline = kept.record, Timeline.from_data(kept.data)
    unit, scale = ("s", 1.0) if timeline.makespan_s >= 2 else ("ms", 1e3)
    if kept.unit:
        unit, scale = kept.unit, 1.0
    span = timeline.makespan_s * scale

    def time(seconds: float) -> str:
        value = seconds * scale
        return show(value, unit) if unit in ("s", "ms") else f"{value:.6g} {unit}"

    def box(stage: int, start_s: float, duration_s: float, kind: str, text: str, what: str) -> Box:
        start, length = start_s * scale, duration_s * scale
        percent = 100 / span if span > 0 else 0.0
        return Box(
            x=_percent(start * percent),
            width=_percent(length * percent),
            middle=_percent((start + length / 2) * percent),
            y=stage * LANE_PX + (LANE_PX - BOX_PX) / 2,
            kind=kind,
            text=text if length * percent >= _ROOM_FOR_TEXT else "",
            title=f"{what}, {time(duration_s)}, from {time(start_s)}",
        )

    events = [
        (action.stage, event.start_s, event.duration_s, action.kind.name, str(action.microbatch),
         f"{action}: {NAMES[action.kind]}, stage {action.stage}, micro-batch {action.microbatch}")
        for event in timeline.events
        for action in [event.action]
    ]  # fmt: skip
    work = [
        (each.stage, each.start_s, each.duration_s, each.name if each.name in _WORK else "work", "",
         f"{_WORK.get(each.name, each.name)}, stage {each.stage}")
        for each in timeline.work
    ]  # fmt: skip
    kinds = sorted({event.action.kind for event in timeline.events}, key=list(Kind).index)
    facts = [
        timeline.provenance,
        time(timeline.makespan_s),
        f"{timeline.bubble:.1%} idle",
        *([str(record.details["scale"])] if record.details.get("scale") else []),
        *(f"{key.replace('_', ' ')}: {value}" for key, value in timeline.conditions.items()),
    ]
    name = f"{record.experiment} {record.label} {' '.join(kept.where)}".lower()
    trace = json.dumps(timeline.to_chrome(), separators=(",", ":"), sort_keys=True)
    devices = [f" ({name})" for name in timeline.devices] or [""] * timeline.num_stages
    return Chart(
        name=re.sub(r"[^a-z0-9]+", "-", name).strip("-"),
        title=", ".join([kept.title, *kept.where]),
        facts=", ".join(facts),
        trace=data_url(gzip.compress(trace.encode(), mtime=0), "application/gzip"),  # without a time of day
        lanes=tuple(f"stage {stage}{device}" for stage, device in enumerate(devices)),
        boxes=tuple(box(*each) for each in sorted(events + work, key=lambda each: each[:2])),
        unit=unit,
        legend=(
            *((kind.name, NAMES[kind]) for kind in kinds),
            *((name, text) for name, text in _WORK.items() if name in {each.name for each in timeline.work}),
        ),
        ticks=ticks(span),
    )


def ticks(span: float) -> tuple[tuple[str, str], ...]:
    """Places and labels of an axis that long: few, round and inside."""
    if not span > 0:
        return ()
    power = 10.0 ** math.floor(math.log10(span / _TICKS))
    step = power * next(step for step in _STEPS if step * power >= span / _TICKS * (1 - 1e-9))
    count = math.floor(span / step * (1 + 1e-9))
    return tuple((_percent(100 * n * step / span), f"{n * step:.6g}") for n in range(count + 1))


def _percent(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") + "%"

"""The timelines that records keep, as charts for the report and as traces for Perfetto."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpipe_bench.experiments.report.drawing import NAMES
from gpipe_bench.experiments.report.records import Source
from gpipe_bench.harness.experiment import Experiment, KeptTimeline
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.chart import Box, Chart, trace_url, within
from gpipe_bench.harness.units import show
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.timeline import Timeline

MOST_BOXES = 9000
"""Boxes drawn on one page; a browser stays quick, and what is left out can still be downloaded."""

_WORK = {"setup": "setup", "update": "weight update"}
_MEMBERS = frozenset({"num_stages", "events", "provenance"})


def charts_of(experiment: Experiment, source: Source) -> list[Chart]:
    """A chart for every timeline that is shown; too many are reduced to their traces, the last first."""
    if experiment.timelines is None:
        return []
    charts = [_chart(source, kept) for kept in experiment.timelines(source.records)]
    return [
        chart if drawn else dataclasses.replace(chart, boxes=(), lanes=())
        for chart, drawn in zip(charts, within(charts, MOST_BOXES), strict=True)
    ]


def kept_timelines(records: Sequence[Record]) -> list[KeptTimeline]:
    """Every timeline of the finished records, wherever they keep it: what most experiments show."""
    return [
        KeptTimeline(
            record=record,
            data=data,
            title=_title(record),
            where=tuple(word for word in where if word not in ("timeline", "timelines", "cells")),
        )
        for record in records
        if record.status == "done"
        for where, data in timelines(record.details)
    ]


def timelines(
    details: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Every timeline (`Timeline.to_data`) inside the details of a record, with the keys that lead to it."""
    if isinstance(details, Mapping):
        if details.keys() >= _MEMBERS:
            yield path, details
            return
        for key, value in details.items():
            yield from timelines(value, (*path, str(key)))
    elif isinstance(details, list):
        for number, value in enumerate(details):
            yield from timelines(value, (*path, str(number)))


def _chart(source: Source, kept: KeptTimeline) -> Chart:
    record, timeline = kept.record, Timeline.from_data(kept.data)
    unit, scale = (kept.unit, 1.0) if kept.unit else _unit(timeline)
    boxes = [
        Box(
            lane=event.action.stage,
            start=event.start_s * scale,
            length=event.duration_s * scale,
            kind=event.action.kind.name,
            text=str(event.action.microbatch),
            title=(
                f"{event.action}: {NAMES[event.action.kind]}, stage {event.action.stage}, "
                f"micro-batch {event.action.microbatch}, {_time(event.duration_s * scale, unit)}, "
                f"from {_time(event.start_s * scale, unit)}"
            ),
        )
        for event in timeline.events
    ]
    boxes += [
        Box(
            lane=span.stage,
            start=span.start_s * scale,
            length=span.duration_s * scale,
            kind=span.name if span.name in _WORK else "work",
            text="",
            title=(
                f"{_WORK.get(span.name, span.name)}, stage {span.stage}, "
                f"{_time(span.duration_s * scale, unit)}, from {_time(span.start_s * scale, unit)}"
            ),
        )
        for span in timeline.work
    ]
    boxes.sort(key=lambda box: (box.lane, box.start))
    kinds = sorted({event.action.kind for event in timeline.events}, key=list(Kind).index)
    legend = [(kind.name, NAMES[kind]) for kind in kinds]
    legend += [(name, text) for name, text in _WORK.items() if any(s.name == name for s in timeline.work)]
    facts = [
        timeline.provenance,
        f"{_time(timeline.makespan_s * scale, unit)}",
        f"{timeline.bubble:.1%} idle",
        *([str(record.details["scale"])] if record.details.get("scale") else []),
        *(f"{key.replace('_', ' ')}: {value}" for key, value in timeline.conditions.items()),
    ]
    return Chart(
        name=re.sub(
            r"[^a-z0-9]+", "-", f"{record.experiment} {record.label} {' '.join(kept.where)}".lower()
        ).strip("-"),
        title=", ".join([kept.title, *kept.where]),
        facts=", ".join(facts),
        machine=source.machine,
        lanes=tuple(_lane(timeline, stage) for stage in range(timeline.num_stages)),
        boxes=tuple(boxes),
        span=timeline.makespan_s * scale,
        unit=unit,
        legend=tuple(legend),
        trace=trace_url(timeline.to_chrome()),
    )


def _lane(timeline: Timeline, stage: int) -> str:
    return f"stage {stage}" + (f" ({timeline.devices[stage]})" if timeline.devices else "")


def _unit(timeline: Timeline) -> tuple[str, float]:
    return ("s", 1.0) if timeline.makespan_s >= 2 else ("ms", 1e3)


def _time(value: float, unit: str) -> str:
    return show(value, unit) if unit in ("s", "ms") else f"{value:.6g} {unit}"


def _title(record: Record) -> str:
    """The record's own title, or the case in words."""
    title = record.details.get("title")
    if not isinstance(title, str):
        return record.label
    rest = [f"{key} {value}" for key, value in record.case.items() if key not in ("model", "part")]
    return ", ".join([title, *rest])

"""Timelines: what is read off them and how they are exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpipe_bench.experiments.report.drawing import gantt
from gpipe_bench.pipeline import SLOTS, Action, Event, Kind, Timeline, gpipe, one_f_one_b, replay


def test_events_are_ordered_and_start_at_zero() -> None:
    late, early = Event(Action.parse("1F0"), 12.0, 13.0), Event(Action.parse("0F0"), 10.0, 11.5)
    timeline = Timeline.of([late, early], 2)
    assert [str(e.action) for e in timeline.events] == ["0F0", "1F0"]
    assert timeline.events[0].start_s == 0.0
    assert timeline.makespan_s == 3.0
    assert timeline.busy_s(0) == 1.5
    assert timeline.bubble == pytest.approx(1 - 2.5 / 6)


def test_an_empty_timeline_has_no_length() -> None:
    timeline = Timeline.of([], 2)
    assert timeline.makespan_s == 0.0
    assert timeline.bubble == 0.0


@pytest.mark.parametrize(
    ("schedule", "stage", "most"),
    [
        (gpipe(3, 5, remat="never"), 0, 5),
        (gpipe(3, 5, remat="always"), 0, 1),
        (gpipe(3, 5, remat="except_last"), 1, 1),
        (one_f_one_b(3, 5, remat="never"), 0, 3),
        (one_f_one_b(3, 5, remat="never"), 2, 1),
    ],
)
def test_live_activations(schedule, stage: int, most: int) -> None:
    live = replay(schedule, SLOTS).live_activations(stage)
    assert max(count for _, count in live) == most
    assert live[-1][1] == 0


def test_chrome_trace() -> None:
    schedule = gpipe(2, 2, remat="always")
    replayed = replay(schedule, {kind: slots / 1000 for kind, slots in SLOTS.items()})
    timeline = Timeline.of(
        replayed.events, 2, provenance="replayed", devices=["cpu", "cpu"], conditions={"threads": "1"}
    )
    trace = json.loads(json.dumps(timeline.to_chrome()))
    rows = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert {row["name"] for row in rows} == {str(action) for action in schedule}
    backward = next(row for row in rows if row["name"] == "1B1")
    assert (backward["tid"], backward["cat"], backward["dur"]) == (1, Kind.B.name, pytest.approx(2000))
    assert {row["args"]["name"] for row in trace["traceEvents"] if row["ph"] == "M"} == {
        "stage 0 (cpu)",
        "stage 1 (cpu)",
    }
    assert trace["otherData"] == {"provenance": "replayed", "threads": "1"}


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_gantt_chart(tmp_path: Path, ending: str) -> None:
    timeline = replay(gpipe(3, 4, remat="except_last"), SLOTS)
    figure = gantt(timeline, "three stages")
    (axes,) = figure.axes
    boxes = [collection.get_paths()[0].get_extents() for collection in axes.collections]
    wanted_ms = [(event.start_s * 1e3, event.end_s * 1e3) for event in timeline.events]
    for box, edges_ms in zip(boxes, wanted_ms, strict=True):
        assert (box.x0, box.x1) == pytest.approx(edges_ms)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "recompute", "backward"]
    path = tmp_path / f"gantt.{ending}"
    figure.savefig(path, dpi=150)
    assert path.stat().st_size > 1000

"""Timelines: what is read off them, how they are exported, and portals in them."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from gpipe_bench.experiments.drawing import gantt
from gpipe_bench.pipeline import (
    NAMED,
    SLOTS,
    Action,
    Event,
    Kind,
    Link,
    Timeline,
    gpipe,
    named,
    one_f_one_b,
    replay,
)
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.planner.predict import breakdown


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


# Portals where a schedule is laid out in time and drawn


SKIP = Edge(0, 0, 3, ("skip",))
WIRE = Link("wire", latency_s=1, bandwidth_bytes_per_s=1)


def test_a_portal_takes_the_link_between_its_workers_alone() -> None:
    """By hand, K = 4, M = 1, actions of a second, no other bytes: three hops of a second of latency and four
    forwards are 7 s; the portal leaves at 1, takes 20 s and a second of latency.
    """
    ones = dict.fromkeys("FRBIW", 1)
    action_s = {kind: ones[kind.value] for kind in SLOTS}
    free = replay(gpipe(4, 1, "never"), action_s, WIRE, activation_bytes=[0] * 3)
    step = replay(gpipe(4, 1, "never"), action_s, WIRE, activation_bytes=[0] * 3, portals={SKIP: (20, 30)})
    starts = {str(event.action): event.start_s for event in step.events}
    assert {str(event.action): event.start_s for event in free.events}["3F0"] == 6
    assert starts["3F0"] == 1 + 20 + 1
    assert starts["2B0"] == starts["3B0"] + 1 + 1  # the gradient of the portal holds up nobody between
    assert starts["0B0"] == starts["3B0"] + 1 + 30 + 1
    assert {span.name for span in step.messages} >= {"0F0->3", "3B0->0"}


def test_between_neighbours_a_portal_goes_before_the_output() -> None:
    action_s = dict.fromkeys(SLOTS, 1)
    step = replay(
        gpipe(2, 1, "never"), action_s, WIRE, activation_bytes=[5], portals={Edge(0, 0, 1, ("a",)): (7, 0)}
    )
    assert [(s.start_s, s.end_s) for s in step.messages if s.name == "0F0->1"] == [(1, 9), (8, 14)]


@pytest.mark.parametrize("name", NAMED)
def test_free_portals_change_nothing_in_any_schedule(name: str) -> None:
    schedule = named(name, 2, 4, remat="always")
    lines = {
        Edge(i, *ends, (f"{i}",)): (1, 1)
        for i, ends in enumerate(
            (a, b) for a in range(schedule.num_stages) for b in range(a + 1, schedule.num_stages)
        )
    }
    assert replay(schedule, SLOTS, portals=lines).makespan_s == replay(schedule, SLOTS).makespan_s


def test_the_time_of_portals_is_communication() -> None:
    schedule, sizes = one_f_one_b(4, 6), {"activation_bytes": [0] * 3}
    slow = Link("slow", bandwidth_bytes_per_s=Fraction(1, 3))  # type: ignore[arg-type]
    without = breakdown(schedule, SLOTS, slow, **sizes)
    found = breakdown(schedule, SLOTS, slow, portals={SKIP: (4, 4)}, **sizes)
    assert without.seconds["communication"] == 0
    assert found.seconds["communication"] > 0
    assert sum(found.shares.values()) == 1

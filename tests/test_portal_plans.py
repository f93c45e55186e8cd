"""Portals where a schedule is laid out in time and drawn."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gpipe_bench.pipeline import NAMED, SLOTS, Link, draw, gpipe, named, one_f_one_b, replay, svg
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.planner.breakdown import breakdown

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


def test_portals_are_drawn() -> None:
    timeline = replay(gpipe(4, 2, "never"), SLOTS)
    assert draw(timeline, [SKIP]).splitlines()[-1] == "portals | stage 0 -> stage 3: skip"
    assert draw(timeline, [SKIP]).startswith(draw(timeline))
    picture = svg(timeline, "title", [SKIP])
    for title in ("skip: 0F0 -&gt; 3F0", "skip: 0F1 -&gt; 3F1", "skip: 3B1 -&gt; 0B1", "skip: 3B0 -&gt; 0B0"):
        assert title.replace("&gt;", ">") in picture.replace("&gt;", ">")
    assert picture.count("<line ") == 4
    assert "<line " not in svg(timeline, "title")

"""Collectives by the ring, and where they stand in a step, against steps computed by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.pipeline import (
    FREE,
    SLOTS,
    Action,
    Kind,
    Link,
    Schedule,
    Timeline,
    gpipe,
    named,
    one_f_one_b,
    replay,
)
from gpipe_bench.pipeline.plan.links import Bucket, Gather, bucket_bytes_of
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.planner import Costs, Request
from gpipe_bench.planner.candidate import Grid
from gpipe_bench.planner.collectives import all_gather_s, all_reduce_s, pass_s
from gpipe_bench.planner.costs import SizeCosts
from gpipe_bench.planner.predict import COLLECTIVES, PARTS, Breakdown, breakdown
from gpipe_bench.planner.steps import StageTimes, times_on

LINK = Link("test", latency_s=Fraction(1, 10), bandwidth_bytes_per_s=Fraction(100))  # type: ignore[arg-type]
RANKS = st.integers(1, 64)
BYTES = st.integers(0, 10**9)


@given(BYTES, RANKS)
def test_a_ring_is_its_hops(num_bytes: int, ranks: int) -> None:
    """A gather or a scatter goes round hop by hop, a piece of 1 / ranks at a time."""
    exact: Any = Fraction(num_bytes)
    hops_s = (ranks - 1) * (LINK.latency_s + exact / ranks / LINK.bandwidth_bytes_per_s)
    assert all_gather_s(exact, ranks, LINK) == hops_s
    assert all_reduce_s(exact, ranks, LINK) == 2 * hops_s


def test_two_ranks_on_a_link_whose_directions_share_it_send_one_after_the_other() -> None:
    both_ways = Link("shared", 0, 100, shares_directions=True)
    assert all_gather_s(400, 2, Link("full duplex", 0, 100)) == 2
    assert all_gather_s(400, 2, both_ways) == 4
    assert all_gather_s(400, 3, both_ways) == pytest.approx(2 * 400 / 3 / 100)  # each link is used one way


def stage_on(grid: Grid, sizes: list[list[int]], seconds: list[float], **links: Any) -> StageTimes:
    """A stage of layers with such parameters, whose forward and backward take such seconds."""
    layers = SizeCosts(layers_s={"F": seconds, "R": seconds, "B": seconds})
    request = Request(accelerators=grid.accelerators, memory_bytes=1, batch_size=8, **links)
    costs = Costs(sizes={1: layers}, parameter_bytes=sizes)
    return times_on(grid, costs, 1, request, split=False).stage(0, len(seconds))


def test_shards_are_scattered_layer_by_layer_and_then_summed_over_replicas() -> None:
    slow = {"link": Link("link", 0, 1), "between": Link("slow", 0, 0.1), "hosts": 2, "cards": 4}
    found = stage_on(Grid(1, 2, 4, 2), [[8, 8], [], [32]], [2, 1, 1], **slow).buckets
    # 3 hops of 8 bytes, then a shard of 8 bytes over 2 replicas: 2 hops of 4 bytes at a tenth of the rate.
    assert [(bucket.ready, bucket.takes_s) for bucket in found] == [(1 / 4, 24 + 80), (1, 12 + 40)]


def test_gathering_ahead_hides_behind_the_layer_before() -> None:
    link = Link("link", 0, 1)
    sizes, compute_s = [4.0, 8.0, 2.0], [3.0, 3.0, 3.0]  # gathers of 2, 4 and 1 s
    assert pass_s(sizes, compute_s, 2, link, ahead=False) == 7
    assert pass_s(sizes, compute_s, 2, link, ahead=True) == 2 + 1
    assert pass_s([], [], 2, link, ahead=True) == 0


def test_parameters_are_fetched_layer_by_layer_and_needed_as_the_forward_goes() -> None:
    found = stage_on(Grid(1, 1, 2, 2), [[4], [], [8]], [1, 2, 1], link=Link("link", 0, 1)).gathers
    assert found == (Gather(0, 2), Gather(0.75, 4))


def test_a_first_forward_waits_inside_for_what_it_needs() -> None:
    """F takes 2 s and needs a gather that ends at 1 and, half-way, one that ends at 5: 1-2, 5-6."""
    timeline = replay(gpipe(1, 2, "never"), {Kind.F: 2, Kind.B: 1}, gathers=[[Gather(0, 1), Gather(0.5, 4)]])
    assert [(str(e.action), e.start_s, e.end_s) for e in timeline.events[:2]] == [
        ("0F0", 0, 6),
        ("0F1", 6, 8),
    ]
    assert spans(timeline) == [("gather 0", 0, 0, 1), ("gather 1", 0, 1, 5)]


def spans(timeline: Timeline) -> list[tuple[str, int, float, float]]:
    return [(span.name, span.stage, span.start_s, span.end_s) for span in timeline.collectives]


def test_buckets_leave_inside_the_last_backward_and_the_update_waits() -> None:
    """Stage 1: F0 1-2, B0 2-4; its buckets at 3 and 4. Stage 0: B0 4-6; a bucket of 5 s at 5."""
    buckets = [[Bucket(0.5, 5)], [Bucket(0.5, 0.5), Bucket(1, 0.25)]]
    timeline = replay(gpipe(2, 1, "never"), SLOTS, reductions=buckets, update_s=[1, 1])
    assert spans(timeline) == [("reduce 0", 1, 3, 3.5), ("reduce 1", 1, 4, 4.25), ("reduce 0", 0, 5, 10)]
    assert [(w.stage, w.start_s, w.end_s) for w in timeline.work] == [(0, 10, 11), (1, 4.25, 5.25)]
    assert timeline.makespan_s == 11
    assert [bucket_bytes_of(mib * 2**20) / 2**20 for mib in (2, 8, 400)] == [1, 2, 25], "as docs/grid.md says"


def test_a_bucket_waits_for_the_one_before_on_its_worker() -> None:
    """Stages 0 and 1 on one worker: what stage 1 sends late keeps stage 0's waiting."""
    both = Schedule("both", 2, 1, "never", (tuple(map(Action.parse, ("0F0", "1F0", "1B0", "0B0"))),), (0, 0))
    timeline = replay(both, SLOTS, reductions=[[Bucket(0, 1)], [Bucket(1, 5)]])
    assert spans(timeline) == [("reduce 0", 1, 4, 9), ("reduce 0", 0, 9, 10)]


def test_buckets_leave_inside_the_last_w_where_backwards_are_split() -> None:
    schedule = named("zb-h1", 2, 4)
    timeline = replay(schedule, SLOTS, reductions=[[Bucket(1, 1)]] * 2)
    for span in timeline.collectives:
        last = timeline.of_stage(span.stage)[-1]
        assert last.action.kind in (Kind.W, Kind.B)
        assert span.start_s == last.end_s


def test_the_timeline_keeps_its_reductions() -> None:
    timeline = replay(gpipe(2, 1, "never"), SLOTS, reductions=[[Bucket(1, 1)]] * 2)
    assert Timeline.from_data(timeline.to_data()) == timeline
    assert "collectives" not in replay(gpipe(2, 1, "never"), SLOTS).to_data()


def test_the_breakdown_names_what_is_waited_for() -> None:
    """6 s without a grid. Forwards wait 1 s each, 2 x 2 of them busy; the last bucket ends 3 s after B0."""
    found = breakdown(
        gpipe(2, 1, "never"), SLOTS, reductions=[[Bucket(1, 3)], [Bucket(0, 1)]],
        collective_s={Kind.F: 1, Kind.B: 0},
    )  # fmt: skip
    assert found.makespan_s == 6 + 2 + 3
    assert {part: float(value) for part, value in found.seconds.items() if value} == {
        "computation": 6, COLLECTIVES: 2 * (11 - 6), "bubble": 6,
    }  # fmt: skip


COSTS = st.integers(0, 9)


@settings(max_examples=60)
@given(st.data())
def test_the_parts_add_up_and_a_step_is_no_shorter_for_a_grid(data: st.DataObject) -> None:
    make = SCHEDULES[data.draw(st.sampled_from(sorted(SCHEDULES)))]
    schedule = make(
        data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), data.draw(st.sampled_from(REMAT_MODES))
    )
    stages = schedule.num_stages
    action_s = {(stage, kind): data.draw(COSTS) for stage in range(stages) for kind in Kind}
    waits_s = {(stage, kind): data.draw(COSTS) for stage in range(stages) for kind in Kind}
    eighths = st.integers(0, 8).map(lambda number: Fraction(number, 8))  # floats know them exactly
    bucket = st.builds(Bucket, eighths, COSTS)
    buckets = [data.draw(st.lists(bucket, max_size=3)) for _ in range(stages)]
    gather = st.builds(Gather, eighths, COSTS)
    gathers = [
        sorted(data.draw(st.lists(gather, max_size=2)), key=lambda each: each.needed) for _ in range(stages)
    ]
    link = data.draw(st.sampled_from([FREE, Link("slow", 1, 2)]))
    arguments = {
        "activation_bytes": [data.draw(COSTS)] * (stages - 1),
        "setup_s": [data.draw(COSTS) for _ in range(stages)],
        "update_s": [data.draw(COSTS) for _ in range(stages)],
    }
    found = breakdown(
        schedule, action_s, link, gathers=gathers, reductions=buckets, collective_s=waits_s, **arguments
    )
    assert tuple(found.seconds) == (*PARTS, COLLECTIVES)
    assert all(value >= 0 for value in found.seconds.values())
    assert sum(found.seconds.values()) == schedule.num_workers * Fraction(found.timeline.makespan_s)
    alone = breakdown(schedule, action_s, link, **arguments)
    assert tuple(alone.seconds) == PARTS
    for part in ("computation", "recompute", "weight update"):
        assert alone.seconds[part] == found.seconds[part]
    assert found.makespan_s >= alone.makespan_s
    for worker in range(schedule.num_workers):
        mine = [
            span
            for span in found.timeline.collectives
            if schedule.worker(span.stage) == worker and span.name.startswith("reduce")
        ]
        assert all(first.end_s <= second.start_s for first, second in pairwise(mine))


# The attribution of device-seconds


def parts(found: Breakdown) -> dict[str, float]:
    """The parts that are not zero."""
    assert tuple(found.seconds) == PARTS
    return {part: float(seconds) for part, seconds in found.seconds.items() if seconds}


def times(forward: tuple[float, ...], backward: tuple[float, ...], recompute: tuple[float, ...] = ()):
    """By (stage, kind)."""
    found = {(stage, Kind.F): value for stage, value in enumerate(forward)}
    found |= {(stage, Kind.B): value for stage, value in enumerate(backward)}
    return found | {(stage, Kind.R): value for stage, value in enumerate(recompute)}


def test_communication_that_computation_hides_costs_nothing() -> None:
    """Stage 1 takes the first micro-batch from 2 to 10, and the second one's message arrives at 3."""
    uneven = times((1, 8), (1, 8))
    schedule = gpipe(2, 2, "never")
    free, slow = (
        breakdown(schedule, uneven),
        breakdown(schedule, uneven, Link("slow", 0, 1), activation_bytes=[1]),
    )
    # First message: on the critical path, 1 s. Second: hidden. Gradients: the last one alone counts, 1 s.
    assert slow.makespan_s == free.makespan_s + 2
    assert slow.seconds["communication"] == 4
    assert slow.seconds["load imbalance"] == free.seconds["load imbalance"]
    assert slow.seconds["bubble"] == free.seconds["bubble"]


def test_setup_counts_with_the_waiting_for_it() -> None:
    """The first stage divides the inputs for 1 s, while the second one waits."""
    found = breakdown(gpipe(2, 1, "never"), SLOTS, setup_s=[1, 0])
    assert found.makespan_s == 7
    assert parts(found) == {"computation": 6, "setup": 2, "bubble": 6}


def test_all_reasons_at_once() -> None:
    """K = 2, M = 2 by hand, the last micro-batch kept, 1 s for a message, the set-up and each weight update.

    stage 0: set-up 0-1, F0 1-2, F1 2-3, B1 14-15, R0 15-16, B0 20-21, update 21-22
    stage 1:             F0 3-6, F1 6-9, B1 9-13, R0 13-15, B0 15-19, update 19-20
    """
    found = breakdown(
        gpipe(2, 2, "except_last"), times((1, 3), (1, 4), (1, 2)), Link("slow", latency_s=1),
        setup_s=[1, 0], update_s=[1, 1],
    )  # fmt: skip
    assert found.makespan_s == 22
    # Free link: 20. Without set-up: 19. Even stages (F 2, R 1.5, B 2.5): 3 x 4.5 + 1.5, update 1: 16.
    assert parts(found) == {
        "computation": 2 * (1 + 1) + 2 * (3 + 4), "recompute": 3, "weight update": 2, "setup": 2,
        "communication": 4, "load imbalance": 2 * (19 - 16), "bubble": 44 - 18 - 3 - 2 - 2 - 4 - 6,
    }  # fmt: skip


numbers = st.floats(0, 10, allow_nan=False)


@given(st.integers(1, 6), st.integers(1, 8), numbers, numbers)
def test_even_stages_have_no_imbalance(num_stages: int, num_microbatches: int, f: float, b: float) -> None:
    for make in (gpipe, one_f_one_b):
        found = breakdown(make(num_stages, num_microbatches, "never"), {Kind.F: f, Kind.B: b})
        assert found.seconds["load imbalance"] == 0
        if f + b:
            assert found.shares["bubble"] == Fraction(num_stages - 1, num_microbatches + num_stages - 1)

"""The replay against closed forms, published simulations and an independent evaluation of the same rules."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.experiments.drawing import charts
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.pipeline import (
    FREE,
    LINKS,
    SLOTS,
    Action,
    Kind,
    Link,
    Schedule,
    gpipe,
    naive,
    one_f_one_b,
    replay,
)
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.plan.walk import dependencies, execution_order, transfers

seconds = st.fractions(min_value=Fraction(1, 8), max_value=8, max_denominator=12)
sizes = st.tuples(st.integers(1, 7), st.integers(1, 12))


def split_backward(schedule: Schedule) -> Schedule:
    """The same schedule with each B as I, W."""
    rows = tuple(
        tuple(
            half
            for a in row
            for half in (
                [Action(a.stage, Kind.I, a.microbatch), Action(a.stage, Kind.W, a.microbatch)]
                if a.kind is Kind.B
                else [a]
            )
        )
        for row in schedule.actions
    )
    return Schedule(schedule.name, schedule.num_stages, schedule.num_microbatches, schedule.remat, rows)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    make = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    schedule = make(*draw(sizes), remat=draw(st.sampled_from(REMAT_MODES)))
    return split_backward(schedule) if draw(st.booleans()) else schedule


@st.composite
def steps(draw: st.DrawFn) -> tuple[Schedule, dict[str, object]]:
    """A schedule and uneven costs of everything, as whole numbers."""
    schedule = draw(schedules())
    numbers = st.integers(0, 9)
    boundaries, stages = schedule.num_stages - 1, schedule.num_stages
    keys = [
        (stage, kind, m) for stage in range(stages) for kind in Kind for m in range(schedule.num_microbatches)
    ]
    times = draw(st.lists(numbers, min_size=len(keys), max_size=len(keys)))
    costs = {
        "action_s": dict(zip(keys, times, strict=True)),
        "activation_bytes": draw(st.lists(numbers, min_size=boundaries, max_size=boundaries)),
        "gradient_bytes": draw(st.lists(numbers, min_size=boundaries, max_size=boundaries)),
        "setup_s": draw(st.lists(numbers, min_size=stages, max_size=stages)),
        "update_s": draw(st.lists(numbers, min_size=stages, max_size=stages)),
        "early_recompute": draw(st.booleans()),
    }
    return schedule, costs


LINK = st.builds(
    lambda latency, bandwidth: Link("drawn", latency, bandwidth),
    st.integers(0, 5), st.fractions(Fraction(1, 4), 4, max_denominator=4),
)  # fmt: skip


# Closed forms ----------------------------------------------------------------------------------------------


@given(sizes, seconds, seconds, seconds)
def test_naive_takes_every_stage_in_turn(size, f, r, b) -> None:
    num_stages, num_microbatches = size
    timeline = replay(naive(num_stages, num_microbatches), {Kind.F: f, Kind.B: b})
    assert timeline.makespan_s == num_microbatches * num_stages * (f + b)
    assert timeline.bubble == Fraction(num_stages - 1, num_stages)
    # Recomputing early, only the last stage's recomputation is waited for.
    recomputing = replay(naive(num_stages, num_microbatches, "always"), {Kind.F: f, Kind.R: r, Kind.B: b})
    assert recomputing.makespan_s == num_microbatches * (num_stages * (f + b) + r)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@given(size=sizes, f=seconds, r=seconds, b=seconds)
def test_pipelines_reach_their_closed_forms(make, size, f, r, b) -> None:
    num_stages, num_microbatches = size
    times, rounds = {Kind.F: f, Kind.R: r, Kind.B: b}, num_microbatches + num_stages - 1
    plain = replay(make(num_stages, num_microbatches, "never"), times)
    assert plain.makespan_s == rounds * (f + b)
    assert plain.bubble == Fraction(num_stages - 1, rounds)
    late = replay(make(num_stages, num_microbatches, "always"), times, early_recompute=False)
    assert late.makespan_s == rounds * (f + r + b)
    assert late.bubble == Fraction(num_stages - 1, rounds)


@given(sizes, seconds, seconds, seconds)
def test_early_recomputation_takes_the_recomputation_off_the_drain(size, f, r, b) -> None:
    num_stages, num_microbatches = size
    times, rounds = {Kind.F: f, Kind.R: r, Kind.B: b}, num_microbatches + num_stages - 1
    always = replay(gpipe(num_stages, num_microbatches, "always"), times)
    assert always.makespan_s == rounds * (f + b) + num_microbatches * r
    kept = replay(gpipe(num_stages, num_microbatches, "except_last"), times)
    assert kept.makespan_s == rounds * (f + b) + (num_microbatches - 1) * r


@given(sizes, seconds, seconds, seconds)
def test_sending_the_input_gradient_first_takes_the_weights_off_the_drain(size, f, i, w) -> None:
    num_stages, num_microbatches = size
    timeline = replay(split_backward(gpipe(*size, "never")), {Kind.F: f, Kind.I: i, Kind.W: w})
    rounds = num_microbatches + num_stages - 1
    assert timeline.makespan_s == rounds * (f + i) + num_microbatches * w


def test_the_papers_bubbles() -> None:
    bubbles = {
        m: replay(gpipe(4, m, "never"), {kind: Fraction(s) for kind, s in SLOTS.items()})
        for m in (4, 8, 32, 128)
    }
    assert {m: timeline.bubble for m, timeline in bubbles.items()} == {
        4: Fraction(3, 7), 8: Fraction(3, 11), 32: Fraction(3, 35), 128: Fraction(3, 131),
    }  # fmt: skip
    assert replay(gpipe(4, 8, "never"), SLOTS).bubble == 3 / 11  # whole numbers: rounded once


def test_speed_ups_that_balanced_stages_allow() -> None:
    """The bounds on Table 2, relative to K = 2, M = 1, of which the mini-batch is one micro-batch."""
    cells = [cell for cell in load_paper() if cell.table == "table2-bound"]
    assert len(cells) == 18
    for cell in cells:
        num_microbatches = int(cell.row.split()[0].removeprefix("M="))
        num_stages = int(cell.column.removeprefix("K="))
        remat = "always" if cell.row.endswith("with re-materialization") else "never"
        base = replay(gpipe(2, 1, remat), SLOTS).makespan_s * Fraction(1, 2)  # stages of half a model
        step = replay(gpipe(num_stages, num_microbatches, remat), SLOTS).makespan_s
        speed_up = base / (step * Fraction(1, num_stages * num_microbatches))
        assert float(speed_up) == pytest.approx(cell.value, abs=max(cell.rounding, 1e-12))


# The rules --------------------------------------------------------------------------------------------------


def expected_starts(schedule: Schedule, link: Link, costs) -> dict[Action, float]:
    """Starts by the definition, action by action in an order of dependencies; a queue per direction."""
    source_of = {transfer.target: transfer.source for transfer in transfers(schedule)}
    needs, last = dependencies(schedule), schedule.num_stages - 1
    start, end, arrival = {}, {}, {}
    queue_free: dict[tuple[int, int], float] = {}
    stage_free = dict(enumerate(costs["setup_s"]))
    for action in execution_order(schedule):
        waits_for = [stage_free[action.stage]]
        waits_for += [end[need] for need in needs[action] if need.stage == action.stage]
        if action in source_of:
            waits_for.append(arrival[source_of[action]])
        start[action] = max(waits_for)
        end[action] = start[action] + costs["action_s"][action.stage, action.kind, action.microbatch]
        stage_free[action.stage] = end[action]
        target = action.stage + 1 if action.kind is Kind.F else action.stage - 1
        if 0 <= target <= last and action.kind in (Kind.F, Kind.B, Kind.I):
            sizes_of = costs["activation_bytes" if action.kind is Kind.F else "gradient_bytes"]
            queue = (action.stage, target)
            left = max(end[action], queue_free.get(queue, 0)) + link.occupied_s(sizes_of[min(queue)])
            queue_free[queue] = left
            arrival[action] = left + link.latency_s
    return start


@settings(max_examples=30)
@given(steps(), LINK)
def test_every_start_is_the_earliest_that_the_rules_allow(step, link) -> None:
    schedule, costs = step
    costs["early_recompute"] = True  # in the order in which the oracle walks, a gradient may come after its R
    timeline = replay(schedule, link=link, **costs)
    assert {event.action: event.start_s for event in timeline.events} == expected_starts(
        schedule, link, costs
    )


@settings(max_examples=30)
@given(steps(), LINK, st.integers(0, 3), st.fractions(Fraction(1, 4), 1, max_denominator=4))
def test_a_slower_link_never_makes_a_step_faster(step, link, more_latency, less_bandwidth) -> None:
    schedule, costs = step
    slower = Link("slower", link.latency_s + more_latency, link.bandwidth_bytes_per_s * less_bandwidth)
    shared = Link("shared", link.latency_s, link.bandwidth_bytes_per_s, shares_directions=True)
    spans = [replay(schedule, link=each, **costs).makespan_s for each in (FREE, link, slower, shared)]
    free_s, link_s, slower_s, shared_s = spans
    assert free_s <= link_s <= slower_s
    assert link_s <= shared_s


# By hand ----------------------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    """K = 2, M = 2, F = 2, B = 3; a message is 1 s of latency and 4 s on the link forward, 1 s back."""
    timeline = replay(
        gpipe(2, 2, "never"),
        {Kind.F: 2, Kind.B: 3},
        Link("slow", latency_s=1, bandwidth_bytes_per_s=10),
        activation_bytes=[40],
        gradient_bytes=[10],
        setup_s=[1, 0],
        update_s=[2, 1],
    )
    assert [(str(e.action), e.start_s, e.end_s) for e in timeline.events] == [
        ("0F0", 1, 3), ("0F1", 3, 5), ("1F0", 8, 10), ("1F1", 12, 14), ("1B1", 14, 17), ("1B0", 17, 20),
        ("0B1", 19, 22), ("0B0", 22, 25),
    ]  # fmt: skip
    # The second message waits until the first has left the link, at 7; the first is still under way then.
    assert [(m.name, m.start_s, m.end_s) for m in timeline.messages] == [
        ("0F0->1", 3, 8), ("0F1->1", 7, 12), ("1B1->0", 17, 19), ("1B0->0", 20, 22),
    ]  # fmt: skip
    assert [(w.name, w.stage, w.start_s, w.end_s) for w in timeline.work] == [
        ("setup", 0, 0, 1), ("update", 0, 25, 27), ("update", 1, 20, 21),
    ]  # fmt: skip
    assert timeline.makespan_s == 27
    assert timeline.busy_s(0) == 13
    assert timeline.idle_s == 54 - 13 - 11
    assert timeline.provenance == "replayed"
    assert timeline.conditions == {"link": "slow"}


def test_directions_that_share_a_link_wait_for_each_other() -> None:
    """1F1B on 2 stages: 0F1 is under way when 1B0's gradient wants to go back."""
    costs = {"activation_bytes": [5], "gradient_bytes": [5]}
    times = {Kind.F: 1, Kind.B: 1}
    both = {
        shared: replay(one_f_one_b(2, 2), times, Link("x", 0, 1, shared), **costs) for shared in (False, True)
    }
    gradient = {
        shared: next(m for m in timeline.messages if m.name == "1B0->0") for shared, timeline in both.items()
    }
    assert (gradient[False].start_s, gradient[False].end_s) == (8, 13)
    assert (gradient[True].start_s, gradient[True].end_s) == (11, 16)


def test_the_most_specific_duration_counts() -> None:
    schedule = gpipe(2, 2, "never")
    times = {Kind.F: 1, Kind.B: 2, (1, Kind.F): 5, (1, Kind.F, 1): 7}
    duration = {str(e.action): e.duration_s for e in replay(schedule, times).events}
    assert duration == {
        "0F0": 1, "0F1": 1, "1F0": 5, "1F1": 7, "0B0": 2, "0B1": 2, "1B0": 2, "1B1": 2,
    }  # fmt: skip
    assert replay(schedule, lambda action: duration[str(action)]) == replay(schedule, times)


def test_links_are_checked_and_say_where_they_come_from() -> None:
    for name, link in LINKS.items():
        assert link.name == name
        assert len(link.source) > 20
        if name.startswith(("ethernet-", "infiniband-")):
            assert f" {8 * link.bandwidth_bytes_per_s / 1e9:g} Gb/s" in link.source
    # A gradient of 100 MB takes longer on each slower kind of link.
    order = (
        "nvlink5 nvlink4 nvlink3 nvlink2 infiniband-ndr pcie5-host infiniband-hdr pcie4-host infiniband-edr"
    )
    order += " pcie3-host ethernet-25g loopback ethernet-10g ethernet-1g"
    takes_s = [LINKS[name].occupied_s(100e6) + LINKS[name].latency_s for name in order.split()]
    assert takes_s == sorted(takes_s)
    assert LINKS["ethernet-1g"].occupied_s(125e6) == 1


def test_the_largest_pipeline_of_the_paper_can_be_replayed() -> None:
    times = {Kind.F: 0.01, Kind.R: 0.01, Kind.B: 0.02}
    timeline = replay(gpipe(128, 512), times, LINKS["pcie3-host"], activation_bytes=[1e6] * 127)
    assert len(timeline.events) == 128 * 512 * 3


# Timelines: what is read off them, kept of them and drawn


def test_gantt_chart() -> None:
    timeline = replay(gpipe(3, 4, remat="except_last"), SLOTS)
    figure = charts({"three stages": timeline}, "slots")
    (axes,) = figure.axes
    boxes = [collection.get_paths()[0].get_extents() for collection in axes.collections]
    wanted = [(event.start_s, event.end_s) for worker in range(3) for event in timeline.of_worker(worker)]
    for box, ends in zip(boxes, wanted, strict=True):
        assert (box.x0, box.x1) == pytest.approx(ends)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "recompute", "backward"]

"""Measured actions laid out on devices, the numbers that come of it, and how far a replay may be off."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_steps import found, job_of, steps, timed, value
from scipy.stats import t

from gpipe_bench.experiments.paper.timed.claims import (
    prediction_interval,
    replayed_spread,
)
from gpipe_bench.experiments.paper.timed.replay import (
    HIDDEN,
    balanced,
    hidden_from,
    lay_out,
    same_share,
    slowdowns,
    take_apart,
)
from gpipe_bench.experiments.paper.timed.results import check_ran, results
from gpipe_bench.experiments.paper.timed.workloads import Configuration
from gpipe_bench.harness.record import Metric
from gpipe_bench.pipeline import LINKS, Event, Kind, Link, Timeline, gpipe, replay

PCIE = LINKS["pcie3-host"]

# Steps laid out


@pytest.mark.parametrize(("num_stages", "num_microbatches", "slots"), [(2, 4, 18), (4, 16, 72), (8, 8, 52)])
def test_even_stages_take_the_slots_of_the_schedule(num_stages, num_microbatches, slots):
    even = timed(num_stages, num_microbatches, remat="except_last")
    assert lay_out(even).makespan_s == pytest.approx(slots * 0.01)
    assert balanced(even).makespan_s == pytest.approx(slots * 0.01)
    assert even.spread() == 0


def test_a_slow_stage_costs_and_the_balanced_step_has_the_same_work():
    step, even = lay_out(timed(slow=1.5)), balanced(timed(slow=1.5))
    assert even.makespan_s < step.makespan_s
    busy = [sum(each.busy_s(stage) for stage in range(2)) for each in (step, even)]
    assert busy[0] == pytest.approx(busy[1])


def test_link_update_and_setup_lengthen_the_step_and_are_told_apart():
    plain = lay_out(timed()).makespan_s
    assert lay_out(timed(), Link("slow", 0.0, 1e5)).makespan_s > plain
    assert lay_out(timed(update_s=(0.005, 0.005))).makespan_s == pytest.approx(plain + 0.005)
    assert lay_out(timed(setup_s=0.003)).makespan_s == pytest.approx(plain + 0.003)
    apart = take_apart(timed(slow=1.7, setup_s=0.001, update_s=(0.002, 0.004)), Link("slow", 1e-4, 1e6))
    assert sum(apart.shares.values()) == Fraction(1)
    assert all(apart.shares[part] > 0 for part in ("load imbalance", "communication", "setup"))


def test_a_step_that_forgot_something_is_refused():
    schedule = gpipe(2, 4, "always")
    step = replay(schedule, {Kind.F: 1, Kind.R: 1, Kind.B: 2})
    assert check_ran(step, schedule) == {"F": 8, "R": 8, "B": 8}
    without = Timeline.of([e for e in step.events if str(e.action) != "1R2"], 2)
    with pytest.raises(RuntimeError, match="the step ran 23 actions where"):
        check_ran(without, schedule)
    twice = Timeline.of([*step.events, Event(step.events[0].action, 50.0, 51.0)], 2)
    with pytest.raises(RuntimeError, match="the step ran 25 actions where"):
        check_ran(twice, schedule)
    second = Timeline.of([event for event in step.events if event.action.stage == 1], 2)
    assert check_ran(second, schedule, 1) == {"F": 4, "R": 4, "B": 4}
    with pytest.raises(RuntimeError, match="stage 0 ran 12 actions where"):
        check_ran(second, schedule, 0)


# How fast a link must be


@settings(max_examples=25)
@given(st.integers(2, 5), st.floats(1e-4, 1.0), st.integers(10**6, 10**9))
def test_messages_are_hidden_from_the_found_bandwidth_on(num_stages, unit_s, num_bytes):
    sizes = (num_bytes,) * (num_stages - 1)
    one = timed(num_stages, 8, unit_s=unit_s, activation_bytes=sizes, gradient_bytes=sizes)
    least = hidden_from(one)
    above, below = slowdowns(one, [least * 1.02, least / 1.02])
    assert below < 1 / (1 + HIDDEN) <= above
    swept = slowdowns(one, [least * 10**power for power in (-2, -1, 0, 1, 2)])
    assert swept == sorted(swept)  # a faster link is never worse
    assert swept[-1] <= 1
    assert hidden_from(one, latency_s=100.0 * unit_s) is None  # latency alone may be too much


@settings(max_examples=25)
@given(st.floats(0.01, 1000), st.floats(0.01, 1000), st.integers(2, 4))
def test_a_slowed_link_keeps_the_share_of_the_messages(slower, larger, num_stages):
    """Actions `slower` times as long and messages `larger` times as large: the same step, slowed down."""
    one, many = (1e6,) * (num_stages - 1), (1e6 * larger,) * (num_stages - 1)
    original = timed(num_stages, 6, activation_bytes=one, gradient_bytes=one)
    scaled = timed(num_stages, 6, unit_s=0.01 * slower, activation_bytes=many, gradient_bytes=many)
    step_s = lay_out(scaled, same_share(PCIE, slower, larger)).makespan_s
    assert step_s == pytest.approx(lay_out(original, PCIE).makespan_s * slower)


# Numbers


def test_ratios_and_errors_come_from_the_action_times():
    """7 slots of 10 ms at M=1, 19 at M=4; the link's latency shows a little."""
    job = job_of(Configuration(2, 1, 32, runs_for_real=True), Configuration(2, 4, 32, runs_for_real=True))
    one, other = (
        found(steps(num_microbatches=1, real_s=first), steps(num_microbatches=4, real_s=second))
        for first, second in (((0.07, 0.07), (0.2, 0.2)), ((0.06, 0.08), (0.1, 0.19)))
    )
    metrics, details = results(job, [one, other])
    first, second = value(metrics, "step", K=2, M=1), value(metrics, "step", K=2, M=4)
    assert (first, second) == pytest.approx((70, 190), rel=0.01)
    assert value(metrics, "normalised throughput", K=2, M=4) == pytest.approx(first / second)
    assert value(metrics, "real step", K=2, M=1) == pytest.approx(75)  # the slower process, median
    assert value(metrics, "replay error", K=2, M=4) == pytest.approx(second / 200 - 1)
    assert value(metrics, "share of the balanced step", K=2, M=4) == pytest.approx(1, rel=0.01)
    provenances = {metric.name: metric.provenance for metric in metrics}
    assert (provenances["step"], provenances["real step"]) == ("replayed", "measured")
    assert json.loads(json.dumps(details))["cells"]["K=2 M=4"]["counts"] == {"F": 8}


# How far a replay may be off


def replayed(number, low=None, high=None, samples=()):
    return Metric(
        name="step", value=number, unit="ratio", provenance="replayed", low=low, high=high, samples=samples
    )


@given(st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=12, unique=True))
def test_the_interval_is_that_of_one_more_draw(drawn):
    low, high = prediction_interval(drawn)
    middle, n = sum(drawn) / len(drawn), len(drawn)
    deviation = math.sqrt(sum((each - middle) ** 2 for each in drawn) / (n - 1))
    reach = t.ppf(0.975, n - 1) * deviation * math.sqrt(1 + 1 / n)
    assert (low, high) == pytest.approx((middle - reach, middle + reach))


def test_a_replay_that_is_too_fast_lowers_the_throughput_and_not_the_other_way():
    """measured steps take 10 to 21 % longer than laid out

    throughput  |--x---|     |x|  as it was replayed
    """
    slower = (math.log(1.10), math.log(1.21))
    rate = replayed_spread(replayed(2.0, 1.9, 2.1), slower, "as the step grows", [("share", 0.5, 1.0)])
    assert (rate.low, rate.high) == pytest.approx((1.9 / 1.21 / 2, 2.1 / 1.10))
    assert [part.what for part in rate.parts] == ["interval", "error of the replay", "share"]
    assert (rate.parts[1].low, rate.parts[1].high) == pytest.approx((2.0 / 1.21, 2.0 / 1.10))
    share = replayed_spread(replayed(2.0), slower, "either way")
    assert (share.low, share.high) == pytest.approx((2.0 / 1.21, 2.42))

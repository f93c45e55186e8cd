"""Measured actions laid out on devices, the numbers that come of it, and how far a replay may be off."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_steps import found, job_of, steps, timed, value
from records import record
from scipy.stats import t

from gpipe_bench.experiments.paper.timed.claims import (
    derived,
    next_error,
    prediction_interval,
    replayed_spread,
)
from gpipe_bench.experiments.paper.timed.replay import (
    HIDDEN,
    TimedActions,
    balanced,
    hidden_from,
    lay_out,
    same_share,
    slowdowns,
    take_apart,
)
from gpipe_bench.experiments.paper.timed.results import check_ran, results, samples_of
from gpipe_bench.experiments.paper.timed.workloads import TABLE2, TABLE3, VERSION1, Configuration
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


def test_a_step_can_be_laid_out_with_more_micro_batches_than_were_run():
    few, whole_s = timed(num_microbatches=2), lay_out(timed()).makespan_s
    assert lay_out(few, num_microbatches=4).makespan_s == pytest.approx(whole_s)
    assert balanced(few, 4).makespan_s == pytest.approx(whole_s)


def test_link_update_and_setup_lengthen_the_step_and_are_told_apart():
    plain = lay_out(timed()).makespan_s
    assert lay_out(timed(), Link("slow", 0.0, 1e5)).makespan_s > plain
    assert lay_out(timed(update_s=(0.005, 0.005))).makespan_s == pytest.approx(plain + 0.005)
    assert lay_out(timed(setup_s=0.003)).makespan_s == pytest.approx(plain + 0.003)
    apart = take_apart(timed(slow=1.7, setup_s=0.001, update_s=(0.002, 0.004)), Link("slow", 1e-4, 1e6))
    assert sum(apart.shares.values()) == Fraction(1)
    assert all(apart.shares[part] > 0 for part in ("load imbalance", "communication", "setup"))


def test_records_keep_what_a_step_is_laid_out_from():
    whole = timed(4, 8, slow=1.3, setup_s=0.001, update_s=(0.1, 0.2, 0.3, 0.4))
    data = json.loads(json.dumps(whole.to_data()))
    again = TimedActions.from_data(data)
    assert lay_out(again).makespan_s == pytest.approx(lay_out(whole).makespan_s)
    assert again.partition == whole.partition
    assert data["actions_ms"]["0F"] == {"median": 10.0, "low": 10.0, "high": 10.0, "samples": 3}
    step = lay_out(timed(num_microbatches=3))
    assert samples_of([step, step])[1, Kind.B] == pytest.approx((0.02,) * 6)


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


def test_a_step_that_was_run_with_fewer_micro_batches_is_laid_out_with_more():
    job = job_of(Configuration(2, 4, 32, runs_for_real=True, counts=(8, 4), label="pipeline-2"))
    metrics, details = results(job, [found(steps(num_microbatches=4, real_s=(0.2, 0.2)))])
    assert list(details["cells"]) == ["pipeline-2", "pipeline-2 M=4"]
    assert details["cells"]["pipeline-2"]["batch_size"] == 64
    more, ran = ({"configuration": "pipeline-2", "M": count} for count in (8, 4))
    assert value(metrics, "step", **more) > value(metrics, "step", **ran)
    assert [metric.key for metric in metrics if metric.name == "real step"] == [ran]
    assert [facts["key"] for facts in details["cells"].values()] == [more, ran]


def test_nothing_is_relative_to_a_base_that_was_not_measured():
    """naive-1 can't run on two devices, so pipeline-2's measured step has nothing to be divided by."""
    real = Configuration(2, 4, 32, runs_for_real=True, label="pipeline-2")
    job = job_of(Configuration(1, 1, 32, label="naive-1"), real)
    answer = found(steps(num_microbatches=1), steps(num_microbatches=4, real_s=(0.2, 0.2)))
    metrics, _ = results(job, [answer])
    names = {metric.name for metric in metrics}
    assert {"normalised throughput", "normalised bound throughput", "real throughput"} <= names
    assert "normalised real throughput" not in names
    assert value(metrics, "real throughput", configuration="pipeline-2", M=4) == pytest.approx(160)


def test_an_engine_without_a_timeline_has_real_steps_only():
    answer = found(steps(0, real_s=(0.2, 0.2), why="no timeline"))
    metrics, details = results(job_of(Configuration(2, 4, 32, runs_for_real=True)), [answer])
    assert {metric.provenance for metric in metrics} == {"measured"}
    assert details["cells"]["K=2 M=4"]["why"] == "no timeline"


def test_a_scaled_model_keeps_the_papers_layers():
    for sizes in [*TABLE2.values(), *TABLE3.values(), *VERSION1.values()]:
        short, full = sizes["short"], sizes["full"]
        assert short.options.get("num_layers") == full.options.get("num_layers")
        assert short.scale


# How far a replay may be off


def errors(model, *values):
    """A record whose replays erred by these shares."""
    metrics = tuple(
        Metric(name="replay error", key={"M": m}, value=each, unit="ratio", provenance="measured")
        for m, each in enumerate(values)
    )
    return record(case={"model": model}, metrics=metrics)


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


def test_few_errors_of_a_model_are_joined_by_those_of_the_others_and_one_is_none():
    few, many = errors("few", 0.01, -0.01), errors("many", 0.1, 0.1, 0.1)
    assert next_error([few, many], "many") == pytest.approx(prediction_interval([-math.log(1.1)] * 3))
    joined = [-math.log(1.01), -math.log(0.99), *[-math.log(1.1)] * 3]
    assert next_error([few, many], "few") == pytest.approx(prediction_interval(joined))
    assert next_error([errors("a", 0.1)], "a") is None
    assert replayed_spread(replayed(2.0), None, "either way") is None
    assert replayed_spread(None, (0.0, 0.1), "either way") is None


def test_a_replay_that_is_too_fast_lowers_the_throughput_and_not_the_other_way():
    """measured steps take 10 to 21 % longer than laid out

    throughput  |--x---|     |x|  as it was replayed
    """
    slower = (math.log(1.10), math.log(1.21))
    rate = replayed_spread(replayed(2.0, 1.9, 2.1), slower, "as the step grows")
    assert (rate.low, rate.high) == pytest.approx((1.9 / 1.21, 2.1 / 1.10))
    assert [part.what for part in rate.parts] == ["interval", "error of the replay"]
    assert (rate.parts[1].low, rate.parts[1].high) == pytest.approx((2.0 / 1.21, 2.0 / 1.10))
    share = replayed_spread(replayed(2.0), slower, "either way")
    assert (share.low, share.high) == pytest.approx((2.0 / 1.21, 2.42))


def test_a_difference_below_zero_has_a_range_in_order():
    """A noisy machine's pipeline may gain less than nothing; that ended the comparison."""
    error = (math.log(0.25), math.log(2.0))
    below = replayed_spread(replayed(-2.0, -2.2, -1.8), error, "as the step grows")
    assert [(part.low, part.high) for part in below.parts] == [(-2.2, -1.8), (-8.0, -1.0)]
    assert (below.low, below.high) == pytest.approx((-8.8, -0.9))
    across = replayed_spread(replayed(1.0, -1.0, 2.0), error, "as the step grows")
    assert (across.low, across.high) == pytest.approx((-4.0, 8.0))


def test_a_derived_number_is_worked_out_turn_by_turn():
    many, few = replayed(3.0, samples=(2.0, 4.0)), replayed(1.5, samples=(1.0, 2.0))
    ratio = derived("ratio", lambda a, b: a / b, many, few)
    assert (ratio.value, ratio.samples, ratio.provenance) == (2.0, (2.0, 2.0), "replayed")
    assert derived("ratio", lambda a, b: a / b, many, replace(few, samples=())).samples == (2.0,)
    assert derived("ratio", lambda a, b: a / b, many, None) is None
    assert derived("ratio", lambda a, b: a / b, many, replayed(0.0, samples=(0.0, 0.0))) is None

"""Real small steps, measured actions laid out on devices, and how far a replay may be off."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up_steps import TINY, found, job_of, steps, timed, value
from scipy.stats import t
from torch import nn

from gpipe_bench.experiments.paper import steps as timed_steps
from gpipe_bench.experiments.paper.evidence import prediction_interval, replayed_spread
from gpipe_bench.experiments.paper.results import Steps, check_ran, lay_out, results, take_apart
from gpipe_bench.experiments.paper.steps import work
from gpipe_bench.experiments.paper.workloads import Configuration
from gpipe_bench.harness.record import Metric
from gpipe_bench.harness.reproduction import of_quotient
from gpipe_bench.harness.rounds import void_by
from gpipe_bench.pipeline import Event, Kind, Link, Timeline, gpipe, launch, replay


def test_real_steps_are_counted_and_timed():
    """All stages in this process: what ran is what the configuration says."""
    job = job_of(
        Configuration(2, 4, 8), Configuration(4, 2, 7, "except_last"), Configuration(3, 1, 4, "never")
    )._replace(rounds=1)
    answer = work(job)
    assert [each.counts for each in answer.steps] == [
        {"F": 8, "R": 8, "B": 8}, {"F": 8, "R": 4, "B": 8}, {"F": 3, "B": 3},
    ]  # fmt: skip
    for each, configuration in zip(answer.steps, job.configurations, strict=True):
        first, _ = each.turns  # there and back
        assert len(each.partition) == configuration.num_stages
        assert len(first.activation_bytes) == configuration.num_stages - 1
        assert all(s > 0 for samples in first.samples_s.values() for s in samples)
        size = configuration.microbatch_size
        assert first.activation_bytes[0] == size * 8 * 16 * 4  # examples, tokens, width, float32
    assert answer.copy_bytes_per_s > 0


def test_any_engine_runs_through_the_table_unchanged(monkeypatch):
    """Two processes, ours and an engine given as module:attribute."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "examples"))
    plan = (Configuration(2, 1, 4, runs_for_real=True), Configuration(2, 4, 4, runs_for_real=True))
    for engine in ("ours", "own_engine:FillDrain"):
        job = job_of(*plan, engine=engine)._replace(rounds=1)
        answers = launch(work, 2, job, device="cpu")
        assert answers[0].steps[0].partition == answers[1].steps[0].partition
        assert all(each.real_s and min(each.real_s) > 0 for answer in answers for each in answer.steps)
        metrics, details = results(job, answers)
        found_here = {metric.label for metric in metrics}
        assert "normalised real throughput K=2 M=4" in found_here
        assert ("replay error K=2 M=4" in found_here) == (engine == "ours")
        if engine != "ours":
            assert "keeps no timeline" in details["cells"]["K=2 M=4"]["why"]


ORDER: list[int] = []
"""The numbers of micro-batches of the steps that `Probe` took."""
FITS = [0]
NO_ROOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 41.30 GiB."


class Probe:
    """An engine that notes its steps."""

    def __init__(self, setup: Any) -> None:
        self.model, self.count = nn.Sequential(*setup.layers), setup.num_microbatches

    def step(self, batch: Any, target: Any, loss_fn: Any) -> None:
        ORDER.append(self.count)
        loss_fn(self.model(batch), target).backward()


class TooLarge(Probe):
    """An engine whose steps of one micro-batch find no memory, the first time or later."""

    def step(self, batch: Any, target: Any, loss_fn: Any) -> None:
        super().step(batch, target, loss_fn)
        self.timeline = replay(gpipe(2, self.count), {Kind.F: 1, Kind.R: 1, Kind.B: 2})
        if self.count == 1 and ORDER.count(1) > FITS[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 41.30 GiB.\nmore advice")


def job_with(engine: type, *counts: int, **more: Any) -> Any:
    ORDER.clear()
    plan = (Configuration(2, count, 4) for count in counts)
    return job_of(*plan, engine=f"{__name__}:{engine.__name__}")._replace(**more)


def test_the_steps_of_a_table_are_taken_there_and_back_within_each_round():
    work(job_with(Probe, 1, 2, 4, rounds=8))
    warm_up, rounds = ORDER[:3], [ORDER[i : i + 6] for i in range(3, len(ORDER), 6)]
    assert warm_up == [1, 2, 4]
    assert len(rounds) == 8
    assert all(sorted(each[:3]) == [1, 2, 4] and each == each[::-1] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 2


@pytest.mark.parametrize("fits", [0, 3])
def test_a_configuration_that_runs_out_of_memory_leaves_the_others_their_numbers(fits):
    FITS[0] = fits
    job = job_with(TooLarge, 1, 2, 4)
    found = work(job)
    first, *others = found.steps
    assert first.out_of_memory == f"all stages in one process: {NO_ROOM}"
    assert ORDER.count(1) == fits + 1  # not tried again
    assert (first.turns, first.counts) == ([], {})
    assert not any(each.out_of_memory for each in others)
    _, details = results(job, [found])
    assert [cell["out_of_memory"] for cell in details["cells"].values()] == [first.out_of_memory, "", ""]


@pytest.mark.processes
def test_a_link_between_processes_is_measured():
    one, other = timed_steps.run_processes(timed_steps.measured_link, 2, torch.device("cpu"))
    assert one == other
    assert one.latency_s > 0
    assert 1e7 < one.bandwidth_bytes_per_s < 1e12


def test_layers_are_timed_one_after_another() -> None:
    model, (batch, target) = list(TINY.build()), TINY.example(2)
    found = timed_steps.alone(model, TINY.loss(), batch, target, torch.device("cpu"), repeats=2)
    assert len(found) == len(model)
    assert all(set(each) == {Kind.F, Kind.R, Kind.B} and min(each.values()) > 0 for each in found)
    assert all(p.grad is None for layer in model for p in layer.parameters())


def test_what_is_not_recomputed_is_left_out_of_a_layers_seconds(monkeypatch):
    def alone(model: Any, *_: Any) -> list[dict[Kind, float]]:
        return [{Kind.F: 1.0, Kind.R: 2.0, Kind.B: 4.0}] * len(model)

    monkeypatch.setattr(timed_steps, "alone", alone)
    model, example = list(TINY.build()), TINY.example(8)
    for remat, seconds in (("always", 7.0), ("never", 5.0)):
        found = timed_steps.layer_seconds(model, 4, TINY.loss(), *example, remat=remat)
        assert found == (seconds,) * len(model)


# Steps laid out


def test_link_update_and_setup_lengthen_the_step_and_are_told_apart():
    plain = lay_out(timed()).makespan_s
    assert lay_out(timed(), Link("slow", 0.0, 1e5)).makespan_s > plain
    assert lay_out(timed(update_s=(0.005, 0.005))).makespan_s == pytest.approx(plain + 0.005)
    assert lay_out(timed(setup_s=0.003)).makespan_s == pytest.approx(plain + 0.003)
    data = timed(unit_s=0.01, setup_s=0.003).to_data()
    assert data["setup_ms"] == pytest.approx(3)
    assert all(each["low"] <= each["median"] <= each["high"] for each in data["actions_ms"].values())
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
    provenances = {metric.name: metric.provenance for metric in metrics}
    assert (provenances["step"], provenances["real step"]) == ("replayed", "measured")
    assert json.loads(json.dumps(details))["cells"]["K=2 M=4"]["counts"] == {"F": 8}


def test_a_clock_that_falls_within_each_round_is_seen_by_the_control():
    there, back = timed(), timed(unit_s=0.0125)
    falling = found(Steps(there.partition, [there, back] * 3))
    metrics, _ = results(job_of(Configuration(2, 4, 32)), [falling])
    assert value(metrics, "control") == pytest.approx(0.8, rel=0.01)
    assert void_by(metrics[-1]).startswith("the control is 0.80")


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


def test_a_quotient_of_steps_has_the_error_of_each_of_them():
    """Measured steps take 10 to 21 % longer than laid out; of several independent errors, logarithms add up
    by their squares, as they do for predictions.
    """
    slower = (math.log(1.10), math.log(1.21))
    share = replayed_spread(replayed(2.0, 1.9, 2.1), slower, "a step")
    assert (share.low, share.high) == pytest.approx((1.9 / 1.21, 2.1 * 1.21))
    assert share.parts == ("interval", "error of the replay")
    for of, power in (("a quotient", math.sqrt(2)), ("a quotient of quotients", 2)):
        found = replayed_spread(replayed(2.0), slower, of)
        assert (found.low, found.high) == pytest.approx((2.0 / 1.21**power, 2.0 * 1.21**power))
    both = 1 + of_quotient(0.21)
    more = replayed_spread(replayed(25.0), slower, "an increase")
    assert (more.low, more.high) == pytest.approx((125 / both - 100, 125 * both - 100))

"""The benchmark of the engine: what it counts and computes. No test depends on how fast anything was."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from command_line import call, lines
from torch import nn

from gpipe_bench.experiments.engines.checks import counting
from gpipe_bench.experiments.side_by_side import engine as engine_bench
from gpipe_bench.experiments.side_by_side.control import Target, verdict
from gpipe_bench.experiments.side_by_side.engine import EXPERIMENT
from gpipe_bench.experiments.side_by_side.engine_arms import (
    Arm,
    Subject,
    bare_model,
    bare_stage,
    forwards,
    ours,
    sequential,
    verify,
)
from gpipe_bench.experiments.side_by_side.engine_text import TARGETS, tables
from gpipe_bench.experiments.side_by_side.engine_work import EngineJob, EngineResult
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.record import SCHEMA, Quantity, Record
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.harness.stats import from_samples

ROOT = Path(__file__).parents[1]


# Arms and what is counted


def tiny(num_stages: int = 2, num_microbatches: int = 4) -> Subject:
    torch.manual_seed(0)
    layers = tuple(nn.Linear(4, 4) for _ in range(2 * num_stages))
    spans = tuple(range(2 * k, 2 * k + 2) for k in range(num_stages))
    batch, target = torch.randn(2 * num_microbatches, 4), torch.randn(2 * num_microbatches, 4)
    return Subject(layers, spans, batch, target, nn.functional.mse_loss, num_microbatches)


@pytest.mark.parametrize("remat", ["never", "always", "except_last"])
@pytest.mark.parametrize("count", [1, 4])
def test_the_arms_do_the_same_work_and_say_how_much(remat: str, count: int) -> None:
    subject = tiny(num_microbatches=count)
    report = verify(subject, [ours(subject, remat)[0], bare_model(subject, remat)])
    wanted = {"never": count, "always": 2 * count, "except_last": 2 * count - 1}[remat]
    assert forwards(count, remat) == wanted
    for name in ("ours", "bare layers"):
        assert (report[name]["forwards"], report[name]["backwards"]) == (wanted, count)
        assert report[name]["examples"] == 2
        assert report[name]["gradient error"] < 1e-5
    assert all(parameter.grad is None for layer in subject.layers for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (
            {"forwards": 8},
            r"stage 0 ran 4 backwards and 4 forwards of \[2\] examples; it should be 4 and 8 of 2",
        ),
        ({"backwards": 3}, r"ran 4 backwards and 4 forwards .* it should be 3 and 4 of 2"),
    ],
)
def test_an_arm_that_does_something_else_than_it_says_is_refused(claim: dict[str, int], message: str) -> None:
    subject = tiny()
    arm = sequential(subject, "sequential")
    with pytest.raises(RuntimeError, match=message):
        verify(subject, [arm._replace(**claim)])


def test_micro_batches_of_another_size_are_refused() -> None:
    """A benchmark that forgets to split its mini-batch measures no pipeline."""
    subject = tiny()

    def step() -> None:
        nn.functional.mse_loss(nn.Sequential(*subject.layers)(subject.batch), subject.target).backward()

    with pytest.raises(RuntimeError, match=r"1 forwards of \[8\] examples; it should be 1 and 1 of 2"):
        verify(subject, [Arm("whole", step, (0, 1), 1, 1)])


def test_wrong_gradients_are_refused() -> None:
    subject = tiny()
    arm = sequential(subject, "sequential")

    def twice() -> None:
        assert arm.step is not None
        arm.step()
        for layer in subject.layers:
            layer.weight.grad.mul_(1.01)

    with pytest.raises(RuntimeError, match=r"the gradients of wrong are wrong: 0\.weight differs by"):
        verify(subject, [arm, arm._replace(name="wrong", step=twice)])


def test_the_bare_stages_together_are_the_model() -> None:
    subject = tiny()
    report = verify(subject, [bare_stage(subject, 0)])
    assert report["bare layers"] == {"forwards": 4, "backwards": 4, "examples": 2}
    verify(subject, [bare_stage(subject, 1)])


def test_counting_leaves_no_hooks_behind() -> None:
    subject = tiny()
    with counting({0: subject.layers[0], 1: subject.layers[2]}) as counted:
        sequential(subject, "sequential").step()  # type: ignore[misc]
    assert [count.backwards for count in counted().values()] == [4, 4]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in subject.layers)


def test_torchgpipe_is_counted_alike() -> None:
    pytest.importorskip("torchgpipe", reason="the optional extra `peers` is not installed")
    from gpipe_bench.experiments.side_by_side.engine_arms import torchgpipe

    for remat in ("never", "except_last"):
        subject = tiny()
        report = verify(subject, [ours(subject, remat)[0], torchgpipe(subject, remat)])
        assert report["torchgpipe"]["forwards"] == report["ours"]["forwards"]


# Numbers, targets and tables


def result(times: dict[str, list[float]]) -> EngineResult:
    conditions = {"pinned_cores": "0", "threads": "1"}
    return EngineResult({}, {"0F": 0.01}, conditions, times, Usage(1.0, 3.0, 2.0, 2))


def quantities(job: EngineJob, *of_ranks: EngineResult) -> dict[str, Quantity]:
    return {quantity.name: quantity for quantity in engine_bench.outcome(job, of_ranks).quantities}


def test_the_ideal_of_waiting_stages_comes_from_the_schedule() -> None:
    """K=8, M=32: 39 forwards and 39 backwards of 20 ms; the bare stages take 1 % longer."""
    one = result({"ours": [1.6, 1.6] * 2, "bare layers": [64 * 0.0202] * 4})
    found = quantities(EngineJob("overlap", 8, 32, "never", 2), one, one)
    assert found["ideal step"].value == pytest.approx(1560.0)
    assert found["ideal step"].provenance == "replayed"
    assert found["share of the ideal"].value == pytest.approx(1.56 / 1.6)
    assert found["share of the bare ideal"].value == pytest.approx(1.01 * 1.56 / 1.6)
    assert found["bare action"].value == pytest.approx(20.2)
    assert found["used by others"].value == pytest.approx((3.0 - 2.0) / 4.0)


def test_recomputation_is_part_of_the_ideal() -> None:
    """K=4, M=8, except_last: F and B of all, R of all but one, and a bubble of F and B."""
    times = {"ours": [1.0, 1.0], "bare layers": [1.0, 1.0]}
    found = quantities(EngineJob("overlap", 4, 8, "except_last", 1), result(times))
    assert found["ideal step"].value == pytest.approx(1e3 * 0.02 * (8 + 8 + 7 + 2 * 3))


def test_efficiency_is_the_speed_up_over_its_bound() -> None:
    job = EngineJob("transformer", 2, 16, "never", 1)
    idle = {"ours": [0.5, 0.5], "ScheduleGPipe": [0.6, 0.6], "sequential": [0.0, 0.0]}
    busy = {**idle, "sequential": [0.9, 0.9]}
    beside = {"sequential on every core": [1.0, 1.0]}
    found = quantities(job, result({**busy, **beside}), result({**idle, **beside}))
    assert found["efficiency"].value == pytest.approx((0.9 / 0.5) / (16 * 2 / 17))
    assert found["rate against ScheduleGPipe"].value == pytest.approx(1.2)
    assert found["core beside a busy one"].value == pytest.approx(0.9)
    assert found["step of sequential"].samples == (900.0, 900.0)


def test_small_micro_batches_cost_what_the_layers_do_not() -> None:
    times = {"ours": [0.0128] * 4, "ScheduleGPipe": [0.0384] * 4, "bare layers": [0.0064] * 4}
    found = quantities(EngineJob("small", 2, 64, "never", 2), result(times))
    assert found["per micro-batch"].value == pytest.approx(100.0)
    assert found["per micro-batch of ScheduleGPipe"].value == pytest.approx(500.0)
    assert found["rate against ScheduleGPipe"].value == pytest.approx(3.0)
    assert found["per micro-batch"].higher_is_better is False


def test_cost_per_action_counts_the_recomputations() -> None:
    times = {"ours": [0.002] * 4, "bare layers": [0.001] * 4, "torchgpipe": [0.003] * 4}
    found = quantities(EngineJob("in process", 4, 8, "except_last", 2, against="torchgpipe"), result(times))
    assert found["per action"].value == pytest.approx(1e3 / (4 * (8 + 8 + 7)))
    assert found["rate against torchgpipe"].value == pytest.approx(1.5)


def test_every_target_belongs_to_a_case_of_the_short_profile() -> None:
    cases = EXPERIMENT.cases(RunOptions(profile="short"))
    for target in TARGETS:
        assert sum(target.case.items() <= case.key.items() for case in cases) == 1, target.what
    assert sum(case.estimate_s for case in cases) < 300
    smoke = EXPERIMENT.cases(RunOptions(profile="smoke"))
    assert {case.key["part"] for case in smoke} == {case.key["part"] for case in cases}
    assert sum(case.estimate_s for case in smoke) < 45


@pytest.mark.parametrize(
    ("samples", "at_least", "bound", "said"),
    [
        ([0.97, 0.98, 0.99], True, 0.95, "yes"),
        ([0.94, 0.98, 0.99], True, 0.95, "yes, within the noise"),
        ([0.90, 0.94, 0.99], True, 0.95, "NO, within the noise"),
        ([0.90, 0.91, 0.92], True, 0.95, "NO"),
        ([30.0, 40.0, 50.0], False, 60.0, "yes"),
        ([70.0, 80.0, 90.0], False, 60.0, "NO"),
        ([0.97], True, 0.95, "yes, within the noise"),  # one sample has no interval
    ],
)
def test_a_target_is_judged_by_median_and_interval(
    samples: list[float], at_least: bool, bound: float, said: str
) -> None:
    assert verdict(Target("", {}, "x", at_least, bound), from_samples("x", samples, "ratio")) == said


def record(case: dict[str, str | int], quantity: Quantity | None, **more: object) -> Record:
    return Record(
        schema=SCHEMA, experiment="engine", profile="short", case=dict(case), details={},
        environment={}, command="", started_at="", duration_s=0.0,
        **{"status": "done", "reason": "", "quantities": (quantity,) if quantity else (), **more},
    )  # fmt: skip


def test_a_missed_target_is_shown_as_missed_and_a_skipped_one_with_its_reason() -> None:
    missed = from_samples("share of the ideal", [0.9, 0.91, 0.92], "ratio")
    key = {"part": "in process", "against": "torchgpipe", "remat": "never"}
    text = tables(
        [
            record({"part": "overlap", "num_stages": 8, "remat": "never"}, missed),
            record(key, None, status="skipped", reason="torchgpipe is not installed"),
        ],
        [],
    )
    line = next(line for line in text.splitlines() if "K=8, M=32" in line)
    assert line.split("  ")[-1].strip() == "NO"
    assert "0.910 [0.900, 0.920]" in line
    assert "skipped: torchgpipe is not installed" in text
    assert "done: without this number" in text  # the record has one of the case's two numbers
    assert text.count("not run") == len(TARGETS) - 3
    assert EXPERIMENT.cells([]) == []


# For real, as little as possible


@pytest.mark.usefixtures("undrawn")
def test_smoke_measures_processes_and_checks_what_they_did(tmp_path: Path) -> None:
    """Two of the smoke profile's cases, over processes; the others run the same code."""
    command = ["run", "engine", "--profile", "smoke", "--json", "--results", tmp_path]
    status, out, err = call(*command, "--only", "part=transformer", "--only", "remat=except_last")
    assert status == 0, err
    (found,) = lines(out)
    numbers = {quantity["name"]: quantity for quantity in found["quantities"]}
    rounds = found["details"]["rounds"]
    assert len(numbers["step of ours"]["samples"]) == 2 * rounds
    assert len(numbers["rate against ScheduleGPipe"]["samples"]) == rounds
    ratio = math.sqrt(
        math.prod(numbers["step of ScheduleGPipe"]["samples"][:2])
        / math.prod(numbers["step of ours"]["samples"][:2])
    )
    assert numbers["rate against ScheduleGPipe"]["samples"][0] == pytest.approx(ratio)
    assert {quantity["provenance"] for quantity in numbers.values()} == {"measured"}
    # Four micro-batches of two examples; ours keeps the last one's activations, theirs recomputes all.
    arms = found["details"]["arms"]
    assert (arms["ours"]["forwards"], arms["ours"]["backwards"], arms["ours"]["examples"]) == (7, 4, 2)
    assert (arms["ScheduleGPipe"]["forwards"], arms["ScheduleGPipe"]["backwards"]) == (8, 4)
    assert arms["ScheduleGPipe"]["gradient error"] < 1e-3
    assert set(found["details"]["actions_ms"]) == {"0F", "0R", "0B", "1F", "1R", "1B"}
    assert found["details"]["threads"] == ["1", "1"]


def test_torchgpipe_that_is_missing_is_a_reason_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_bench.importlib.util, "find_spec", lambda name: None)
    case = next(c for c in EXPERIMENT.cases(RunOptions()) if c.key.get("against") == "torchgpipe")
    outcome = EXPERIMENT.run(case, RunOptions())
    assert (outcome.status, outcome.quantities) == ("skipped", ())
    assert "pip install -e .[peers]" in outcome.reason

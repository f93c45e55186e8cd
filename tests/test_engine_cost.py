"""The engine's own cost: what is counted and computed. No test depends on how fast anything was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import call, lines
from records import record
from torch import nn

from gpipe_bench.experiments.engine import EXPERIMENT, TARGETS, job_of, numbers, tables
from gpipe_bench.experiments.engine_turns import BARE, PLAIN
from gpipe_bench.experiments.engines.checks import verify
from gpipe_bench.experiments.engines.setup import Setup, resolve
from gpipe_bench.experiments.side_by_side import Found
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.record import Quantity
from gpipe_bench.harness.rounds import Usage, slowest


class Alone:
    """A group of which this process is the last of two."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("name", "remat", "group", "forwards"),
    [
        (BARE, "never", None, 4),
        (BARE, "except_last", None, 7),
        (BARE, "always", None, 8),
        (BARE, "never", Alone(), 4),
        (PLAIN, "never", Alone(), 4),
    ],
)
def test_what_ours_is_measured_against_does_the_same_work(
    name: str, remat: str, group: Any, forwards: int
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    batch, target = torch.randn(8, 4), torch.randn(8, 4)
    setup = Setup(layers, (range(2), range(2, 4)), 4, remat, torch.device("cpu"), group)
    # Messages are made up for a stage alone, but the last one gets what it would get.
    for _ in range(2):
        found = verify(name, resolve(name)(setup), setup, batch, target, nn.functional.mse_loss)
        assert (found["forwards"], found["backwards"], found["examples"]) == (forwards, 4, 2)
        assert found["gradient error"] < 1e-5


# Numbers, targets and tables


def quantities(key: dict[str, Any], *of_ranks: dict[str, list[float]]) -> dict[str, Quantity]:
    details = {"checks": {}, "refused": {}, "partition": (range(2),), "actions_s": {"0F": 0.01}}
    found = [Found(each, Usage(1.0, 3.0, 2.0, 2), {}, details) for each in of_ranks]
    outcome = numbers(key["part"], job_of(**key), slowest(of_ranks), found)
    assert outcome.details["actions_ms"] == {"0F": 10.0}
    return {quantity.name: quantity for quantity in outcome.quantities}


def key(part: str, num_stages: int, count: int, remat: str = "never", **more: str) -> dict[str, Any]:
    return {"part": part, "num_stages": num_stages, "num_microbatches": count, "remat": remat, **more}


def test_the_ideal_of_waiting_stages_comes_from_the_schedule() -> None:
    """K=8, M=32: 39 forwards and 39 backwards of 20 ms; the bare stages take 1 % longer."""
    found = quantities(key("overlap", 8, 32), {"ours": [1.6, 1.6] * 2, "bare layers": [64 * 0.0202] * 4})
    assert found["ideal step"].value == pytest.approx(1560.0)
    assert found["ideal step"].provenance == "replayed"
    assert found["share of the ideal"].value == pytest.approx(1.56 / 1.6)
    assert found["share of the bare ideal"].value == pytest.approx(1.01 * 1.56 / 1.6)
    assert found["bare action"].value == pytest.approx(20.2)
    # K=4, M=8, except_last: F and B of all, R of all but one, and a bubble of F and B.
    found = quantities(key("overlap", 4, 8, "except_last"), {"ours": [1.0, 1.0], "bare layers": [1.0, 1.0]})
    assert found["ideal step"].value == pytest.approx(1e3 * 0.02 * (8 + 8 + 7 + 2 * 3))


def test_efficiency_is_the_speed_up_over_its_bound() -> None:
    idle = {"ours": [0.5, 0.5], "ScheduleGPipe": [0.6, 0.6], "sequential": [0.0, 0.0]}
    busy = {**idle, "sequential": [0.9, 0.9]}
    beside = {"sequential on every core": [1.0, 1.0]}
    found = quantities(key("transformer", 2, 16), {**busy, **beside}, {**idle, **beside})
    assert found["efficiency"].value == pytest.approx((0.9 / 0.5) / (16 * 2 / 17))
    assert found["rate against ScheduleGPipe"].value == pytest.approx(1.2)
    assert found["core beside a busy one"].value == pytest.approx(0.9)
    assert found["step of sequential"].samples == (900.0, 900.0)


def test_small_actions_cost_what_the_layers_do_not() -> None:
    times = {"ours": [0.0128] * 4, "ScheduleGPipe": [0.0384] * 4, "bare layers": [0.0064] * 4}
    found = quantities(key("small", 2, 64), times)
    assert found["per micro-batch"].value == pytest.approx(100.0)
    assert found["per micro-batch of ScheduleGPipe"].value == pytest.approx(500.0)
    assert found["rate against ScheduleGPipe"].value == pytest.approx(3.0)
    times = {"ours": [0.002] * 4, "bare layers": [0.001] * 4, "torchgpipe": [0.003] * 4}
    found = quantities(key("in process", 4, 8, "except_last", against="torchgpipe"), times)
    assert found["per action"].value == pytest.approx(1e3 / (4 * (8 + 8 + 7)))  # recomputations count
    assert found["rate against torchgpipe"].value == pytest.approx(1.5)


def test_every_target_belongs_to_a_case_of_the_short_profile() -> None:
    cases = EXPERIMENT.cases(RunOptions(profile="short"))
    for target in TARGETS:
        assert sum(target.case.items() <= case.key.items() for case in cases) == 1, target.what
    assert sum(case.estimate_s for case in cases) < 300
    smoke = EXPERIMENT.cases(RunOptions(profile="smoke"))
    assert {case.key["part"] for case in smoke} == {case.key["part"] for case in cases}
    assert sum(case.estimate_s for case in smoke) < 45


def test_on_gpus_there_are_cases_of_their_own_and_too_few_are_a_reason(monkeypatch: Any) -> None:
    """Records of processors stay what they are; targets are theirs alone."""
    options = RunOptions(profile="full", device="cuda")
    cases = EXPERIMENT.cases(options)
    assert {case.key["part"] for case in cases} == {"in process", "transformer", "small"}
    assert all(case.key["device"] == "cuda" for case in cases)
    assert all("device" not in case.key for case in EXPERIMENT.cases(RunOptions(profile="full")))
    assert all(job_of(**case.key).device == "cuda" for case in cases)  # type: ignore[arg-type]
    monkeypatch.setattr("gpipe_bench.pipeline.devices.count", lambda kind: 1)
    case = next(case for case in cases if case.key["part"] == "small")
    outcome = EXPERIMENT.run(case, options)
    assert (outcome.status, outcome.reason) == ("skipped", "needs 2 GPUs; torch sees 1")
    skipped: Any = {"status": outcome.status, "reason": outcome.reason, "quantities": ()}
    text = tables([record(case=case.key, **skipped)])
    assert "needs 2 GPUs; torch sees 1" in text
    assert "target" not in text


# For real, as little as possible


@pytest.mark.usefixtures("undrawn")
def test_smoke_measures_processes_and_checks_what_they_did(tmp_path: Path) -> None:
    """Two of the smoke profile's cases, over processes; the others run the same code."""
    command = ["run", "engine", "--profile", "smoke", "--json", "--results", tmp_path]
    status, out, err = call(*command, "--only", "part=transformer", "--only", "remat=except_last")
    assert status == 0, err
    (found,) = lines(out)
    values = {quantity["name"]: quantity for quantity in found["quantities"]}
    rounds = found["details"]["rounds"]
    assert len(values["step of ours"]["samples"]) == 2 * rounds
    assert len(values["rate against ScheduleGPipe"]["samples"]) == rounds
    ours, theirs = (math.prod(values[f"step of {name}"]["samples"][:2]) for name in ("ours", "ScheduleGPipe"))
    assert values["rate against ScheduleGPipe"]["samples"][0] == pytest.approx(math.sqrt(theirs / ours))
    assert {quantity["provenance"] for quantity in values.values()} == {"measured"}
    # Four micro-batches of two examples; ours keeps the last one's activations, theirs recomputes all.
    for checks in found["details"]["checks"]:
        ours = checks["ours"]
        assert (ours["forwards"], ours["backwards"], ours["examples"]) == (7, 4, 2)
        assert (checks["ScheduleGPipe"]["forwards"], checks["ScheduleGPipe"]["backwards"]) == (8, 4)
        assert checks["ScheduleGPipe"]["gradient error"] < 1e-3
    assert set(found["details"]["actions_ms"]) == {"0F", "0R", "0B", "1F", "1R", "1B"}
    assert found["details"]["threads"] == ["1", "1"]

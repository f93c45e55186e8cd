"""Engines side by side: what is run, computed and said. No test depends on how fast anything was."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from records import record
from torch import nn

from gpipe_bench.experiments.beyond import engine_turns
from gpipe_bench.experiments.beyond.engine_turns import Found, side_by_side
from gpipe_bench.experiments.beyond.engines import COST, EXPERIMENT, SHARE, SPEED, numbers, tables
from gpipe_bench.experiments.beyond.trainings import (
    ALL_CORES,
    ALONE,
    ALWAYS,
    BARE,
    FACTORIES,
    GLOO,
    Configuration,
    configuration_of,
    job_of,
)
from gpipe_bench.experiments.commands.report import build
from gpipe_bench.experiments.engines.checks import verify
from gpipe_bench.experiments.engines.setup import Setup, resolve
from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.record import Metric, Record
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.harness.store import Store

USERS = "mine:Engine@01234567"
TIMES = {
    "ours": [0.2] * 12,
    "torch-gpipe": [0.3] * 12,
    "torch-1f1b": [0.21] * 12,
    ALWAYS: [0.22] * 12,
}


def key(workload: str, k: int, m: int, remat: str = "never", where: str = "processes", **more: Any) -> Any:
    return {
        "workload": workload, "where": where, "num_stages": k, "num_microbatches": m, "remat": remat, **more,
    }  # fmt: skip


CASE = key("transformer", 2, 4, "except_last")


def test_on_gpus_there_are_cases_of_their_own_and_too_few_are_a_reason(monkeypatch: Any) -> None:
    options = RunOptions(profile="full", device="cuda")
    cases = EXPERIMENT.cases(options)
    assert all(case.key["device"] == "cuda" for case in cases)
    assert all("device" not in case.key for case in EXPERIMENT.cases(RunOptions(profile="full")))
    monkeypatch.setattr("gpipe_bench.pipeline.devices.count", lambda kind: 1)
    case = next(case for case in cases if case.key["workload"] == "transformer-8, large")
    outcome = EXPERIMENT.run(case, options)
    assert (outcome.status, outcome.reason) == ("skipped", "needs 2 GPUs; torch sees 1")
    assert "needs 2 GPUs; torch sees 1" in tables([kept(outcome, case=case.key)])


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
        (ALL_CORES, "never", Alone(), 4),
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
        engine = resolve(FACTORIES[name])(setup)
        found = verify(name, engine, setup, batch, target, nn.functional.mse_loss)
        assert (found["forwards"], found["backwards"], found["examples"]) == (forwards, 4, 2)
        assert found["gradient error"] < 1e-5


# Numbers and the table


def case_of(
    case: Any, *of_processes: dict[str, list[float]], extra: str | None = None, **refused_here: str
) -> Outcome:
    """What a case makes of the seconds that its processes found."""
    details = {
        "refused": refused_here, "partition": (range(3), range(3, 8)),
        "actions_s": {"0F": 0.008, "1B": 0.006},
    }  # fmt: skip
    found = []
    for times in of_processes:
        more = {"checks": {name: {} for name in times}, "peak_bytes": dict.fromkeys(times, 3 * 2**20)}
        pinned = {"pinned_cores": "0", "threads": "1"}
        found.append(Found(times, Usage(1.0, 3.0, 2.0, 2), pinned, {**details, **more}))
    job, first = job_of(configuration_of(case), extra), next(iter(of_processes[0]))
    return side_by_side(lambda rounds: found, partial(numbers, job, {}), 6, control=first, again=False)


def values(outcome: Outcome) -> dict[Any, Metric]:
    """By name and what each is of."""
    return {(each.name, *each.key.values()): each for each in outcome.metrics}


def kept(found: Outcome, **changes: Any) -> Record:
    more = {"case": CASE} | changes
    return record(
        experiment="engines", status=found.status, reason=found.reason, metrics=found.metrics,
        details=found.details, **more,
    )  # fmt: skip


def test_speeds_are_ratios_of_the_same_round_over_the_slowest_process() -> None:
    outcome = case_of(CASE, {name: [0.1] * 12 for name in TIMES}, TIMES)
    found = values(outcome)
    assert found["step", "torch-gpipe"].samples == (300.0,) * 12
    assert found[SPEED, "ours", "torch-gpipe"].samples == pytest.approx((1.5,) * 6)
    assert found[SPEED, "ours", "torch-1f1b"].value == pytest.approx(1.05)
    assert found["shortest action",].value == pytest.approx(6.0)
    assert {metric.provenance for metric in found.values()} == {"measured"}
    assert outcome.details["partition"] == [[0, 3], [3, 8]]
    assert outcome.details["engines"][ALWAYS] == {"engine": "ours", "remat": "always"}
    assert [set(checks) for checks in outcome.details["checks"]] == [set(TIMES)] * 2


def test_the_ideal_of_waiting_stages_comes_from_the_schedule() -> None:
    """K=8, M=32: 39 forwards and 39 backwards; with except_last also R of all but one."""
    found = values(case_of(key("waiting", 8, 32), {"ours": [1.6, 1.6] * 2, BARE: [64 * 0.0202] * 4}))
    assert found[SHARE, "ours"].value == pytest.approx(78 * 0.0202 / 1.6)
    found = values(case_of(key("waiting", 4, 8, "except_last"), {"ours": [1.0, 1.0], BARE: [0.16, 0.16]}))
    assert found[SHARE, "ours"].value == pytest.approx(0.01 * (8 + 8 + 7 + 2 * 3))


def test_small_actions_cost_what_the_layers_do_not() -> None:
    times = {"ours": [0.0128] * 4, "torch-gpipe": [0.0384] * 4, BARE: [0.0064] * 4}
    found = values(case_of(key("small", 2, 64), times))
    assert found[COST, "ours"].value == pytest.approx(50.0)
    assert found[COST, "torch-gpipe"].value == pytest.approx(250.0)
    times = {"ours": [0.002] * 4, BARE: [0.001] * 4, "torchgpipe": [0.003] * 4}
    found = values(case_of(key("small", 4, 8, "except_last", "one process"), times))
    assert found[COST, "ours"].value == pytest.approx(1e3 / (4 * (8 + 8 + 7)))  # recomputations count
    assert found["peak memory", "torchgpipe", 0].value is None  # of its threads hardly any is seen
    times[GLOO] = times.pop("ours")
    assert configuration_of(key("small", 2, 64, over="gloo")).engines[0] == GLOO


@pytest.mark.parametrize(
    ("ours", "said"),
    [([0.2, 0.22, 0.22, 0.2] * 3, "within the noise"), ([0.2, 0.1] * 6, "void")],
)
def test_no_engine_is_called_faster_that_the_control_does_not_let(ours: list[float], said: str) -> None:
    times = {**TIMES, "ours": ours, "mine:Engine": [0.205] * 12}
    text = tables([kept(case_of(CASE, times, extra=USERS))])
    (row,) = [line for line in text.splitlines() if line.split()[:2] == ["ours", "mine:Engine"]]
    assert row.endswith(said)


def results_of(folder: Path, *engines: str) -> Path:
    """A results folder with a run for each choice of engines."""
    store = Store(folder)
    for engine in engines:
        times = {
            **TIMES,
            **{name.partition("@")[0]: [0.25] * 12 for name in engine.split(",") if ":" in name},
        }
        found = case_of(CASE, times, extra=engine)
        store.append(kept(found, options={"engine": engine}, revision=EXPERIMENT.revision))
    return folder


def test_the_report_shows_the_runs_of_all_engines(tmp_path: Path) -> None:
    results = results_of(tmp_path, "all", USERS, "yours:Engine@76543210")
    (view,) = [
        each for each in build(results, figures=False).experiments if each.experiment.name == "engines"
    ]
    assert all(f"--engine {name}\n" in view.text for name in ("all", USERS, "yours:Engine@76543210"))


# For real, as little as possible


def test_peaks_are_counted_beside_a_process_that_only_waits() -> None:
    """The sequential model runs in the first process alone; whoever waits there must wait in all."""
    chosen = Configuration("transformer", 2, 1, "never", ("ours", ALONE, ALL_CORES), (1, 1, 1), 1.0)
    first, second = engine_turns.isolated(job_of(chosen, None), 1, 60.0)
    assert list(first.details["peak_bytes"]) == ["ours", ALONE, ALL_CORES]
    assert list(second.details["peak_bytes"]) == ["ours", ALL_CORES]

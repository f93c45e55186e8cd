"""Pipelines over several GPUs: the same on two processes of a CPU, and what is made of their records; and the
seconds of single layers, on which stages are cut.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from made_up_steps import TINY
from records import record

from gpipe_bench.experiments.paper import on_gpus, table2
from gpipe_bench.experiments.paper.timed import layers
from gpipe_bench.experiments.paper.timed.side_by_side import Found
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.pipeline import Kind, Link, gpipe
from gpipe_bench.pipeline.plan.simulate import replay as laid_out

SMOKE = replace(TINY, batch_size=8)


def kept(outcome: Outcome, case: dict[str, Any]) -> Record:
    details = json.loads(json.dumps(outcome.details))
    return record(
        experiment="table2", profile="full", case=case, status=outcome.status, reason=outcome.reason,
        metrics=outcome.metrics, details=details,
    )  # fmt: skip


@pytest.mark.processes
def test_engines_take_turns_on_stages_whose_other_layers_have_no_memory() -> None:
    """Two processes: ours, torch's, the link and the replay of our own actions over it."""
    key = {"part": on_gpus.PART, "model": "transformer", "K": 2, "M": 4}
    made = kept(on_gpus.pipeline(SMOKE, key, "ours", "smoke", "cpu"), key)
    assert (made.status, made.details["refused"]) == ("done", {})
    assert made.details["engines"] == {"ours": "ours", "ScheduleGPipe": "torch-gpipe"}
    for checks in made.details["checks"]:
        for engine in ("ours", "ScheduleGPipe"):
            ran = checks[engine]
            assert (ran["forwards"], ran["backwards"], ran["examples"]) == (8, 4, 2)
    assert made.details["num_parameters"] == sum(p.numel() for p in SMOKE.build().parameters())
    values = {metric.label: metric.value for metric in made.metrics}
    assert values["bandwidth"] > 0
    assert values["latency"] > 0
    assert values["real step"] == pytest.approx(values["step of ours"] + values["update"])
    rate, step = made.metric("throughput"), made.metric("real step")
    assert rate is not None
    assert step is not None
    assert rate.samples == pytest.approx([8e3 / each for each in step.samples])
    assert 0 < values["idle"] < 1
    assert values["replayed step"] > 0
    assert "measured between neighbouring ranks over gloo" in made.details["link"]["source"]
    assert len(made.details["partition"]) == 2


def process(job: on_gpus.Job, update_s: float, **more: Any) -> Found:
    """What one process found: even stages, whose actions take 10 ms, of which backwards take two."""
    timeline = laid_out(
        gpipe(job.num_stages, job.num_microbatches, "always"), {Kind.F: 0.01, Kind.R: 0.01, Kind.B: 0.02}
    )
    details = {
        "link": Link("a link", 1e-5, 1e11, source="measured somewhere"), "partition": (range(4), range(4, 8)),
        "refused": {}, "checks": {}, "peaks": {"ours": (3 * 2**30, 2**32)}, "timeline": timeline,
        "layers_s": [0.01] * 8, "num_parameters": 10, "sent": [1000], "returned": [1000],
        "update_s": update_s, "device": "An accelerator", **more,
    }  # fmt: skip
    times = {"ours": [0.2, 0.2], "ScheduleGPipe": [0.3, 0.3]}
    return Found(times, Usage(1.0, 3.0, 2.0, 2), {"pinned_cores": "", "threads": "1"}, details)


def made_up(k: int, m: int, step_s: float, **more: Any) -> Record:
    job = on_gpus.Job(SMOKE, k, m, ("ours", "torch-gpipe"), "cuda")
    found = [process(job, 0.01, **more), process(job, 0.03, **more)]
    outcome = on_gpus.numbers(job, {"ours": [step_s] * 2, "ScheduleGPipe": [1.5 * step_s] * 2}, found)
    return kept(outcome, {"part": on_gpus.PART, "model": "transformer", "K": k, "M": m})


def test_a_row_for_each_k_and_m_beside_the_paper_and_torchs() -> None:
    one, four = made_up(2, 1, 0.17), made_up(2, 4, 0.07)
    assert one.metric("real step").value == pytest.approx(200)  # type: ignore[union-attr]  # the slower update
    assert on_gpus.relative([one, four], four).value == pytest.approx(2.0)  # type: ignore[union-attr]
    assert on_gpus.relative([four], four) is None
    lost = record(
        experiment="table2", case={"part": on_gpus.PART, "model": "transformer", "K": 4, "M": 1},
        status="skipped", reason="needs 4 GPUs; torch sees 2", metrics=(), details={},
    )  # fmt: skip
    text = on_gpus.text([one, four, lost], table2.TABLES)
    row = next(line for line in text.splitlines() if line.startswith("K=2 M=4"))
    assert row.split()[2:8] == ["1.7", "2.00", "70.0", "105.0", "1.500", "16"]
    assert "K=4 M=1" in text
    assert "links of 100.0 GB/s or more" in text
    cells = {(c.row, c.column): c for c in compare(table2.cells([one, four])) if c.question == "here"}
    cell = cells["M=4", "K=2"]
    assert (cell.verdict, cell.provenance, cell.ours) == ("not judged", "measured", pytest.approx(2.0))
    assert "measured on as many GPUs as stages, at one mini-batch of 8" in cell.reason
    assert "ScheduleGPipe did not run: too large" in on_gpus.text(
        [made_up(2, 1, 0.1, refused={"ScheduleGPipe": "too large"})], table2.TABLES
    )


def test_every_number_of_stages_up_to_the_gpus_is_a_case_of_its_own() -> None:
    def parts(**options: Any) -> list[tuple[Any, ...]]:
        found = table2.EXPERIMENT.cases(RunOptions(profile="full", **options))
        return [(c.key["model"], c.key["K"], c.key["M"]) for c in found if c.key.get("part") == on_gpus.PART]

    assert parts(device="cpu") == parts(device="cuda", gpus=1) == []
    four = parts(device="cuda", gpus=4)
    assert [(k, m) for model, k, m in four if model == "transformer"] == [
        (2, 1), (2, 4), (2, 32), (4, 1), (4, 4), (4, 32),
    ]  # fmt: skip
    assert {k for _, k, _ in parts(device="cuda", gpus=8)} == {2, 4, 8}


# Single layers


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_are_timed_one_after_another_wherever_their_memory_is(device: str) -> None:
    model = list(SMOKE.build(device))
    batch, target = SMOKE.example(2)
    found = layers.alone(model, SMOKE.loss(), batch, target, torch.device("cpu"), repeats=2)
    assert len(found) == len(model)
    assert all(set(each) == {Kind.F, Kind.R, Kind.B} and min(each.values()) > 0 for each in found)
    assert {p.device.type for layer in model for p in layer.parameters()} == {device}
    assert all(p.grad is None for layer in model for p in layer.parameters())

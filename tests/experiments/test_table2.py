"""Table 2, Figure 3 and the breakdown from records: what is judged, what is said and what is drawn."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from made_up_steps import TINY, found, job_of, steps
from records import record

from gpipe_bench.experiments.paper import figure3, table2, table4
from gpipe_bench.experiments.paper.timed import steps as timed_steps
from gpipe_bench.experiments.paper.timed.fitted import fitted_microbatch, peak_bytes
from gpipe_bench.experiments.paper.timed.results import results
from gpipe_bench.experiments.paper.timed.workloads import Configuration
from gpipe_bench.experiments.report.figures import draw
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.record import Metric
from gpipe_bench.pipeline import Timeline


def test_a_fitted_mini_batch_is_the_largest_under_the_cap():
    size, peak = fitted_microbatch(TINY, 2, 4, 200_000)
    assert peak <= 200_000 < peak_bytes(TINY, 2, 4, 2 * size)
    with pytest.raises(ValueError, match="micro-batches of one example needs 77,956"):
        fitted_microbatch(TINY, 2, 4, 1_000)


def table2_record(model="transformer", batch="fitted", profile="short", *errors):
    """Of even stages, and by how much the replays erred of steps that also ran for real."""
    job = job_of(*(Configuration(k, m, 32) for k in (2, 4, 8) for m in (1, 4, 32)))
    each = [
        steps(num_stages=k, num_microbatches=m, unit_s=1.0 / (k * m))  # the same work in every cell
        for k, m, *_ in job.configurations
    ]
    metrics, details = results(job, [found(*each)])
    metrics += [
        Metric(name="replay error", key={"M": 100 + n}, value=error, unit="ratio", provenance="measured")
        for n, error in enumerate(errors)
    ]
    details["layers_ms"] = {str(size): [1.0] * 8 for size in (1, 8, 32)}
    return record(
        experiment="table2", case={"model": model, "batch": batch}, profile=profile,
        metrics=tuple(metrics), details=json.loads(json.dumps(details)),
    )  # fmt: skip


def test_records_without_a_finished_case_make_an_empty_table():
    failed = replace(table2_record(), status="failed", reason="broken")
    for experiment in (table2, table4, figure3):
        assert experiment.cells([failed]) == []
        assert experiment.tables([failed]) == ""
        assert experiment.figures([failed]) == []


def run_with(experiment, each, monkeypatch):
    """The record of ResNet-101 whose processes found these steps."""
    monkeypatch.setattr(timed_steps, "measure", lambda job: [found(*each)])
    outcome = experiment.run(Case({"model": "resnet101"}), RunOptions(profile="short", device="cpu"))
    return record(
        experiment=experiment.EXPERIMENT.name, case={"model": "resnet101"}, metrics=outcome.metrics,
        details=json.loads(json.dumps(outcome.details)),
    )  # fmt: skip


def test_the_breakdown_adds_up_in_every_record(monkeypatch, tmp_path):
    each = [steps(num_stages=k, num_microbatches=4, slow=1.2) for k in table4.STAGES]
    made = run_with(table4, each, monkeypatch)
    cells = {name: facts for name, facts in made.details["cells"].items() if "shares" in facts}
    assert list(cells) == ["K=2 M=16", "K=4 M=16", "K=8 M=16"]
    for facts in cells.values():
        assert facts["exact sum"] == "1"
        assert sum(facts["shares"].values()) == pytest.approx(1)
        shown = [made.metric(table4.SHARE, part=part, **facts["key"]) for part in facts["shares"]]
        assert sum(metric.value for metric in shown) == pytest.approx(100)
        assert len(list(Timeline.from_data(facts["timeline"]).events)) == 3 * 16 * facts["num_stages"]
    comparisons = compare(table4.cells([made]))
    judged = {(c.table, c.row, c.column) for c in comparisons if c.ours is not None}
    assert ("breakdown-v1", "load imbalance", "K=4") in judged
    assert ("breakdown-v5", "bubble", "share of the step") in judged
    assert table4.tables([made]).count("100.0") >= 3
    assert len(draw(table4.EXPERIMENT, [made], tmp_path)) == 4


def test_a_sentence_is_about_steps_as_timed():
    made = table2_record("transformer", "fixed", "short", 0.0, 0.1, -0.1)
    sentences = {c.row: c for c in table2.cells([made]) if c.table == "claims-text"}
    gain, bubble = sentences["more micro-batches, more throughput"], sentences["bubble at M >= 4K"]
    assert (gain.note.count("K=2"), gain.spread.combinations) == (2, 0)
    assert "K=8 M=32" in bubble.note
    assert "K=8 M=32" in table2.tables([made])


def test_columns_that_ran_for_real_stand_beside_the_papers():
    """On two devices the steps tell the replay's error alone."""

    def of(*counts):
        plan = [Configuration(k, m, 32, runs_for_real=True) for k in counts for m in (1, 4)]
        each = [
            steps(
                num_stages=c.num_stages, num_microbatches=c.num_microbatches, real_s=(1 / c.num_stages,) * 2
            )
            for c in plan
        ]
        metrics, details = results(job_of(*plan), [found(*each)])
        case = {"part": "replay error", "model": "transformer"}
        return record(experiment="table2", case=case, metrics=tuple(metrics), details=details)

    column = [each for each in table2.cells([of(2, 4)]) if each.column == "K=4"]
    assert [each.metric.value for each in column] == [2.0, 2.0]
    assert "as many devices as stages" in table2.tables([of(2, 4)])
    assert table2.cells([of(2)]) == []


def test_naive_and_pipeline_are_told_apart(monkeypatch, tmp_path):
    plan = figure3.configurations("resnet101", 32, figure3.STAGES, 2)
    assert [c.label for c in plan] == ["naive-1", "pipeline-1", "pipeline-2", "pipeline-4", "pipeline-8"]
    assert [c.remat for c in plan] == ["never"] + ["always"] * 4
    assert [c.runs_for_real for c in plan] == [False, False, True, False, False]
    naive, *_ = figure3.configurations("amoebanet", 32, figure3.STAGES, 2)
    assert (naive.label, naive.num_stages, naive.runs_for_real) == ("naive-2", 2, True)
    each = [steps(num_stages=c.num_stages, num_microbatches=c.num_microbatches) for c in plan]
    made = run_with(figure3, each, monkeypatch)
    comparisons = {(c.row, c.column): c for c in compare(figure3.cells([made]))}
    assert comparisons["normalized throughput", "naive-1"].ours == 1
    assert comparisons["normalized throughput", "pipeline-8"].verdict == "not judged"
    assert "pipeline-8" in figure3.tables([made])
    (path,) = draw(figure3.EXPERIMENT, [made], tmp_path)
    assert path.stat().st_size > 10_000


def test_what_recomputation_costs_on_one_device_is_a_case_of_its_own(monkeypatch):
    """Whole steps, so nothing is laid out; one that finds no room says so."""
    key = {"part": figure3.RECOMPUTATION, "model": "resnet101"}
    options = RunOptions(profile="short", device="cuda")
    assert key in [case.key for case in figure3.cases(options)]
    assert key not in [case.key for case in figure3.cases(replace(options, device="cpu"))]

    def ran(*each):
        monkeypatch.setattr(timed_steps, "measure", lambda job: [found(*each)])
        outcome = figure3.run(Case(key), options)
        details = json.loads(json.dumps(outcome.details))
        return record(experiment="figure3", case=key, metrics=outcome.metrics, details=details)

    naive, pipeline = steps(num_stages=1, num_microbatches=1), steps(num_stages=1)
    made = ran(naive, pipeline)  # half a second each, of 32 examples and of four times 32
    assert made.metric("with over without").value == pytest.approx(4.0)
    assert figure3.cells([made]) == []
    line = next(each for each in figure3.tables([made]).splitlines() if each.startswith("ResNet-101"))
    assert line.split() == ["ResNet-101", "0.8", "4.00"]
    lost = ran(replace(naive, turns=[], in_process_s=[], out_of_memory="no room"), pipeline)
    assert "not run: no room" in figure3.tables([lost])

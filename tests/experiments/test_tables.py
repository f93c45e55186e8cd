"""Tables 1 to 3, Figure 3 and the breakdown from records: what is judged, what is said and what is drawn."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from made_up_steps import TINY, cuts, found, job_of, steps, value
from records import all_ran, record

from gpipe_bench.experiments.paper import figure3, table4
from gpipe_bench.experiments.paper.links import (
    PCIE,
    Estimate,
    estimate_of,
    modelled,
    replayed,
    shares_of_peak,
)
from gpipe_bench.experiments.paper.predicted import sizes
from gpipe_bench.experiments.paper.table1.cells import ANY_COUNT, cells
from gpipe_bench.experiments.paper.table1.experiment import EXPERIMENT as TABLE1
from gpipe_bench.experiments.paper.table3 import EXPERIMENT
from gpipe_bench.experiments.paper.timed import steps as timed_steps
from gpipe_bench.experiments.paper.timed.fitted import fitted_microbatch, peak_bytes
from gpipe_bench.experiments.paper.timed.replay import slowdowns
from gpipe_bench.experiments.paper.timed.results import Steps
from gpipe_bench.experiments.paper.timed.workloads import TABLE3, Configuration
from gpipe_bench.experiments.report.figures import draw
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.record import Record
from gpipe_bench.pipeline import Timeline


@pytest.fixture(scope="module")
def transformer() -> list[Record]:
    """The Transformer half at full size: it costs seconds."""
    return all_ran(TABLE1, half="transformer", attention="explicit", precision="float32")


def test_parameters_are_exact_and_memory_is_twelve_bytes_each(transformer: list[Record]) -> None:
    counts = [282_178_816, 785_761_536, 5_318_006_016, 21_029_786_880, 83_876_910_336]
    papers = [r for r in transformer if r.case["part"] == "paper"]
    assert [r.metric("parameters").value for r in papers] == counts  # type: ignore[union-attr]
    assert [r.metric("parameter memory").value for r in papers] == [12 * n for n in counts]  # type: ignore[union-attr]


def test_the_largest_models_with_any_number_of_micro_batches_are_context(transformer: list[Record]) -> None:
    found = compare(cells(transformer))
    largest = {c.column: c for c in found if (c.table, c.row) == ("table1-transformer", ANY_COUNT)}
    assert {c.verdict for c in largest.values()} == {"not comparable"}
    assert largest["naive-1"].ours is None
    counts = [c.ours for name, c in largest.items() if name != "naive-1"]
    assert all(
        ours is not None and ours > paper
        for ours, paper in zip(counts, (7.8e8, 5.3e9, 2.1e10, 8.3e10), strict=True)
    )
    for each in transformer:
        if each.case["part"] == "largest" and "placement" in each.details:
            placement = each.details["placement"]
            parts = [{k: v for k, v in stage.items() if k != "when"} for stage in placement["stages"]]
            assert max(sum(stage.values()) for stage in parts) <= 16 * 2**30
            assert len(placement["layers_per_stage"]) == len(parts)
            assert sum(placement["layers_per_stage"]) == placement["num_layers"] + 2


def test_a_fitted_mini_batch_is_the_largest_under_the_cap():
    size, peak = fitted_microbatch(TINY, 2, 4, 200_000)
    assert peak <= 200_000 < peak_bytes(TINY, 2, 4, 2 * size)
    with pytest.raises(ValueError, match="micro-batches of one example needs 77,956"):
        fitted_microbatch(TINY, 2, 4, 1_000)


def run_with(experiment, each, monkeypatch):
    """The record of ResNet-101 whose processes found these steps."""
    monkeypatch.setattr(timed_steps, "measure", lambda job: [found(*each)])
    monkeypatch.setattr(sizes, "cuts_of_the_paper", lambda *_: cuts(uneven=(range(6), range(6, 8))))
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


PAPER = Estimate(lambda share: [(0.5e-3 / share, 1e-3 / share)] * 8, (4_000_000,) * 8, (4_000_000,) * 8, 1000)
"""Eight equal layers of a millisecond at half the peak, and messages of 4 MB."""


def test_the_papers_amoebanet_waits_for_pcie_and_its_transformer_does_not():
    """Also in the paper: 2.7 of 3.4 and 3.3 of 3.4."""
    shares = {}
    for name, workloads in TABLE3.items():
        actions = estimate_of(workloads["full"]).actions(8, 32, shares_of_peak()[0])
        shares[name] = slowdowns(actions, [PCIE.bandwidth_bytes_per_s], PCIE.latency_s)[0]
    assert shares["transformer"] > 0.99
    assert 0.8 < shares["amoebanet"] < 0.97


def steps_record(profile="short", without=()):
    """One machine that is ten times as slow as the estimate's, with messages of a fifth."""
    job = job_of(*(Configuration(k, 8, 8) for k in (2, 4, 8)))
    each = []
    for k in (2, 4, 8):
        actions = PAPER.actions(k, 8, shares_of_peak()[0])
        sizes = tuple(size // 5 for size in actions.activation_bytes)
        slow = {key: (10 * s,) for key, (s,) in actions.samples_s.items()}
        turn = replace(actions, samples_s=slow, activation_bytes=sizes, gradient_bytes=sizes)
        each.append(Steps(out_of_memory="no room") if k in without else Steps(turns=[turn] * 3))
    metrics, details = replayed(job.configurations, [found(*each)] * 2, PAPER)
    return record(
        experiment="table3", profile=profile, case={"part": "steps", "model": "amoebanet"},
        metrics=tuple(metrics), details={**job.facts(), "timed_microbatches": 8, **details},
    )  # fmt: skip


def paper_record(model="amoebanet"):
    metrics, details = modelled(PAPER, 128)
    return record(
        experiment="table3", profile="short", case={"part": "paper size", "model": model},
        metrics=tuple(metrics), details={"title": "A model", **details},
    )  # fmt: skip


@pytest.mark.parametrize("without", [(4,), (2,), (2, 4)])
def test_stages_that_found_no_room_leave_the_others_their_numbers(without):
    """Relative to K = 2 only where K = 2 ran."""
    whole, part = steps_record(), steps_record(without=without)
    assert set(part.details["out_of_memory"]) == {f"K={k}" for k in without}
    for name in ("throughput", "normalised throughput"):
        kept = {q.label for q in part.metrics if q.name == name}
        wanted = {q.label for q in whole.metrics if q.name == name and q.key["K"] not in without}
        assert kept == (set() if name.startswith("normalised") and 2 in without else wanted)
    cells = EXPERIMENT.cells([part])
    assert {cell.column for cell in cells} <= {cell.column for cell in EXPERIMENT.cells([whole])}
    assert "K=8" in EXPERIMENT.tables([part])
    with pytest.raises(MemoryError, match="no room"):
        steps_record(without=(2, 4, 8))


def test_the_slowed_link_gives_the_scaled_model_the_papers_numbers():
    """The stand-in differs from the paper's model by two factors alone, so the two must agree."""
    scaled, paper = steps_record(), paper_record()
    slowed = scaled.details["slowed_link"]["bandwidth_bytes_per_s"]
    assert slowed == pytest.approx(PCIE.bandwidth_bytes_per_s / 5 / 10)
    for k in (2, 4, 8):
        ours = value(scaled.metrics, "normalised throughput", link="PCIe, same share", K=k)
        theirs = value(paper.metrics, "normalised throughput", link="PCIe", K=k)
        fast = value(scaled.metrics, "normalised throughput", link="PCIe", K=k)
        assert ours == pytest.approx(theirs)
        assert fast >= ours * (1 - 1e-9) or k == 2
        assert value(scaled.metrics, "share of the balanced step", K=k) <= 1
        least, papers = (value(each.metrics, "hidden from", K=k) for each in (scaled, paper))
        assert least == pytest.approx(papers / 50, rel=0.03)
    assert {q.provenance for q in scaled.metrics} == {"replayed"}
    assert {q.provenance for q in paper.metrics} == {"modelled"}
    low = shares_of_peak()[1]
    assert value(paper.metrics, "normalised throughput", link="PCIe", share_of_peak=low, K=8)

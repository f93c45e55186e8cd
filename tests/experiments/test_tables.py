"""Tables and figures from records: what is judged, said and drawn, whatever part of the records is there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from made_up_steps import TINY, found, job_of, steps, timed, value
from records import all_ran, record

from gpipe_bench.experiments.drawing import draw
from gpipe_bench.experiments.paper import figure3, table2, table4
from gpipe_bench.experiments.paper import steps as timed_steps
from gpipe_bench.experiments.paper.full_size import FullSize, Seconds
from gpipe_bench.experiments.paper.results import PCIE, Steps, replayed, results
from gpipe_bench.experiments.paper.table1 import EXPERIMENT as TABLE1
from gpipe_bench.experiments.paper.table1_shown import ANY_COUNT, cells
from gpipe_bench.experiments.paper.table3 import EXPERIMENT
from gpipe_bench.experiments.paper.workloads import Configuration, fitted_microbatch, peak_bytes
from gpipe_bench.experiments.registry import EXPERIMENTS, load
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.table import shown_of
from gpipe_bench.harness.store import Store


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
    comparisons = compare(table4.cells([made]))
    judged = {(c.table, c.row, c.column) for c in comparisons if c.ours is not None}
    assert ("breakdown-v1", "load imbalance", "K=4") in judged
    assert ("breakdown-v5", "bubble", "share of the step") in judged
    assert table4.tables([made]).count("100.0") >= 3
    assert len(draw(table4.EXPERIMENT, [made], tmp_path)) == 1


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


class Paper(FullSize):
    """Eight equal layers of a millisecond at half the peak, and messages of 4 MB."""

    def seconds(self, accelerator, activation_format, examples, share_of_peak):
        return (Seconds(0.5e-3 / share_of_peak, 1e-3 / share_of_peak),) * 8

    def sent_bytes(self, layer, examples, activation_format):
        return 4_000_000


def steps_record(without=()):
    """One machine that is ten times as slow as the paper's at 0.374 of its peak, with messages of a fifth."""
    job = job_of(*(Configuration(k, 8, 8) for k in (2, 4, 8)))
    each = []
    for k in (2, 4, 8):
        bytes_sent = (800_000,) * (k - 1)
        unit_s = 10 * 0.5e-3 / 0.374 * 8 / k
        turn = timed(k, 8, unit_s=unit_s, activation_bytes=bytes_sent, gradient_bytes=bytes_sent)
        each.append(Steps(out_of_memory="no room") if k in without else Steps(turns=[turn] * 3))
    metrics, details = replayed(job.configurations, [found(*each)] * 2, Paper("a model", {}), 128)
    return record(
        experiment="table3", profile="short", case={"part": "steps", "model": "amoebanet"},
        metrics=tuple(metrics), details={**job.facts(), "timed_microbatches": 8, **details},
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


def test_the_link_is_slowed_as_much_as_the_actions_are_per_byte():
    scaled = steps_record()
    slowed = scaled.details["slowed_link"]["bandwidth_bytes_per_s"]
    assert slowed == pytest.approx(PCIE.bandwidth_bytes_per_s / 5 / 10, rel=1e-3)
    for k in (2, 4, 8):
        ours = value(scaled.metrics, "normalised throughput", link="PCIe, same share", K=k)
        fast = value(scaled.metrics, "normalised throughput", link="PCIe", K=k)
        assert fast >= ours * (1 - 1e-9) or k == 2
    assert {q.provenance for q in scaled.metrics} == {"replayed"}


# Parts of an experiment's records

MACHINE = REFERENCE / "cpu-2-cores"


def without_timeline(record: Record) -> Record:
    """The record as an engine leaves it that keeps no timeline."""
    details: dict[str, Any] = dict(record.details)
    known = ("key", "num_stages", "num_microbatches", "batch_size", "out_of_memory")
    if "cells" in details:
        details["cells"] = {
            name: {key: facts[key] for key in known if key in facts}
            | {"counts": {}, "why": "it keeps no timeline"}
            for name, facts in details["cells"].items()
        }
    return replace(record, details=details, metrics=())


def parts(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Records of which some are missing, in a few words and themselves."""
    kinds = {(str(r.case.get("part")), str(r.case.get("model"))): r for r in records}
    for kind in kinds:
        of_kind = [r for r in records if (str(r.case.get("part")), str(r.case.get("model"))) == kind]
        yield f"only {kind}", of_kind
        yield f"one of {kind}", of_kind[-1:]
        yield f"all but {kind}", [each for each in records if each not in of_kind]
    lost = [replace(each, status="failed", reason="lost", metrics=(), details={}) for each in records]
    yield "none that ended", lost
    yield "another engine's", [without_timeline(r) if "cells" in r.details else r for r in records]
    yield "another engine's alone", [without_timeline(r) for r in records if "cells" in r.details]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_any_part_of_an_experiment_has_a_text(name: str) -> None:
    for what, records in parts(Store(MACHINE).load(name).records):
        try:
            shown = shown_of(load(name), records)
        except Exception as error:
            raise AssertionError(f"{name} with {what}") from error
        assert shown.records == tuple(records)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_any_part_of_an_experiment_can_be_drawn(name: str) -> None:
    figures = load(name).figures
    for what, records in parts(Store(MACHINE).load(name).records):
        if figures is not None and what.startswith(("one", "none", "another")):
            try:
                drawn = [(plot.style(), plot) for plot in figures(records)]
                for style, plot in drawn:
                    with style:
                        assert plot.draw()
            except Exception as error:
                raise AssertionError(f"{name} with {what}") from error

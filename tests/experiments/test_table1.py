"""Table 1 from the command line, and its cells from records alone."""

from __future__ import annotations

import pytest

from gpipe_bench.experiments.paper.table1.cells import ANY_COUNT, cells
from gpipe_bench.experiments.paper.table1.experiment import EXPERIMENT
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.record import SCHEMA, Record
from gpipe_bench.harness.verdict import Comparison


def record_of(case: Case) -> Record:
    """What the real case leaves."""
    options = RunOptions(device="cpu")
    outcome = EXPERIMENT.run(case, options)
    return Record(
        schema=SCHEMA, experiment="table1", profile="short", case=case.key, status=outcome.status,
        reason=outcome.reason, metrics=outcome.metrics, details=outcome.details, environment={},
        command="", started_at="", duration_s=0.0,
    )  # fmt: skip


def row(comparisons: list[Comparison], table: str, name: str) -> dict[str, Comparison]:
    return {c.column: c for c in comparisons if (c.table, c.row) == (table, name)}


@pytest.fixture(scope="module")
def transformer() -> list[Record]:
    """The Transformer half at full size: it costs seconds."""
    wanted = {"half": "transformer", "attention": "explicit", "precision": "float32"}
    found = EXPERIMENT.cases(RunOptions())
    return [record_of(case) for case in found if wanted.items() <= case.key.items()]


def test_parameters_are_exact_and_memory_is_twelve_bytes_each(transformer: list[Record]) -> None:
    counts = [282_178_816, 785_761_536, 5_318_006_016, 21_029_786_880, 83_876_910_336]
    papers = [r for r in transformer if r.case["part"] == "paper"]
    assert [r.metric("parameters").value for r in papers] == counts  # type: ignore[union-attr]
    assert [r.metric("parameter memory").value for r in papers] == [12 * n for n in counts]  # type: ignore[union-attr]


def test_the_largest_models_with_any_number_of_micro_batches_are_context(transformer: list[Record]) -> None:
    largest = row(compare(cells(transformer)), "table1-transformer", ANY_COUNT)
    assert {c.verdict for c in largest.values()} == {"not comparable"}
    assert largest["naive-1"].ours is None
    counts = [c.ours for name, c in largest.items() if name != "naive-1"]
    assert all(
        ours is not None and ours > paper
        for ours, paper in zip(counts, (7.8e8, 5.3e9, 2.1e10, 8.3e10), strict=True)
    )
    for record in transformer:
        if record.case["part"] == "largest" and "placement" in record.details:
            placement = record.details["placement"]
            parts = [{k: v for k, v in stage.items() if k != "when"} for stage in placement["stages"]]
            assert max(sum(stage.values()) for stage in parts) <= 16 * 2**30
            assert len(placement["layers_per_stage"]) == len(parts)
            assert sum(placement["layers_per_stage"]) == placement["num_layers"] + 2


def test_full_on_a_cpu_skips_the_device_with_its_reason() -> None:
    case = next(c for c in EXPERIMENT.cases(RunOptions(profile="full")) if c.key["part"] == "device")
    outcome = EXPERIMENT.run(case, RunOptions(profile="full", device="cpu"))
    assert outcome.status == "skipped"
    assert "CUDA" in outcome.reason

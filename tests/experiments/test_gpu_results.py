"""Tests the summary that a step of `.ci/gpu` prints at its end, on made-up records."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import record

from gpipe_bench.experiments import gpu_results
from gpipe_bench.experiments.gpu_results import of_step, sentences
from gpipe_bench.harness.record import Metric, Record
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.verdict import Result

GIB = 2**30


def measured(name: str, value: float | None, unit: str = "ratio") -> Metric:
    return Metric(name, value, unit, "measured")


def done(*metrics: Metric, details: Any = None, **case: Any) -> Record:
    return record(case=case, metrics=metrics, details=details or {})


def lost(reason: str, status: str = "skipped", **case: Any) -> Record:
    return record(case=case, status=status, reason=reason, metrics=(), details={})


def peaks(column: str, found: float | None, modelled: float) -> Record:
    size = None if found is None else found * GIB
    return done(
        measured("measured peak", size, "bytes"),
        Metric("modelled peak", modelled * GIB, "bytes", "modelled"),
        details={"fits": found is not None}, part="device", half="amoebanet", column=column,
        precision="float32",
    )  # fmt: skip


OUT = {"cells": {"naive-1": {"out_of_memory": "CUDA out of memory"}, "pipeline-1": {"out_of_memory": ""}}}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (
            [peaks("naive-1", None, 33.06), peaks("pipeline-1", 5.42, 5.34)],
            ["amoebanet in float32 under 8 GiB: naive-1 does not fit (33.06 GiB modelled), pipeline-1 fits "
             "(5.42 GiB measured); the paper: all of these fit"],
        ),
        ([lost("KeyError: 3", "failed", model="amoebanet")], ["model=amoebanet: failed: KeyError: 3"]),
    ],
)  # fmt: skip
def test_a_step_says_what_it_found_beside_the_paper_and_why_what_is_missing_did_not_run(
    records: list[Record], said: list[str]
) -> None:
    assert list(sentences(records)) == said


def test_numbers_beside_the_papers_are_counted_and_what_found_no_room_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = done(details=OUT, model="transformer", batch="fixed")
    results = [
        Result(
            table="table2-transformer", row=row, column="K=2", metric=measured("throughput", value),
            record=ran,
        )
        for row, value in (("M=1", 1.1), ("M=4", 1.7 * 1.3))
    ]  # fmt: skip
    monkeypatch.setattr(gpu_results, "load", lambda name: SimpleNamespace(cells=lambda records: results))
    also = done(part="replay error", model="transformer")
    assert list(sentences([ran, also])) == [
        "model=transformer batch=fixed: naive-1 did not run: CUDA out of memory", "2 cases are done",
        "2 numbers stand beside the paper's, half of them within 20 % of it",
    ]  # fmt: skip


def test_the_lines_are_about_the_steps_own_cases_as_they_are_now(tmp_path: Path) -> None:
    """Cases of another step of the experiment and older records of a case are left out."""
    store = Store(tmp_path)
    case = {"part": "device", "half": "amoebanet", "precision": "float32"}
    for column, reason in (("naive-1", "before"), ("naive-1", "now"), ("pipeline-2", "another step's")):
        store.append(
            record(experiment="table1", case={**case, "column": column}, status="skipped", reason=reason,
                   metrics=(), details={})
        )  # fmt: skip
    (line,) = of_step(["table1", "--only", "part=device", "--only", "column=naive-1"], tmp_path)
    assert line.endswith("skipped: now")
    assert of_step(["table2"], tmp_path) == ["no case has ended"]

"""What a step of `.ci/gpu` says at its end, of records that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from records import record

from gpipe_bench.experiments.gpu_results import of_step, sentences
from gpipe_bench.harness.record import Metric, Record
from gpipe_bench.harness.store import Store

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


def sizes(column: str, found: float | None) -> Record:
    return done(
        measured("measured parameters", found, "parameters"),
        Metric("modelled parameters", 90e6, "parameters", "modelled"),
        part="largest on a GPU", half="amoebanet", column=column,
    )  # fmt: skip


def step(m: int, rate: float, *more: Metric) -> Record:
    metrics = measured("throughput", rate, "samples/s"), *more
    return done(*metrics, part="on GPUs", model="transformer", K=2, M=m)


OUT = {"cells": {"naive-1": {"out_of_memory": "CUDA out of memory"}, "pipeline-1": {"out_of_memory": ""}}}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (
            [peaks("naive-1", None, 33.06), peaks("pipeline-1", 5.42, 5.34)],
            ["amoebanet in float32 under 8 GiB: naive-1 does not fit (33.06 GiB modelled), pipeline-1 fits "
             "(5.42 GiB measured); the paper: all of these fit"],
        ),
        (
            [sizes("naive-1", 85e6), sizes("pipeline-8", None)],
            ["amoebanet: naive-1 fits up to 85M (modelled 90M), pipeline-8 fits up to nothing (modelled "
             "90M); the paper: naive-1 82M, pipeline-8 1.8B"],
        ),
        (
            [done(measured("with over without", 0.79), part="recomputation", model="resnet101")],
            ["resnet101: re-materialization leaves 0.79 of the throughput; the paper: 0.8"],
        ),
        (
            [done(details=OUT, part="recomputation", model="resnet101")],
            ["resnet101: not measured: CUDA out of memory"],
        ),
        (
            [
                done(measured("seconds of an example", 9.0 / n, "ms"), measured("control", 1 + n / 100),
                     part="layer seconds", model="amoebanet", examples=n)
                for n in (1, 2)
            ],
            ["amoebanet: an example takes 9 ms in micro-batches of 1 and 4.5 ms in those of 2; the control "
             "took 1.01 to 1.02 of what it took before"],
        ),
        (
            [step(1, 40.0), step(4, 70.0, measured("rate against ScheduleGPipe", 1.5))],
            ["transformer K=2 M=1: 40 samples/s, 1.00 of K=2 M=1; the paper: 1; torch's did not run",
             "transformer K=2 M=4: 70 samples/s, 1.75 of K=2 M=1; the paper: 1.7; 1.50 of torch's "
             "ScheduleGPipe"],
        ),
        (
            [lost("out of memory on stage 0\nmore", part="on GPUs", model="transformer", K=2, M=1),
             step(4, 70.0)],
            ["part=on GPUs model=transformer K=2 M=1: skipped: out of memory on stage 0",
             "transformer K=2 M=4: 70 samples/s, relative to nothing: K=2 M=1 did not run; the paper: 1.7; "
             "torch's did not run"],
        ),
        ([lost("KeyError: 3", "failed", model="amoebanet")], ["model=amoebanet: failed: KeyError: 3"]),
    ],
)  # fmt: skip
def test_a_step_says_what_it_found_beside_the_paper_and_why_what_is_missing_did_not_run(
    records: list[Record], said: list[str]
) -> None:
    assert list(sentences(records)) == said


def test_the_lines_are_about_the_steps_own_cases_as_they_are_now(tmp_path: Path) -> None:
    """Not about cases of another step of the same experiment, nor what is on record from before."""
    store = Store(tmp_path)
    case = {"part": "device", "half": "amoebanet", "precision": "float32"}
    for column, reason in (("naive-1", "before"), ("naive-1", "now"), ("pipeline-2", "another step's")):
        store.append(
            record(experiment="table1", case={**case, "column": column}, status="skipped", reason=reason,
                   metrics=(), details={})
        )  # fmt: skip
    (line,) = of_step(["table1", "--only", "part=device", "--only", "column=naive-1"], tmp_path)
    assert line.endswith("skipped: now")
    assert of_step(["table2", "--gpus", "4"], tmp_path) == ["no case has ended"]

"""What a plan is asked, what it may choose and what it answers: values that refuse what cannot be."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

from gpipe_bench import planner
from gpipe_bench.pipeline import LINKS
from gpipe_bench.pipeline.memory import peaks, profile
from gpipe_bench.planner import Candidate, Prediction, Request
from gpipe_bench.planner.request import OPTIMIZERS, PRECISIONS

REQUEST = Request(accelerators=8, memory_bytes=2**30, batch_size=64, link=LINKS["nvlink4"])
CANDIDATE = Candidate(
    cut=(range(0, 3), range(3, 5)), schedule="1f1b", num_microbatches=4, remat=("always", "never"),
    num_workers=2, dp=2, fsdp=2, fsdp_level=3,
)  # fmt: skip
PREDICTION = Prediction(
    candidate=CANDIDATE, batch_size=64, step_s=2.0, low_s=1.0, high_s=4.0, peak_bytes=(5, 7),
    peak_when=("0B0", "1B0"), parts_s={"computation": 2.0},
)  # fmt: skip


def test_a_candidate_counts_its_accelerators_and_examples() -> None:
    assert (CANDIDATE.num_stages, CANDIDATE.replicas, CANDIDATE.accelerators) == (2, 4, 8)
    assert replace(CANDIDATE, tp=3).accelerators == 24
    assert CANDIDATE.microbatch_size(64) == 4
    assert REQUEST.per_host == 8
    assert replace(REQUEST, hosts=2, between=LINKS["infiniband-ndr"]).per_host == 4


def test_a_prediction_names_its_fullest_worker() -> None:
    assert (PREDICTION.peak, PREDICTION.fullest, PREDICTION.examples_per_s) == (7, 1, 32.0)
    facts = PREDICTION.describe()
    assert (facts["cut"], facts["remat"], facts["peak_bytes"]) == ([3, 2], ["always", "never"], [5, 7])


def test_names_are_those_of_the_parts_that_know_them() -> None:
    assert set(OPTIMIZERS) == set(peaks.OPTIMIZERS)
    assert set(profile.PRECISIONS) <= set(PRECISIONS)


def test_the_values_need_no_torch() -> None:
    for name in ("request", "candidate", "costs", "steps", "cuts"):
        tree = ast.parse((Path(planner.__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert all(
            module.split(".")[0] in sys.stdlib_module_names
            or module.startswith(("gpipe_bench.pipeline.plan.", "gpipe_bench.planner."))
            for module in imported
        ), (name, imported)

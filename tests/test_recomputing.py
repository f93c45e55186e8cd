"""What must be recomputed of a model under a cap: ways in their order, and the table of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from records import record

from gpipe_bench.experiments.predicted.sizes import of_the_paper
from gpipe_bench.experiments.schedules import recomputing
from gpipe_bench.experiments.schedules.recomputing import GIB, SHARES, WAYS, Found, Subject
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Boundary, Profiler
from gpipe_bench.pipeline.memory.profile import ModelProfile
from gpipe_bench.planner.accelerators import TPU_V2


@pytest.fixture(scope="module")
def subject() -> Subject:
    """The Transformer of Table 2, small enough to be profiled at once; its cap is set by the tests."""
    full = of_the_paper("table2", "transformer", quick=True)
    with torch.device("meta"):
        model = MODELS[full.model](**full.options)
    inputs, target = example_batch(full.model, 2, device="meta", **full.options)
    layers, loss = Profiler().model(
        model, loss_fn(full.model, **full.options), Boundary.of(inputs), Boundary.of(target)
    )
    return Subject("small", full, ModelProfile(layers, loss), TPU_V2, 1.0, 12, 6)


def ways(subject: Subject, cap_gib: float) -> dict[str, Found]:
    cut = subject.full.cut("operations", "least variance", 3)
    assert cut is not None
    return recomputing.ways_of(replace(subject, cap_gib=cap_gib), cut, "1f1b", 0.45)


def test_finer_choices_make_shorter_steps_under_the_same_cap(subject: Subject) -> None:
    roomy = ways(subject, 1.0)
    assert [roomy[way].remat for way in WAYS] == ["never", "never", ["never"] * 3, "never"]
    lean = ways(subject, 0.0)
    assert list(lean) == ["nothing"]
    # Just too little for all graphs.
    tight = ways(subject, (lean["nothing"].peak_bytes - 1) / GIB)
    nothing, one, each, adaptive = (tight[way] for way in WAYS)
    assert nothing.step_s <= adaptive.step_s <= each.step_s <= one.step_s
    assert adaptive.step_s < one.step_s
    assert adaptive.bound_s <= adaptive.step_s
    assert max(found.peak_bytes for found in (one, each, adaptive)) < nothing.peak_bytes


def test_the_table_says_what_fits_and_what_is_saved() -> None:
    def found(step_s: float, gib: float) -> Found:
        return Found(step_s, int(gib * GIB), "never", step_s)

    steps = {"nothing": found(1.0, 9), "one word": found(2.0, 4), "adaptive": found(1.5, 8)}
    too_large = {"nothing": steps["nothing"]}
    quantities = [
        *recomputing.quantities_of({"schedule": "gpipe", "K": 4}, dict.fromkeys(SHARES, steps)),
        *recomputing.quantities_of({"schedule": "1f1b", "K": 4}, dict.fromkeys(SHARES, too_large)),
    ]
    details = {
        "title": "A model", "accelerator": "TPU", "cap_gib": 8, "batch_size": 4, "num_microbatches": 2,
        "shares_of_peak": list(SHARES),
    }  # fmt: skip
    case = {"part": recomputing.PART, "model": "a"}
    (text,) = recomputing.tables(
        [record(experiment="schedules", case=case, quantities=tuple(quantities), details=details)]
    )
    lines = {line.split(",")[0]: line for line in text.splitlines() if "K=4" in line}
    assert "1000 (9, too much)" in lines["gpipe"]
    assert "2000 (4)" in lines["gpipe"]
    assert "1500 (8)" in lines["gpipe"]
    assert "25.0% [25.0%, 25.0%]" in lines["gpipe"]
    assert lines["gpipe"].count("does not fit") == 1
    assert lines["1f1b"].count("does not fit") == 3

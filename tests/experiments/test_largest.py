"""The largest models fit, the next ones do not, and the paper's are no larger."""

from __future__ import annotations

import dataclasses

import pytest

from gpipe_bench.experiments.paper import largest as search
from gpipe_bench.experiments.paper.largest import (
    Placement,
    Setting,
    fits,
    largest,
    place,
    place_anyhow,
)
from gpipe_bench.models.paper import COLUMNS, Column

PIPELINES = [each for each in COLUMNS["transformer"] if not each.is_naive]


def transformer(each: Column, precision: str = "float32", attention: str = "fused") -> Setting:
    return Setting("transformer", each.num_stages, each.is_naive, precision, attention)


def check(setting: Setting, found: Placement) -> None:
    assert len(found.partition) == len(found.stages) == setting.num_stages
    assert [layer for stage in found.partition for layer in stage] == list(
        range(found.partition[0].start, found.partition[-1].stop)
    )
    for stage in found.stages:
        assert stage.peak <= setting.cap_bytes
    assert found.peak_bytes == max(stage.peak for stage in found.stages)
    # All of it is trained: value, mean square and momentum.
    assert sum(stage.parameters for stage in found.stages) == 4 * found.num_parameters
    assert found.counter_bytes % 4 == 0
    assert 0 < found.counter_bytes < 10**6
    # With fewer micro-batches it would not fit.
    counts = setting.microbatch_counts()
    for count in counts[: counts.index(found.num_microbatches)]:
        assert place(setting, found.num_layers, found.num_filters, count) is None


@pytest.mark.parametrize(("precision", "attention"), [("float32", "fused"), ("bfloat16", "explicit")])
@pytest.mark.parametrize("each", PIPELINES, ids=lambda each: each.name)
def test_transformers(each: Column, precision: str, attention: str) -> None:
    setting = transformer(each, precision, attention)
    found = largest(setting)
    check(setting, found)
    assert place(setting, found.num_layers + 1, 0, setting.batch_size) is None, "one layer more"
    assert found.num_layers >= each.num_layers


def test_whether_a_model_fits_is_what_its_best_cut_says() -> None:
    setting = dataclasses.replace(transformer(PIPELINES[1]), cap_gib=3.0)
    answers = [fits(setting, count, 0, 32) for count in range(6, 40)]
    assert answers == [place(setting, count, 0, 32) is not None for count in range(6, 40)]
    assert set(answers) == {True, False}


def test_without_micro_batches_nothing_fits_the_paper_s_cap() -> None:
    """Every activation of 32 examples is kept, and their scores of 32,000 words alone are 4 GiB a copy."""
    setting = transformer(COLUMNS["transformer"][0])
    with pytest.raises(ValueError, match=r"accelerator\(s\) with mini-batch 32: the smallest"):
        largest(setting)
    roomy = dataclasses.replace(setting, cap_gib=64.0)
    found = largest(roomy)
    check(roomy, found)
    assert found.num_microbatches == 1
    assert place(roomy, found.num_layers + 1, 0, 1) is None
    pipelined = dataclasses.replace(transformer(PIPELINES[0]), cap_gib=64.0)
    assert found.num_parameters < largest(pipelined).num_parameters


def test_an_amoebanet_of_the_paper_s_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    each = next(each for each in COLUMNS["amoebanet"] if each.name == "pipeline-2")
    monkeypatch.setattr(search, "PAPER_NUM_LAYERS", (each.num_layers,))
    setting = Setting("amoebanet", each.num_stages, False, "float32")
    found = largest(setting)
    check(setting, found)
    assert found.num_layers == each.num_layers
    assert found.num_filters % 16 == 0
    wider = found.num_filters + 16
    assert place(setting, found.num_layers, wider, setting.batch_size) is None, "the next width"
    assert found.num_filters >= each.num_filters


def test_the_paper_s_sizes_are_exact() -> None:
    counts = {each.num_layers: 0 for each in COLUMNS["transformer"]}
    for each in COLUMNS["transformer"]:
        counts[each.num_layers] = place_anyhow(transformer(each), each.num_layers, 0, 1).num_parameters
    assert counts == {
        3: 282_178_816, 13: 785_761_536, 103: 5_318_006_016, 415: 21_029_786_880, 1663: 83_876_910_336,
    }  # fmt: skip


def test_a_cap_that_nothing_fits_is_named() -> None:
    setting = dataclasses.replace(transformer(PIPELINES[1]), cap_gib=0.25)
    with pytest.raises(ValueError, match=r"accelerator\(s\) with mini-batch 32: the smallest"):
        largest(setting)

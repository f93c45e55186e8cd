"""The largest models that fit, and what Table 1's published memory may have counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_bench.experiments.paper import largest as search
from gpipe_bench.experiments.paper.largest import (
    Placement,
    Setting,
    fits,
    largest,
    place,
    place_anyhow,
)
from gpipe_bench.experiments.paper.profiles import (
    Label,
    Reading,
    Relabel,
    amoebanet,
    profiled,
)
from gpipe_bench.experiments.paper.profiles import transformer as relabelled
from gpipe_bench.experiments.paper.stages import (
    Combination,
    counted,
    stages_of,
)
from gpipe_bench.models.paper import COLUMNS, Column, column
from gpipe_bench.pipeline import Boundary, Profiler
from gpipe_bench.pipeline.memory.profile import ModelProfile
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.memory.trace import LayerProfile

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


def with_settings(**changes: Any) -> Combination:
    """Plain settings, with some changes."""
    plain = {
        "activation_format": "float32", "gradient_copies": 0, "boundary_tensors": "inputs",
        "partition_cost": "operations", "partition_rule": "least variance", "num_microbatches": 4,
    }  # fmt: skip
    assert set(changes) <= set(plain)
    return {**plain, **changes}


def total(settings: Combination, where: Column) -> int:
    stages = stages_of("transformer", where, settings)
    assert stages is not None
    return sum(counted(stage, settings) for stage in stages)


# ------------------------------------------------------------------ the model


@pytest.mark.parametrize("name", ["naive-1", "pipeline-1"])
def test_what_is_kept_by_every_operation_is_this_engines_memory(name: str) -> None:
    """Without gradients, and with one copy of them, as the memory model has them that real steps check; but
    for the gradient of the one parameter that is being added, which is counted with the others here.
    """
    where = column("transformer", name)
    count = 1 if where.is_naive else 32
    placed = place_anyhow(
        Setting("transformer", 1, where.is_naive, "float32", "explicit"), where.num_layers, 0, count
    )
    stage = placed.stages[0]
    settings = with_settings(num_microbatches=32)
    assert total(settings, where) == pytest.approx(stage.working_set, rel=5e-3)
    with_gradients = total({**settings, "gradient_copies": 1}, where)
    assert with_gradients == pytest.approx(stage.working_set + stage.gradients, rel=5e-3)


def test_each_setting_does_what_it_says() -> None:
    where = column("transformer", "pipeline-8")
    base = total(with_settings(), where)
    gradients = 4 * (103 * 50_358_272 + 65_536_000 + 65_568_000)
    assert total(with_settings(gradient_copies=2), where) - base == pytest.approx(2 * gradients, rel=0.1)
    assert total(with_settings(activation_format="bfloat16"), where) < 0.6 * base
    assert total(with_settings(num_microbatches=8), where) < 0.6 * base
    # Each of the first seven stages keeps what it sends for every micro-batch of the mini-batch.
    sent = 7 * 32 * 1024 * 2048 * 4
    assert total(with_settings(boundary_tensors="inputs and outputs"), where) - base == sent


# ------------------------------------------------------------------ the search


def block(width: int, examples: int) -> LayerProfile:
    layer = nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU())
    inputs = Boundary.of(torch.empty(examples, width, 5, 7, requires_grad=True))
    return Profiler(with_shapes=True).layer(layer, inputs)


def fields(profile: LayerProfile) -> list[object]:
    return [
        dataclasses.astuple(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
        for value in (getattr(profile, each.name) for each in dataclasses.fields(profile))
    ]


def test_a_relabelled_profile_is_that_of_the_other_size() -> None:
    relabel = Relabel((Label(61, 61, 12), Label(43, 43, 6)))
    assert fields(relabel.profile(block(61, 43))) == fields(block(12, 6))


def check_equal(made: ModelProfile, direct: ModelProfile) -> None:
    assert [layer.num_parameters for layer in made.layers] == [
        layer.num_parameters for layer in direct.layers
    ]
    assert [(a.inputs, a.outputs) for a in made.layers] == [(a.inputs, a.outputs) for a in direct.layers]
    for mine, other in zip((*made.layers, made.loss), (*direct.layers, direct.loss), strict=True):
        assert stage_bytes([mine]) == stage_bytes([other]), mine.name
    assert stage_bytes(made.layers, made.loss) == stage_bytes(direct.layers, direct.loss)


def test_amoebanet_from_its_kinds_is_amoebanet_profiled_layer_by_layer(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Of any depth and width it takes 20 profiled layers."""
    run, traced = Profiler._run, list[str]()

    def counting(self: Profiler, layer: nn.Module, *ends: Any) -> LayerProfile:
        traced.append(type(layer).__name__)
        return run(self, layer, *ends)

    monkeypatch.setattr(Profiler, "_run", counting)
    made = [amoebanet(Reading(), *size) for size in ((9, 48, 2), (72, 1600, 7))]
    assert len(traced) <= 20
    check_equal(made[0], profiled(Reading(), "amoebanet", 2, num_layers=9, num_filters=48))


@pytest.mark.parametrize(("examples", "attention"), [(1, "explicit"), (2, "explicit"), (5, "fused")])
def test_the_transformer_at_another_micro_batch(examples: int, attention: str) -> None:
    made = relabelled(Reading(), 2, examples, attention)
    check_equal(made, profiled(Reading(), "transformer", examples, num_layers=2, attention=attention))

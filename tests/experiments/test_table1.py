"""The largest models that fit, what Table 1 counts, and real steps that hold what is modelled."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from records import record
from torch import nn

from gpipe_bench.experiments.paper import largest as search
from gpipe_bench.experiments.paper.largest import Placement, Setting, fits, largest, place, place_anyhow
from gpipe_bench.experiments.paper.profiles import Combination, Reading, amoebanet, held_by_stages, profiled
from gpipe_bench.experiments.paper.profiles import transformer as relabelled
from gpipe_bench.experiments.paper.table1 import EXPERIMENT
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.record import decode, encode
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.models import paper as paper_models
from gpipe_bench.models.paper import COLUMNS, Column, column
from gpipe_bench.pipeline import Boundary, Profiler, StagePeaks
from gpipe_bench.pipeline.memory.profile import PRECISIONS, ModelProfile
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


@pytest.mark.parametrize(
    ("each", "precision", "attention"),
    [
        (PIPELINES[0], "float32", "fused"), (PIPELINES[1], "bfloat16", "explicit"),
        (PIPELINES[3], "float32", "explicit"),
    ],
)  # fmt: skip
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
    with pytest.raises(ValueError, match=r"accelerator\(s\) with mini-batch 32; use"):
        largest(setting)
    assert largest(dataclasses.replace(setting, cap_gib=64.0)).num_microbatches == 1


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


def with_settings(**changes: Any) -> Combination:
    """Plain settings, with some changes."""
    plain = {
        "activation_format": "float32", "partition_cost": "operations", "partition_rule": "least variance",
        "num_microbatches": 4,
    }  # fmt: skip
    assert set(changes) <= set(plain)
    return {**plain, **changes}


def total(settings: Combination, where: Column) -> int:
    stages = held_by_stages("transformer", where, settings)
    assert stages is not None
    return sum(stage.moving for stage in stages)


# ------------------------------------------------------------------ the model


@pytest.mark.parametrize("name", ["naive-1", "pipeline-1"])
def test_what_is_kept_by_every_operation_is_this_engines_memory(name: str) -> None:
    """Without gradients, as the memory model has it that real steps check."""
    where = column("transformer", name)
    count = 1 if where.is_naive else 32
    placed = place_anyhow(
        Setting("transformer", 1, where.is_naive, "float32", "explicit"), where.num_layers, 0, count
    )
    stage = placed.stages[0]
    settings = with_settings(num_microbatches=32)
    assert total(settings, where) == pytest.approx(stage.working_set, rel=5e-3)


def test_each_setting_does_what_it_says() -> None:
    where = column("transformer", "pipeline-8")
    base = total(with_settings(), where)
    assert total(with_settings(activation_format="bfloat16"), where) < 0.6 * base
    assert total(with_settings(num_microbatches=8), where) < 0.6 * base


# ------------------------------------------------------------------ the search


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


HALVES = {
    "amoebanet": {"num_layers": 3, "num_filters": 16, "image_size": 96, "num_classes": 10, "aux_head": True},
    "transformer": {
        "num_layers": 6, "vocab_size": 512, "d_model": 64, "ffn_dim": 256, "num_heads": 4, "seq_len": 64,
    },
}  # fmt: skip
BATCH_SIZE, NUM_STAGES, NUM_MICROBATCHES = 8, 3, 4


@pytest.fixture(params=["amoebanet", "transformer"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Setting, Placement]:
    """A half of Table 1 scaled down, cut into three stages."""
    return scaled_down(request.param, monkeypatch, "float32")


def scaled_down(half: str, monkeypatch: pytest.MonkeyPatch, precision: str) -> tuple[str, Setting, Placement]:
    options = HALVES[half]
    name = paper_models.HALVES[half].model
    inputs, target = example_batch(name, BATCH_SIZE // NUM_MICROBATCHES, device="meta", **options)
    with torch.device("meta"):
        model = MODELS[name](**options)
    profiler = Profiler(PRECISIONS[precision])
    layers = profiler.chain(model, Boundary.of(inputs))
    loss = profiler.loss(loss_fn(name, **options), layers[-1].outputs, Boundary.of(target))
    profile = ModelProfile(layers, loss)
    setting = Setting(half, NUM_STAGES, False, precision, cap_gib=1.0)
    monkeypatch.setattr(Setting, "profile", lambda self, *size: profile)
    peaks = StagePeaks(layers, loss, setting.schedule(NUM_MICROBATCHES))
    stages = peaks.partition(setting.cap_bytes)
    assert stages is not None
    memory = tuple(peaks.memory(stage.start, stage.stop) for stage in stages)
    return half, setting, Placement(0, 0, profile.num_parameters, NUM_MICROBATCHES, stages, memory)


def measure(part: search.Part, half: str, setting: Setting, device: str) -> int:
    return search.measure(*arguments(part, half, setting, device))


def arguments(part: search.Part, half: str, setting: Setting, device: str) -> tuple[Any, ...]:
    options: dict[str, Any] = HALVES[half]
    with torch.device("meta"):
        model = MODELS[paper_models.HALVES[half].model](**options)
    schedule = setting.schedule(NUM_MICROBATCHES)
    return part, model, half, schedule, options, BATCH_SIZE, torch.device(device), setting.precision


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("half", HALVES)
def test_every_stage_alone_holds_what_is_modelled(
    half: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, setting, placement = scaled_down(half, monkeypatch, precision)
    parts = search.distinct_parts(setting, placement)
    assert [part.index for part in parts] == [0, 1, 2]
    for part in parts:
        # The gradient of a micro-batch is made up when its backward begins, not posted ahead of R.
        ahead = part.profiles[-1].output_gradient_bytes if part.index < NUM_STAGES - 1 else 0
        measured = measure(part, half, setting, "cpu")
        assert part.memory.peak - ahead * 1.01 <= measured <= part.memory.peak * 1.01


class Accelerator:
    """A CPU that is said to be an accelerator of 64 GiB, whose `set_per_process_memory_fraction` is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fractions: list[float] = []
        module = SimpleNamespace(
            set_per_process_memory_fraction=lambda share, _: self.fractions.append(share)
        )
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(search.devices, "total_memory_bytes", lambda device: 64 * 2**30)
        monkeypatch.setattr(search.devices, "peak_bytes", lambda device: 7 * 2**30)


NO_ROOM = "CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a capacity of 79.1 GiB"


def records_of(monkeypatch: pytest.MonkeyPatch, *runs: dict[str, Any], limit: int) -> list[Any]:
    """Records of device cases on an accelerator that holds no stage whose modelled peak is above `limit`."""

    def measured(part: search.Part, *_: Any, **__: Any) -> int:
        if part.memory.peak > limit:
            raise torch.OutOfMemoryError(f"{NO_ROOM}\nadvice")
        return part.memory.peak

    monkeypatch.setattr(search, "measure", measured)
    options = RunOptions(profile="full", device="cuda")
    outcomes = [(key, EXPERIMENT.run(Case(key), options)) for key in runs]
    return [
        decode(encode(record(experiment="table1", case=key, profile="full", metrics=found.metrics,
                             details=found.details)))
        for key, found in outcomes
    ]  # fmt: skip


def test_a_model_that_does_not_fit_is_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As naive-1 on a GPU, with what it held and asked for; the others keep their numbers."""
    fake = Accelerator(monkeypatch)
    key = {"part": "device", "half": "transformer", "precision": "float32"}
    found = records_of(
        monkeypatch, {**key, "column": "naive-1"}, {**key, "column": "pipeline-8"}, limit=16 * 2**30
    )
    assert fake.fractions == [0.25, 1.0] * 2
    naive, pipeline = found
    assert (naive.status, naive.details["fits"], naive.details["cap_gib"]) == ("done", False, 16)
    assert naive.metric("measured peak").value is None
    assert naive.metric("measured peak").note == f"stage 0: {NO_ROOM}"
    assert naive.metric("modelled peak").value > 16 * 2**30 > pipeline.metric("measured peak").value
    assert [stage["ran_out"] for stage in pipeline.details["stages"]] == [""] * 3
    text = EXPERIMENT.tables(found)  # type: ignore[misc]
    line = next(line for line in text.splitlines() if "naive-1" in line)
    assert f"does not fit 16 GiB: stage 0 held 7 GiB; {NO_ROOM.partition('. GPU')[0]}  " in line
    assert "not as in the paper, where it fits" in line
    assert "as in the paper" in next(line for line in text.splitlines() if "pipeline-8" in line)


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_agrees(small: tuple[str, Setting, Placement]) -> None:
    half, setting, placement = small
    for part in search.distinct_parts(setting, placement):
        measured = measure(part, half, setting, "cuda")
        # Tiny tensors in blocks of 512 bytes.
        assert measured == pytest.approx(part.memory.peak, rel=0.25)

"""A stage run alone, and whole real steps, hold what the memory model says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from records import record

from gpipe_bench.experiments.paper.largest import Placement, Setting
from gpipe_bench.experiments.paper.real_steps import verify
from gpipe_bench.experiments.paper.table1 import EXPERIMENT, real_steps
from gpipe_bench.experiments.paper.table1_shown import LARGEST
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.record import decode, encode
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.models import paper as paper_models
from gpipe_bench.pipeline import Boundary, Pipeline, Profiler, StagePeaks
from gpipe_bench.pipeline.memory.profile import PRECISIONS, ModelProfile

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


def measure(part: real_steps.Part, half: str, setting: Setting, device: str) -> real_steps.Peak:
    return real_steps.measure(*arguments(part, half, setting, device))


def arguments(part: real_steps.Part, half: str, setting: Setting, device: str) -> tuple[Any, ...]:
    options: dict[str, Any] = HALVES[half]
    with torch.device("meta"):
        model = MODELS[paper_models.HALVES[half].model](**options)
    schedule = setting.schedule(NUM_MICROBATCHES)
    return part, model, half, schedule, options, BATCH_SIZE, torch.device(device), None, setting.precision


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("half", HALVES)
def test_every_stage_alone_holds_what_is_modelled(
    half: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, setting, placement = scaled_down(half, monkeypatch, precision)
    parts = real_steps.distinct_parts(setting, placement)
    assert [part.index for part in parts] == [0, 1, 2]
    for part in parts:
        # The gradient of a micro-batch is made up when its backward begins, not posted ahead of R.
        ahead = part.profiles[-1].output_gradient_bytes if part.index < NUM_STAGES - 1 else 0
        measured = measure(part, half, setting, "cpu")
        assert part.memory.peak - ahead * 1.01 <= measured.num_bytes <= part.memory.peak * 1.01
        assert measured.workspace_bytes == 0


class Accelerator:
    """A CPU that is said to be an accelerator of 64 GiB, whose `set_per_process_memory_fraction` is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fractions: list[float] = []
        module = SimpleNamespace(
            set_per_process_memory_fraction=lambda share, _: self.fractions.append(share)
        )
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(real_steps.devices, "total_memory_bytes", lambda device: 64 * 2**30)
        monkeypatch.setattr(real_steps.devices, "peak_bytes", lambda device: 7 * 2**30)


NO_ROOM = "CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a capacity of 79.1 GiB"


def records_of(monkeypatch: pytest.MonkeyPatch, *runs: dict[str, Any], limit: int) -> list[Any]:
    """Records of device cases on an accelerator that holds no stage whose modelled peak is above `limit`."""

    def measured(part: real_steps.Part, *_: Any, **__: Any) -> real_steps.Peak:
        if part.memory.peak > limit:
            raise torch.OutOfMemoryError(f"{NO_ROOM}\nadvice")
        return real_steps.Peak(part.memory.peak, 2**20)

    monkeypatch.setattr(real_steps, "measure", measured)
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


@pytest.mark.parametrize(
    ("limit", "more", "said"),
    [(16.0, 0, "as modelled"), (15.5, -8, "8 smaller than modelled"), (1.0, None, "none of 4 sizes fits")],
)
def test_the_largest_model_is_the_first_that_fits_from_above(
    monkeypatch: pytest.MonkeyPatch, limit: float, more: int | None, said: str
) -> None:
    Accelerator(monkeypatch)
    key = {"part": LARGEST, "half": "transformer", "column": "pipeline-8"}
    (found,) = records_of(monkeypatch, key, limit=int(limit * 2**30))
    tried = found.details["tried"]
    assert [each["more"] for each in tried if each["fits"]] == ([] if more is None else [more])
    assert [each["more"] for each in tried] == [1, 0, -8, -16][: 4 if more is None else 2 - more // 8]
    modelled, measured = (found.metric(f"{how} parameters").value for how in ("modelled", "measured"))
    assert (measured is None) == (more is None)
    assert more is None or (measured == modelled) == (more == 0)
    assert said in EXPERIMENT.tables([found])  # type: ignore[misc]


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_agrees(small: tuple[str, Setting, Placement]) -> None:
    half, setting, placement = small
    for part in real_steps.distinct_parts(setting, placement):
        measured = measure(part, half, setting, "cuda")
        # Tiny tensors in blocks of 512 bytes.
        assert measured.num_bytes == pytest.approx(part.memory.peak, rel=0.25)


NAME = "transformer-lm"


def test_the_model_meets_real_steps() -> None:
    found = verify(NAME, 2, "always", 4)
    assert len(found.tracked) == 2
    assert found.largest_error < 1e-4


@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_stage_keeps_from_the_first_step_is_counted(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = verify(NAME, 2, "always", 4).tracked

    class Hoarding(Pipeline):
        def step(self, *arguments: Any, **options: Any) -> Any:
            result = super().step(*arguments, **options)
            kept = self.stages[stage].__dict__.setdefault("kept", {})
            kept.setdefault("first", [torch.zeros(2500)])  # 10,000 bytes, deep inside
            return result

    monkeypatch.setattr(real_steps, "Pipeline", Hoarding)
    after = verify(NAME, 2, "always", 4).tracked
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        10_000 * (index == stage) for index in range(2)
    ]

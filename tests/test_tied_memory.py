"""The memory model of weights that several layers share, beside real steps, counted storage by storage."""

from __future__ import annotations

import pytest
import torch
from real_steps import Step, compare
from tied_memory_cases import count_all, data, model
from torch import Tensor, nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Action, Boundary, Profiler, Schedule, launch, named, pipeline_memory
from gpipe_bench.pipeline.memory.workers import shared_weights
from gpipe_bench.pipeline.stage.trees import split

SIZES = {
    "num_layers": 2, "d_model": 16, "num_heads": 2, "vocab_size": 97, "seq_len": 12, "dropout": 0.0,
}  # fmt: skip


def gpt2() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = MODELS["gpt2"](**SIZES)
    generator = torch.Generator().manual_seed(1)
    return model, *example_batch("gpt2", 8, generator=generator, **SIZES)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("schedule", "remat"), [("gpipe", "always"), ("1f1b", "never")])
def test_a_tie_within_a_stage(schedule: str, remat: str, optimizer: str) -> None:
    model, batch, target = gpt2()
    counted, modelled = compare(
        model, batch, target, loss_fn("gpt2", **SIZES), Step(1, 4, remat, schedule, optimizer)
    )
    assert modelled[0].peak == pytest.approx(counted.peaks[0], rel=0.01)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_tie_between_stages_of_one_worker(optimizer: str) -> None:
    row = [f"{stage}F{m}" for m in range(2) for stage in range(2)]
    row += [f"{stage}B{m}" for m in range(2) for stage in (1, 0)]
    schedule = Schedule("own", 2, 2, "never", (tuple(map(Action.parse, row)),), (0, 0))
    model, batch, target = gpt2()
    counted, modelled = compare(
        model, batch, target, loss_fn("gpt2", **SIZES), Step(2, 2, "never", schedule, optimizer)
    )
    assert modelled[0].peak == pytest.approx(counted.peaks[0], rel=0.01)


def test_which_weights_are_shared() -> None:
    model, _, _ = gpt2()
    (weight,) = shared_weights(list(model))
    assert (weight.num_bytes, weight.trained, weight.layers) == (97 * 16 * 4, True, (0, 3))
    assert shared_weights([nn.Linear(2, 2), nn.Linear(2, 2)]) == ()


CASES = [
    {"schedule": schedule, "remat": remat, "optimizer": optimizer, "microbatches": microbatches}
    for schedule, remat, optimizer, microbatches in (
        ("gpipe", "always", "sgd", 2), ("gpipe", "never", "sgd", 1), ("1f1b", "never", "adam", 2),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def over_processes() -> list[list[int]]:
    """Bytes of each case, on each of two processes that share a weight."""
    return launch(count_all, 2, CASES, device="cpu")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_tie_between_processes(number: int, over_processes: list[list[int]]) -> None:
    """Each owner has the weight, its state and its gradient, and for a moment another owner's gradient."""
    case, layers = CASES[number], model()
    inputs, target = (Boundary.of(split(each, case["microbatches"])[0]) for each in data())
    profiles, loss = Profiler(ties_apart=True).model(layers, nn.functional.cross_entropy, inputs, target)
    modelled = pipeline_memory(
        profiles, loss, [range(2), range(2, 4)],
        named(case["schedule"], 2, case["microbatches"], remat=case["remat"]), case["optimizer"],
        receive_ahead=1, ties=shared_weights(list(layers)),
    )  # fmt: skip
    for rank, found in enumerate(modelled):
        assert found.peak == pytest.approx(over_processes[rank][number], rel=0.01)

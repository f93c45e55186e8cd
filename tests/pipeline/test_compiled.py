"""Stages whose layers torch compiles: the same gradients, masks and averages, whatever the cuts and whatever
is recomputed.

Mostly with a backend that runs what was traced as it is, which takes a second and has everything that matters
here (one graph per layer, its backward as one node); one small model is really compiled.
"""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from tiny_models import mlp_batch, plain_step, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.stage import compiled

TRACED = "aot_eager"
mse_loss = nn.functional.mse_loss


class Block(nn.Module):
    """A residual block that draws, and whose own code a compiler looks into."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(nn.functional.gelu(self.inner(x))))


def model(dropout: float = 0.2) -> nn.Sequential:
    return seeded(lambda: nn.Sequential(*[Block(6, dropout) for _ in range(3)], nn.Linear(6, 6)).double())


def step(
    num_stages: int, backend: bool | str | dict[str, Any], layers: nn.Sequential | None = None, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of a step."""
    layers = model() if layers is None else layers
    pipeline = Pipeline(
        layers, num_stages=num_stages, num_microbatches=3, cost=[1] * len(layers), compile=backend, **options
    )
    loss = pipeline.step(*mlp_batch(7), mse_loss)
    return loss, [parameter.grad for parameter in pipeline.parameters() if parameter.grad is not None]


def assert_equal(left: tuple[Tensor, list[Tensor]], right: tuple[Tensor, list[Tensor]]) -> None:
    assert torch.equal(left[0], right[0])
    assert len(left[1]) == len(right[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(left[1], right[1], strict=True))


@pytest.fixture(scope="module", autouse=True)
def programs() -> Any:
    """What is compiled here is forgotten afterwards."""
    yield
    compiled._program.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("num_stages", "options"),
    [(2, {"remat": "except_last"}), (4, {"remat": "always", "schedule": "1f1b"})],
)  # fmt: skip
def test_cuts_and_recomputation_do_not_show_in_compiled_layers(
    num_stages: int, options: dict[str, Any]
) -> None:
    """Bit for bit, masks included: F of re-materialization is the program that R is."""
    alone = {"schedule": options.get("schedule", "gpipe"), "remat": "never"}
    assert_equal(step(num_stages, TRACED, **options), step(1, TRACED, **alone))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_masks_and_gradients_are_those_of_the_plain_model(schedule: str) -> None:
    """Where the backward is split, I computes what the weights need, too; W adds it."""
    plain = plain_step(model(), *mlp_batch(7), mse_loss, 3)
    loss, gradients = step(2, TRACED, remat="always", schedule=schedule)
    torch.testing.assert_close(loss, plain.loss)
    for found, wanted in zip(gradients, plain.gradients.values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_layers_of_a_kind_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled._program.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step(4, TRACED, remat="always")
    assert compiled._program.cache_info().misses == 2  # blocks, and the linear layer
    entries = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert entries == 2 * 3  # two sizes; a block that begins the model needs no gradient for its input
    step(2, TRACED, remat="never", schedule="1f1b")
    assert compiled._program.cache_info().misses == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == entries


def test_more_sizes_than_torch_keeps_run_as_they_are_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that it keeps stay compiled: recomputation finds what the forward ran."""
    compiled._program.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(compiled._CompiledCall, "has_warned", False)
    layers, plain = model(0.2), model(0.2)
    options: dict[str, Any] = {"num_microbatches": 1, "cost": [1] * 4}
    pipeline = Pipeline(layers, num_stages=2, compile=TRACED, remat="always", **options)
    same = Pipeline(plain, num_stages=1, remat="never", **options)

    def train() -> None:
        for size in (*range(2, 14), 2, 13):
            batch, target = mlp_batch(size)
            torch.testing.assert_close(
                pipeline.step(batch, target, mse_loss), same.step(batch, target, mse_loss)
            )

    with pytest.warns(UserWarning, match="more sizes or modes than the 8") as caught:
        train()
    assert len([each for each in caught if "not compiled" in str(each.message)]) == 1
    for a, b in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-14)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * torch._dynamo.config.recompile_limit


class Looks(nn.Module):
    """What it computes depends on numbers, which no compiler knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x.tanh()


class Normalizing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def mixed() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 6), Looks(), Normalizing(), nn.Linear(6, 6)).double())


def test_what_cannot_be_compiled_runs_as_it_is_and_is_named() -> None:
    plain, layers = mixed(), mixed()
    with pytest.warns(UserWarning, match="not compiled") as caught:
        found = step(2, TRACED, layers, remat="always")
    sentences = [str(each.message) for each in caught if "not compiled" in str(each.message)]
    assert len(sentences) == 2
    assert sentences[0].startswith("not compiled: layers 2 have batch normalization")
    assert sentences[1].startswith("not compiled: layer 1 (Looks) runs as it is")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = step(2, False, plain, remat="always")
    for a, b in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for (name, a), (_, b) in zip(layers.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    assert int(layers[2].norm.num_batches_tracked) == 1


def test_a_compiled_pipeline_evaluates() -> None:
    layers = model(dropout=0.0).extend([nn.ReLU(inplace=True), nn.MaxPool1d(2, return_indices=True)])
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=2, compile=TRACED)
    batch, _ = mlp_batch(4)
    output, places = pipeline(batch)
    assert not output.requires_grad
    torch.testing.assert_close((output, places), layers(batch))


def test_an_unknown_backend_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"compile is 'fast'; choose True, False or a backend .*inductor"):
        Pipeline(model(), num_stages=1, num_microbatches=1, compile="fast")


@pytest.mark.parametrize(
    ("compile", "says"),
    [
        ({"mode": "reduce-overhead"}, "replays CUDA graphs: .* choose mode='max-autotune-no-cudagraphs'"),
        ({"mode": "max-autotune"}, "replays CUDA graphs"),
        ({"mode": "fast"}, "compile has mode='fast' .* modes are of 'inductor': default, "),
        ({"mode": "default", "backend": TRACED}, "with backend='aot_eager'; modes are of 'inductor'"),
        ({"name": "mine"}, "compile has 'name'; it takes backend, mode, fullgraph, dynamic"),
    ],
)
def test_arguments_of_the_compiler_that_no_stage_can_take_are_refused(
    compile: dict[str, str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Pipeline(model(), num_stages=1, num_microbatches=1, compile=compile)


def test_arguments_of_the_compiler_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **given: told.append(given) or function)
    compiled._program.cache_clear()
    mode = {"mode": "max-autotune-no-cudagraphs", "fullgraph": False, "dynamic": None}
    for compile in (True, mode):
        Pipeline([nn.Linear(6, 6)], num_stages=1, num_microbatches=1, compile=compile)
    compiled._program.cache_clear()
    assert told[0] == {
        "fullgraph": True, "dynamic": False, "backend": "inductor", "options": {"fallback_random": True}
    }  # fmt: skip
    assert (told[1]["fullgraph"], told[1]["dynamic"]) == (False, None)
    assert told[1]["options"]["max_autotune"]
    assert told[1]["options"]["fallback_random"]


def test_one_program_for_all_sizes_gives_the_same_gradients() -> None:
    """Parts of a layer, too, where the rest cannot be compiled."""
    for layers, options in ((model, {"dynamic": True}), (mixed, {"fullgraph": False})):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="not compiled: .* runs as it is")
            found = step(2, {"backend": TRACED, **options}, layers(), remat="always")
        for a, b in zip(found[1], step(2, False, layers(), remat="always")[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_layer_that_must_be_compiled_whole_and_cannot_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="action 0F0 failed: .*data-dependent"):
        step(1, {"backend": TRACED, "fullgraph": True}, nn.Sequential(nn.Linear(6, 6).double(), Looks()))


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is here")
def test_really_compiled_layers_give_the_plain_models_gradients_with_its_masks() -> None:
    def two() -> nn.Sequential:
        return seeded(lambda: nn.Sequential(Block(6, 0.2), Block(6, 0.2)).double())

    batch, target = mlp_batch(6)
    plain = plain_step(two(), batch, target, mse_loss, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="not compiled")
        found = []
        for num_stages, remat in ((1, "never"), (2, "always")):
            pipeline = Pipeline(
                two(), num_stages=num_stages, num_microbatches=3, remat=remat, compile=True, cost=[1] * 2
            )
            loss = pipeline.step(batch, target, mse_loss)
            found.append((loss, [parameter.grad for parameter in pipeline.parameters()]))
    assert_equal(*found)
    torch.testing.assert_close(found[0][0], plain.loss)
    for gradient, wanted in zip(found[0][1], plain.gradients.values(), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)

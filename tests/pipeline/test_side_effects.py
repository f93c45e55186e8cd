"""Layers that do more than map their input to their output: right, refused with the remedy, or found."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import side_effects as does
import torch
from case_runner import watched
from tiny_models import mlp_batch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gpipe_bench.pipeline import ActionError, Pipeline, VerifyError

mse_loss = nn.functional.mse_loss
Layers = Callable[[], list[nn.Module]]


def test_random_programs_are_right_refused_or_found() -> None:
    outcomes = [does.judged(number) for number in range(1000, 1025)]
    assert not [words for outcome, words in outcomes if outcome.startswith(("wrong", "right, but"))]
    assert {"right", "refused"} <= {outcome for outcome, _ in outcomes}


@pytest.mark.processes
def test_over_two_processes_too() -> None:
    for of_rank in watched(does.over_processes, 2, 1000, 8):
        assert not [w for outcome, w in of_rank.values() if outcome.startswith(("wrong", "right, but"))]


class OtherKeys(does.Dense):
    """A dict whose keys data decide."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)
        return {"y": y} if float(x.detach()[0, 0]) > 0 else {"y": y, "z": 2 * y}


class NeedsNone(does.Dense):
    """Its output needs a gradient for some micro-batches, and not for the first one."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if float(x.detach()[0, 0]) > 0 else y.detach()


class Last(does.Dense):
    def forward(self, given: Tensor | dict[str, Tensor]) -> Tensor:
        return super().forward(given["y"] if isinstance(given, dict) else given)


REFUSED: dict[str, tuple[Layers, str, str]] = {
    "a state": (lambda: [does.Recurrent()], "always", "attribute 'h' of layer 0 (Recurrent) changes"),
    "a counter": (lambda: [does.Counts()], "always", "attribute 'n' of layer 0 (Counts) changes"),
    "an object": (lambda: [does.InAnObject()], "always", "attribute 'holder' of layer 0 (InAnObject)"),
    "auxiliary": (lambda: [does.LeavesAux()], "always", "attribute 'aux' of layer 0 (LeavesAux) holds"),
    "a weight": (lambda: [does.ChangesItsWeight()], "never", "changes a parameter in its forward"),
    "a probe": (lambda: [does.Probes()], "always", "use torch.autograd.grad there"),
    "a type": (lambda: [does.MakesSpecial()], "never", "is of type Special"),
    "an attribute": (lambda: [does.SetsScale()], "never", "has the attribute 'scale'"),
    "a hook": (lambda: [does.Dense(), does.HooksItsOutput()], "always", "forwards run without a graph"),
    "noise": (lambda: [does.NumpyNoise()], "always", "draws random numbers that are not"),
    "a gradient for some": (lambda: [NeedsNone()], "never", "y + 0 * parameter.sum()"),
    "keys for some": (lambda: [OtherKeys()], "never", "as in a dict with all keys"),
    "in place": (lambda: [does.CountsInIntegers()], "never", "let it make a new one (self.n = self.n + 1)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_first_step_shows_is_refused_with_the_remedy(kind: str) -> None:
    build, remat, words = REFUSED[kind]
    layers = [layer.double() for layer in (*build(), Last())]
    pipeline = Pipeline(layers, partition=[len(layers) - 1, 1], num_microbatches=3, remat=remat)
    with pytest.raises(ActionError) as caught:
        pipeline.step(*mlp_batch(6), mse_loss)
    assert words in str(caught.value)


class Later(does.Dense):
    """From the second step on a buffer changes behind torch's back, and the output goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.has_begun = False

    def forward(self, x: Tensor) -> Tensor:
        if self.has_begun:
            self.scale.data.mul_(1.5)
        return super().forward(x) * self.scale


def test_what_begins_after_the_first_step_is_found_by_verify() -> None:
    layers = [layer.double() for layer in (Later(), does.Dense())]
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=3)
    pipeline.verify(*mlp_batch(6), mse_loss)
    pipeline.step(*mlp_batch(6), mse_loss)
    layers[0].has_begun = True
    with pytest.raises((VerifyError, ActionError), match="gradient of 'linear|such as .* changes by .data"):
        pipeline.verify(*mlp_batch(6), mse_loss)


def test_a_log_is_warned_of_and_trains_right() -> None:
    pipeline = Pipeline([does.Logs().double()], num_stages=1, num_microbatches=2)
    with pytest.warns(UserWarning, match=r"attribute 'log' of layer 0 \(Logs\) changes in each forward"):
        pipeline.step(*mlp_batch(4), mse_loss)


def test_a_target_in_the_memory_of_a_batch_that_is_overwritten() -> None:
    batch, _ = mlp_batch(4)
    pipeline = Pipeline([nn.ReLU(inplace=True), does.Dense().double()], num_stages=1, num_microbatches=2)
    with pytest.raises(ActionError, match=r"pass target.clone\(\)"):
        pipeline.step(batch, batch, mse_loss)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_cache_of_parametrized_weights_is_not_used(num_microbatches: int) -> None:
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)).double()]
    pipeline = Pipeline(layers, num_stages=1, num_microbatches=num_microbatches)
    with parametrize.cached():
        assert pipeline.verify(*mlp_batch(4), mse_loss) < 1e-12
        pipeline.step(*mlp_batch(4), mse_loss)
    assert all(p.grad is not None for p in layers[0].parameters())


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_loss_of_one_number_comes_back_without_dimensions(num_microbatches: int) -> None:
    pipeline = Pipeline([nn.Linear(6, 6).double()], num_stages=1, num_microbatches=num_microbatches)
    assert pipeline.step(*mlp_batch(4), lambda output, target: mse_loss(output, target)[None]).shape == ()


def test_two_threads_in_one_pipeline() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(20)
        return mse_loss(output, target)

    pipeline = Pipeline([nn.Linear(6, 6).double()], num_stages=1, num_microbatches=1, remat="never")
    other = threading.Thread(target=pipeline.step, args=(*mlp_batch(4), loss_fn))
    other.start()
    assert inside.wait(20)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        pipeline.step(*mlp_batch(4), mse_loss)
    go_on.set()
    other.join()
    pipeline.step(*mlp_batch(4), mse_loss)


ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"num_microbatches": 2.5}, {"num_microbatches": "4"}, {"num_microbatches": True}, {"num_stages": 1.0},
    {"devices": ["cuda:99"]}, {"devices": "gpu"}, {"mesh": "pp"}, {"group": "g"}, {"timeout_s": -1},
)  # fmt: skip


@pytest.mark.parametrize("wrong", ARGUMENTS, ids=str)
def test_arguments_of_another_kind_are_named(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=name) as caught:
        Pipeline([nn.Linear(2, 2)], **{"num_stages": 1, "num_microbatches": 2, **wrong})
    assert repr(value[0] if isinstance(value, list) else value) in str(caught.value)


def test_a_step_needs_a_loss() -> None:
    pipeline = Pipeline([nn.Linear(6, 6)], num_stages=1, num_microbatches=1)
    with pytest.raises(ValueError, match="loss_fn is None; give a function"):
        pipeline.step(torch.ones(2, 6), torch.ones(2, 6), None)  # type: ignore[arg-type]

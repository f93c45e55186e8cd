"""Portals: tensors that pass the layers between the one that stashes them and those that pop them."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from covering import pairwise
from odd_layers import Add
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_bench.models import MODELS
from gpipe_bench.pipeline import NAMED, Boundary, InProcess, Pipeline, Pop, PortalSequential, Profiler, Stash
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES

UNET = {"num_convs": 1, "num_filters": 4, "depth": 2, "dropout": 0.0, "image_size": 8}


def _linear() -> nn.Linear:
    return nn.Linear(3, 3)


def _encoder() -> PortalSequential:
    """One stash that three layers pop, as decoder layers pop the output of an encoder."""
    torch.manual_seed(0)
    layers = [_linear(), Stash("encoded", _linear()), nn.Tanh()]
    for _ in range(3):
        layers += [_linear(), nn.Tanh(), Pop("encoded", Add())]
    return PortalSequential(*layers, _linear()).double()


def _around_a_cut() -> PortalSequential:
    """Cut right behind the stash the tensor stands twice in one message."""
    torch.manual_seed(0)
    layers = [_linear(), Stash("a"), _linear(), nn.Tanh(), Pop("a", Add()), _linear()]
    return PortalSequential(*layers).double()


def test_verify_compares_stages_that_hold_whole_portals() -> None:
    """It compared the layer before the last one of the stage."""
    pipeline = Pipeline(_around_a_cut(), num_stages=2, num_microbatches=2, partition=[5, 1])
    data = torch.randn(2, 4, 3, dtype=torch.float64)
    assert pipeline.verify(data[0], data[1], F.mse_loss) < 1e-9


def _unet(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return MODELS["unet"](portals=True, **{**UNET, "dropout": dropout}).double()


def _images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.rand(5, n, 9, 9, generator=generator).double() for n in (3, 1))  # type: ignore[return-value]


def _rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(9, 3, generator=generator).double() for _ in range(2))  # type: ignore[return-value]


BUILT = {"unet": (_unet, _images), "encoder": (_encoder, _rows), "around a cut": (_around_a_cut, _rows)}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _plain(model: nn.Module, inputs: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), target)
    loss.backward()
    found = _gradients(model)
    model.zero_grad()
    return loss.detach(), found


def _assert_as_plain(name: str, **options: Any) -> None:
    model, (inputs, target) = (make() for make in BUILT[name])
    loss, expected = _plain(model, inputs, target)
    layers = len(list(model))
    pipeline = Pipeline(copy.deepcopy(model), cost=[1.0] * layers, **{"num_microbatches": 3, **options})
    found = pipeline.step(inputs, target, nn.functional.mse_loss)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-14)
    gradients = _gradients(pipeline)
    assert list(gradients) == list(expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-14, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(pipeline.eval()(inputs), model.eval()(inputs), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "num_stages", "schedule", "remat", "options"),
    [
        *((*row, {}) for row in pairwise(tuple(BUILT), (2, 4), tuple(NAMED), REMAT_MODES)),
        ("unet", 1, "gpipe", "always", {}),
        ("around a cut", 3, "1f1b", "always", {}),
        ("around a cut", 6, "1f1b", "always", {}),
        ("encoder", 12, "1f1b", "always", {}),
        ("encoder", 4, "gpipe", "always", {"transport": InProcess(copy=True)}),
        ("encoder", 3, "gpipe", "always", {"compile": "eager"}),
    ],
)
def test_gradients_and_outputs_are_the_plain_models(
    name: str, num_stages: int, schedule: str, remat: str, options: dict[str, Any]
) -> None:
    _assert_as_plain(name, num_stages=num_stages, schedule=schedule, remat=remat, **options)


class _Counting(InProcess):
    """Counts the bytes that stages are sent along each edge, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[int, int]] = Counter()

    def send(self, edge: Edge, microbatch: int, message: Any) -> None:
        self.sent[edge.source, edge.target] += sum(tensor.nbytes for tensor in message.tensors)
        super().send(edge, microbatch, message)

    def send_back(self, edge: Edge, microbatch: int, gradients: Any) -> None:
        self.sent[edge.target, edge.source] += sum(tensor.nbytes for tensor in gradients)
        super().send_back(edge, microbatch, gradients)


class Narrow(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1].sum(dim=1, keepdim=True)


def test_a_skip_passes_each_stage_once_and_so_does_its_gradient() -> None:
    layers = [Stash("wide", nn.Linear(2, 100)), nn.Linear(100, 2), nn.Linear(2, 2), Pop("wide", Narrow())]
    counting = _Counting()
    pipeline = Pipeline(
        layers, num_stages=4, num_microbatches=2, cost=[1.0] * 4, remat="always", transport=counting
    )
    pipeline.step(torch.randn(6, 2), torch.randn(6, 2), nn.functional.mse_loss)
    wide, thin = 6 * 100 * 4, 6 * 2 * 4
    # What the first layer gives and what it stashes are one tensor; recomputing sends nothing.
    ways = {(0, 1): wide, (1, 2): wide + thin, (2, 3): wide + thin}
    assert counting.sent == ways | {(target, source): size for (source, target), size in ways.items()}


def test_names_that_are_one_string_are_refused() -> None:
    layer = _linear()
    layer.stashes = "skip"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="stashes of a Linear is 'skip';"):
        Pipeline([layer], num_stages=1, num_microbatches=1)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_stash_gives_a_tensor_for_each_name(num_stages: int) -> None:
    layer = _linear()
    layer.stashes = ("skip",)  # type: ignore[assignment]
    pipeline = Pipeline([layer, Pop("skip", Add())], num_stages=num_stages, num_microbatches=1)
    with pytest.raises(Exception, match="action 0F0 failed: TypeError: a layer .* a tuple of 2: its output"):
        pipeline.step(torch.randn(2, 3), torch.randn(2, 3), nn.functional.mse_loss)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_tensor_that_is_overwritten_on_the_way_is_refused(num_stages: int) -> None:
    layers = [_linear(), Stash("a"), nn.ReLU(inplace=True), Pop("a", Add())]
    pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=1, remat="never", cost=[1.0] * 4)
    with pytest.raises(Exception, match=r"out-of-place form of the operation \(inplace=False\)"):
        pipeline.step(torch.randn(2, 3), torch.randn(2, 3), nn.functional.mse_loss)
    with pytest.raises(RuntimeError, match=r"out-of-place form of the operation \(inplace=False\)"):
        PortalSequential(*layers)(torch.randn(2, 3))


# What is profiled


def test_profiles_of_layers_with_portals_count_them_as_passed_on() -> None:
    layers = [Stash("a", nn.Linear(2, 9)), nn.Linear(9, 2), nn.Linear(2, 9), Pop("a", Add())]
    batch, target = Boundary.of(torch.randn(6, 2)), Boundary.of(torch.randn(6, 9))
    profiles, _ = Profiler().model(layers, F.mse_loss, batch, target)
    assert [len(profile.outputs.tensors) for profile in profiles] == [2, 2, 2, 1]
    # What the first layer gives and what it stashes are one tensor, which travels once.
    assert [profile.outputs.num_bytes for profile in profiles] == [216, 264, 432, 216]

"""Equal signatures only for layers that cost the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from gpipe_bench.pipeline.stage.compiled import signature


class Scaled(nn.Module):
    """A layer with an attribute that its `repr` does not show."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(3, 4),
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True)),
        lambda: nn.TransformerEncoderLayer(8, 2, dropout=0.1),
        lambda: Scaled((1, [2.0, "x"], {"a": None})),
        lambda: Scaled(functools.partial(torch.add, 1, alpha=2)),
        lambda: Scaled(torch.nn.functional.gelu),
    ],
)
def test_two_layers_of_one_configuration_are_equal(build) -> None:  # type: ignore[no-untyped-def]
    assert signature(build()) == signature(build())
    assert hash(signature(build())) == hash(signature(build()))


def test_the_device_of_parameters_does_not_matter() -> None:
    with torch.device("meta"):
        meta = nn.Linear(3, 4)
    assert signature(meta) == signature(nn.Linear(3, 4))


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, inputs, output: output.clone())
    return layer


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Linear(3, 4), nn.Linear(4, 3)),
        (nn.Linear(3, 4), nn.Linear(3, 4, bias=False)),
        (nn.Linear(3, 4), nn.Linear(3, 4, dtype=torch.float64)),
        (nn.Linear(3, 4), frozen(nn.Linear(3, 4))),
        (nn.ReLU(), nn.ReLU(inplace=True)),
        (nn.ReLU(), nn.Tanh()),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
        (nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)),
        (nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=2)),
        (nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU())),
        (nn.Sequential(nn.ReLU()), nn.ReLU()),
        (nn.Identity(), hooked(nn.Identity())),
        (Scaled(1), Scaled(2)),
        (Scaled(1), Scaled(True)),
        (Scaled((1, 2)), Scaled([1, 2])),
        (Scaled({"a": 1}), Scaled({"a": 2})),
        (Scaled(functools.partial(torch.add, 1)), Scaled(functools.partial(torch.add, 2))),
    ],
)
def test_layers_that_may_cost_something_else_differ(one: nn.Module, other: nn.Module) -> None:
    assert signature(one) != signature(other)


def test_what_cannot_be_compared_by_value_is_equal_to_itself_alone() -> None:
    tensor, odd = torch.ones(2), {1, 2}
    assert signature(Scaled(tensor)) == signature(Scaled(tensor))
    assert signature(Scaled(tensor)) != signature(Scaled(torch.ones(2)))
    assert signature(Scaled(odd)) == signature(Scaled(odd))
    assert signature(Scaled(odd)) != signature(Scaled({1, 2}))


def test_a_tensor_that_died_lends_its_identity_to_no_other() -> None:
    signatures = [signature(Scaled(torch.ones(2))) for _ in range(50)]
    assert len(set(signatures)) == 50

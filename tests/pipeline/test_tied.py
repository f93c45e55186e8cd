"""Weights with several places in the model: the same to rounding for every number of stages, and one
parameter to everybody outside of a step. Over processes see `test_distributed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import pairwise
from odd_layers import WORDS, Reentrant, tied_model, train, words
from tiny_models import seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline

cross_entropy = nn.functional.cross_entropy


class Recurrent(nn.Module):
    """Has its weights in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x.unsqueeze(1))[0].squeeze(1) + x


def shared_layer() -> nn.Sequential:
    """One layer in three places, as in ALBERT."""
    again, head = Recurrent(), nn.Linear(4, WORDS)
    return nn.Sequential(nn.Embedding(WORDS, 4), again, nn.Dropout(0.2), again, nn.Linear(4, 4), again, head)


def parametrized() -> nn.Sequential:
    """A tie of what weights are computed from."""
    model = tied_model(2)
    third = nn.Linear(4, WORDS, bias=False)
    third.weight = model[0].weight
    model.insert(2, nn.Sequential(third, nn.Linear(WORDS, 4)))
    nn.utils.parametrizations.weight_norm(model[2][0])
    nn.utils.parametrizations.weight_norm(model[3])
    model[3].parametrizations.weight.original1 = nn.Parameter(torch.randn(4, 4))
    model[1][0].weight = model[3].parametrizations.weight.original1
    return model


def run_again() -> nn.Sequential:
    """A layer that runs again in its backward."""
    model = tied_model(3)
    model[2] = Reentrant(model[2])
    return model


def sparse() -> nn.Sequential:
    model = tied_model(2)
    model[0].sparse = True
    return model


BUILDS: dict[str, Callable[[], nn.Sequential]] = {
    "two uses": lambda: tied_model(2),
    "three uses": lambda: tied_model(3),
    "a layer in three places": shared_layer,
    "parametrized": parametrized,
}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


def trained(build: Callable[[], nn.Sequential], num_stages: int, **options: Any) -> dict[str, Tensor]:
    layers = seeded(build)
    pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=4, seed=1, **options)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.3, momentum=0.9)
    train(pipeline, optimizer, range(5))
    return pipeline.state_dict()


@pytest.mark.parametrize(
    ("name", "num_stages", "schedule", "remat"),
    pairwise(tuple(BUILDS), (2, 4), ("gpipe", "1f1b", "zb-h1"), ("always", "never")),
)
def test_weights_agree_for_every_number_of_stages(
    name: str, num_stages: int, schedule: str, remat: str
) -> None:
    options = {"schedule": schedule, "remat": remat}
    assert_close(trained(BUILDS[name], num_stages, **options), trained(BUILDS[name], 1, **options))


def alone(
    num_stages: int = 2, build: Callable[[], nn.Sequential] = BUILDS["three uses"], **options: Any
) -> Pipeline:
    return Pipeline(seeded(build), num_stages=num_stages, num_microbatches=3, seed=1, **options)


def step(pipeline: Pipeline, seed: int = 0) -> Tensor:
    return pipeline.step(*words(6, seed), cross_entropy)


@pytest.mark.parametrize(
    ("odd", "plain", "schedule"),
    [
        (run_again, BUILDS["three uses"], "1f1b"), (run_again, BUILDS["three uses"], "zb-h1"),
        (sparse, BUILDS["two uses"], "gpipe"),
    ],
)  # fmt: skip
def test_gradients_that_come_in_several_parts_or_sparse_are_added(
    odd: Callable[[], nn.Sequential], plain: Callable[[], nn.Sequential], schedule: str
) -> None:
    found = []
    for build in (odd, plain):
        pipeline = alone(2, build, schedule=schedule, remat="never")
        for seed in (0, 1):
            step(pipeline, seed)
        found.append(pipeline.get_parameter("0.weight").grad.to_dense())
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_it_is_one_parameter_to_the_optimizer_and_between_steps() -> None:
    """What was in its `.grad` is kept, and added to."""
    pipeline, other = alone(), alone()
    weight = pipeline.get_parameter("0.weight")
    weight.grad = held = torch.ones_like(weight)
    step(pipeline), step(other)
    for name in ("2.weight", "3.weight"):
        path, _, last = name.rpartition(".")
        assert pipeline.get_submodule(path)._parameters[last] is weight
    assert len(list(pipeline.parameters())) == len({id(p) for p in pipeline.parameters()})
    with torch.no_grad():
        pipeline(words(6, 0)[0])
    assert pipeline.get_submodule("3").weight is weight
    assert weight.grad is held
    torch.testing.assert_close(held, other.get_parameter("0.weight").grad + 1)


def test_a_frozen_tie_gets_no_gradient_and_places_that_are_untied_get_their_own() -> None:
    pipeline = alone()
    pipeline.get_parameter("0.weight").requires_grad_(requires_grad=False)
    step(pipeline)
    assert pipeline.get_parameter("0.weight").grad is None
    pipeline = alone()
    state = {name: value.clone() for name, value in pipeline.state_dict().items()}
    pipeline.load_state_dict(state, assign=True)  # each place has a parameter of its own now
    step(pipeline)
    weights = [pipeline.get_parameter(name) for name in ("0.weight", "2.weight", "3.weight")]
    assert len({id(weight) for weight in weights}) == 3
    tied = alone()
    step(tied)
    total = sum(weight.grad for weight in reversed(weights))
    torch.testing.assert_close(tied.get_parameter("0.weight").grad, total, rtol=1e-12, atol=1e-14)

"""Weights with several places in the model: the same to rounding for every number of stages, and one
parameter to everybody outside of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd_layers import Reentrant
from tied_cases import WORDS, tied_model, train, words
from tiny_models import seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import ActionError, Pipeline

cross_entropy = nn.functional.cross_entropy
OPTIONS = [
    {"schedule": "gpipe", "remat": "always"},
    {"schedule": "1f1b", "remat": "never"},
    {"schedule": "zb-h1", "remat": "never"},
]


def shared_layer() -> nn.Sequential:
    """One layer in three places, as in ALBERT; its recurrent module has the weights in a list, too."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.GRU(4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cells(x.unsqueeze(1))[0].squeeze(1) + x

    again = Recurrent()
    head = nn.Linear(4, WORDS)
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


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["schedule"])
@pytest.mark.parametrize("build", BUILDS.values(), ids=list(BUILDS))
def test_weights_agree_for_every_number_of_stages(
    build: Callable[[], nn.Sequential], options: dict[str, str]
) -> None:
    one = trained(build, 1, **options)
    for num_stages in (2, 4):
        assert_close(trained(build, num_stages, **options), one)


def alone(
    num_stages: int = 2, build: Callable[[], nn.Sequential] = BUILDS["three uses"], **options: Any
) -> Pipeline:
    layers = seeded(build)
    return Pipeline(layers, num_stages=num_stages, num_microbatches=3, seed=1, **options)


def step(pipeline: Pipeline, seed: int = 0) -> Tensor:
    return pipeline.step(*words(6, seed), cross_entropy)


def gradients(pipeline: Pipeline) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in pipeline.named_parameters() if p.grad is not None}


def test_it_is_one_parameter_to_the_optimizer_and_between_steps() -> None:
    pipeline = alone()
    weight = pipeline.get_parameter("0.weight")
    step(pipeline)
    for name in ("2.weight", "3.weight"):
        path, _, last = name.rpartition(".")
        assert pipeline.get_submodule(path)._parameters[last] is weight
    assert len(list(pipeline.parameters())) == len({id(p) for p in pipeline.parameters()})
    with torch.no_grad():
        pipeline(words(6, 0)[0])
    assert pipeline.get_submodule("3").weight is weight


def test_what_was_in_grad_is_kept() -> None:
    pipeline, other = alone(), alone()
    held = torch.ones_like(pipeline.get_parameter("0.weight"))
    pipeline.get_parameter("0.weight").grad = held
    for each in (pipeline, other):
        step(each)
    assert pipeline.get_parameter("0.weight").grad is held
    torch.testing.assert_close(held, other.get_parameter("0.weight").grad + 1)


def test_a_failed_step_leaves_what_its_actions_gave() -> None:
    def fails_late(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise FloatingPointError("enough")
        return cross_entropy(output, target)

    calls: list[int] = []
    pipeline = alone(1, schedule="1f1b", remat="never")
    pipeline.get_parameter("0.weight").grad = torch.zeros_like(pipeline.get_parameter("0.weight"))
    with pytest.raises(ActionError, match="enough"):
        pipeline.step(*words(6, 0), fails_late)
    assert pipeline.get_submodule("3").weight is pipeline.get_parameter("0.weight")
    assert pipeline.get_parameter("0.weight").grad.abs().sum() > 0
    pipeline.zero_grad()
    pipeline.num_steps = 0
    step(pipeline)
    other = alone(2, schedule="1f1b")
    step(other)
    assert_close(gradients(pipeline), gradients(other))


def test_what_a_layer_runs_again_in_the_backward_counts() -> None:
    def build() -> nn.Sequential:
        model = tied_model(3)
        model[2] = Reentrant(model[2])
        return model

    found = []
    for schedule in ("1f1b", "zb-h1"):
        options = {"schedule": schedule, "remat": "never"}
        pipeline, other = alone(3, build, **options), alone(3, **options)
        for each in (pipeline, other):
            step(each)
            found.append(each.get_parameter("0.weight").grad)
        torch.testing.assert_close(found[-2], found[-1], rtol=1e-12, atol=1e-14)


def test_sparse_gradients_of_a_tie_are_added() -> None:
    def build(sparse: bool) -> nn.Sequential:
        model = tied_model(2)
        model[0].sparse = sparse
        return model

    found = []
    for sparse in (False, True):
        pipeline = alone(2, lambda sparse=sparse: build(sparse))
        for seed in (0, 1):
            step(pipeline, seed)
        found.append(pipeline.get_parameter("0.weight").grad.to_dense())
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


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

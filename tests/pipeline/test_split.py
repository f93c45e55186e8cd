"""Models that are no sequences, cut by their graphs: the plain model's gradients, names and modes."""

from __future__ import annotations

import copy
import itertools
import random
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from own_graphs import CASES, Case
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline, split
from gpipe_bench.pipeline.stage.trees import split as microbatches

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def plain_gradients(case: Case, num_microbatches: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model's own forward and backward, micro-batch by micro-batch."""
    model = case.model(dropout=0.0)
    batch, target = case.data()
    parts = zip(microbatches(batch, num_microbatches), microbatches(target, num_microbatches), strict=True)
    for inputs, wanted in parts:
        output = model(inputs) if isinstance(inputs, Tensor) else model(*inputs)
        (case.loss(output, wanted) / num_microbatches).backward()
    return model, {name: p.grad for name, p in model.named_parameters()}


def trained(case: Case, num_stages: int, **options: object) -> dict[str, Tensor]:
    model = case.model(dtype=torch.float32)
    batch, target = case.data(torch.float32)
    pipeline = Pipeline(split(model, case.at), num_stages=num_stages, num_microbatches=4, seed=3, **options)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        pipeline.step(batch, target, case.loss)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


@cases
def test_every_gradient_is_the_plain_models(case: Case) -> None:
    plain, wanted = plain_gradients(case, 4)
    batch, target = case.data()
    for num_stages, remat, schedule in itertools.product((1, 2, 4), ("always", "never"), ("1f1b", "zb-h1")):
        model = case.model(dropout=0.0)
        pipeline = Pipeline(
            split(model, case.at), num_stages=num_stages, num_microbatches=4, schedule=schedule, remat=remat
        )
        pipeline.step(batch, target, case.loss)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-12, atol=1e-14)
    del plain


@cases
@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "zb-h1", "remat": "never"}])
def test_weights_and_averages_are_the_same_bits_for_every_number_of_stages(case: Case, options: dict) -> None:
    one = trained(case, 1, **options)
    for num_stages in (2, 4):
        found = trained(case, num_stages, **options)
        assert [key for key in one if not torch.equal(one[key], found[key])] == [], num_stages


@cases
def test_names_are_the_models_own(case: Case) -> None:
    model = case.model()
    layers = split(model, case.at)
    pipeline = Pipeline(layers, num_stages=4, num_microbatches=2)
    names = list(model.state_dict())
    assert list(layers.state_dict()) == list(pipeline.state_dict()) == names
    assert [name for name, _ in pipeline.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert sorted(name for part in layers for name in part.state_dict()) == sorted(names)  # each in one
    assert layers.names()[1:] == case.at


@cases
def test_evaluation_is_the_plain_models_and_training_comes_back(case: Case) -> None:
    model = case.model()
    batch, target = case.data()
    pipeline = Pipeline(split(model, case.at), num_stages=4, num_microbatches=2)
    pipeline.step(batch, target, case.loss)
    pipeline.eval()
    wanted = copy.deepcopy(model).eval()
    wanted = wanted(batch) if isinstance(batch, Tensor) else wanted(*batch)
    torch.testing.assert_close(pipeline(batch), wanted, rtol=1e-12, atol=1e-14)
    pipeline.train()
    assert (pipeline(batch) - wanted).abs().max() > 1e-3  # dropout is on again


@cases
@pytest.mark.parametrize("by_example", [False, True])
def test_balanced_layers_compute_the_model(case: Case, by_example: bool) -> None:
    model = case.model().eval()
    batch, _ = case.data()
    wanted = model(batch) if isinstance(batch, Tensor) else model(*batch)
    for num_layers in (1, 3, 5):
        layers = split(model, num_layers=num_layers, example=batch if by_example else None).eval()
        assert len(layers) == num_layers
        torch.testing.assert_close(layers(batch), wanted, rtol=1e-12, atol=1e-14)
        assert set().union(*(part.state_dict() for part in layers)) == set(model.state_dict())


def test_balanced_layers_are_balanced() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    layers = split(model, num_layers=3)
    assert [sum(p.numel() for p in part.parameters()) for part in layers] == [144, 144, 144]


def test_only_what_is_used_behind_a_cut_crosses_it() -> None:
    model = CASES["u-net"].model()
    value = CASES["u-net"].data()[0]
    layers = split(model, CASES["u-net"].at)
    shapes = []
    for part in layers:
        value = part(value)
        shapes.append([tuple(t.shape[1:]) for t in (value if isinstance(value, tuple) else (value,))])
    first, second = (3, 8, 8), (6, 4, 4)
    assert shapes == [[first, (3, 4, 4)], [first, second, (6, 2, 2)], [(6, 8, 8)], [(1, 8, 8)]]


def test_sizes_are_those_of_the_micro_batch_at_hand() -> None:
    layers = split(CASES["residual"].model(), CASES["residual"].at).eval()
    for count in (1, 3):
        assert layers(torch.randn(count, 2, 8, 8, dtype=torch.float64)).shape == (count, 3)


def test_a_part_lets_go_of_what_it_no_longer_needs() -> None:
    given: list[weakref.ref[Tensor]] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(ref() is not None for ref in given))
            result = super().forward(x)
            given.append(weakref.ref(result))
            return result

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.links = nn.ModuleList(Watched(3, 3) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for link in self.links:
                x = link(x) + 1
            return x

    alive: list[int] = []
    layers = split(Chain(), ["links.1"])
    with torch.no_grad():
        layers[1](torch.randn(2, 3))
    assert alive == [0] * 4


def test_a_pipeline_that_changes_its_format_goes_on() -> None:
    case = CASES["residual"]
    pipeline = Pipeline(split(case.model(), case.at), num_stages=3, num_microbatches=2).float()
    batch, target = case.data(torch.float32)
    pipeline.step(batch, target, case.loss)
    assert {tensor.dtype for tensor in pipeline.state_dict().values()} == {torch.float32, torch.int64}


def test_the_model_is_not_changed_by_cutting_it() -> None:
    model = CASES["residual"].model().train()
    model.norm.eval()
    before = {name: (module.training, dict(vars(module))) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    split(model, CASES["residual"].at)
    split(model, num_layers=4)
    assert {name: (module.training, dict(vars(module))) for name, module in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)


class Asks(nn.Module):
    """Decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


class Counts(Asks):
    """Changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


class Remembers(Asks):
    """Changes an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return self.linear(x)


class Gambles(Asks):
    """Draws a number that no input decides."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.rand(3)


class Skips(Asks):
    """Draws outside of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if random.random() < 2 else x


OBSTINATE = {
    Asks: "control flow",
    Counts: "changes Counts's calls",
    Remembers: "changes Remembers's last",
    Gambles: "draws random numbers",
    Skips: "draws random numbers",
}


@pytest.mark.parametrize("kind", OBSTINATE)
def test_what_a_graph_cannot_hold_is_refused_with_a_remedy(kind: type[nn.Module]) -> None:
    model = kind()
    with pytest.raises(ValueError, match=f"{OBSTINATE[kind]}.*module of its own"):
        split(model, num_layers=1)
    with pytest.raises(ValueError, match=f"{OBSTINATE[kind]}.*module of its own"):
        split(nn.Sequential(nn.Linear(3, 3), model), ["1.linear"])
    assert "last" not in vars(model)
    assert all(buffer == 0 for buffer in model.buffers())


@pytest.mark.parametrize("kind", OBSTINATE)
def test_what_a_graph_cannot_hold_stays_whole_inside_of_a_model(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), kind()), nn.Linear(3, 3)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    for layers in (split(model, num_layers=4), split(model, ["1", "2"])):
        torch.manual_seed(5)
        wanted = model(x)
        torch.manual_seed(5)
        assert torch.equal(layers(x), wanted)


def test_a_container_that_would_come_back_as_another_is_refused() -> None:
    class Output(OrderedDict[str, Tensor]):
        """As the outputs of `transformers`."""

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Output:
            return Output(logits=self.second(self.first(x)))

    with pytest.raises(ValueError, match=r"it gives a Output, .* such as output\.logits"):
        split(Gives(), ["second"])


class Constant(nn.Module):
    """Makes tensors out of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(y * torch.arange(3))
        return z + y * torch.tensor([1.0, 2.0, 3.0])


class InPlace(Constant):
    """Changes a value that is older than the module before."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(y.clone())
        y.mul_(2)
        return z + y


def test_constants_belong_to_the_layers_and_not_to_the_state() -> None:
    torch.manual_seed(0)
    model, x = Constant(), torch.randn(4, 3)
    layers = split(model, num_layers=2)
    assert torch.equal(layers(x), model(x))
    assert list(layers.state_dict()) == list(model.state_dict())
    assert sum(1 for part in layers for _ in part.buffers()) >= 2


def test_a_cut_between_a_value_and_its_change_in_place_is_refused() -> None:
    with pytest.raises(ValueError, match="cut before 'second': nothing is computed"):
        split(InPlace(), ["second"])
    assert len(split(InPlace(), num_layers=1)) == 1


def test_inputs_with_a_default_are_taken_when_they_are_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.last = nn.Linear(3, 3)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            y = self.linear(x)
            return self.last(y if scale is None else y * scale)

    model, x = Scaled(), torch.randn(4, 3)
    assert torch.equal(split(model, ["last"])(x), model(x))
    both = split(model, ["last"], inputs=["scale", "x"])
    assert torch.equal(both((x + 1, x)), model(x, x + 1))


def test_a_rank_calls_a_tied_weight_what_the_model_calls_it() -> None:
    """By its first name in the model, which optimizers' states are saved by."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.used, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.used.weight = self.shared.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.used(x))

    layers, rank = split(Tied(), ["last"]), nn.Module()
    layers.give_to(rank, [layers[0]])
    assert [name for name, _ in rank.named_parameters()] == ["shared.weight", "shared.bias", "used.bias"]
    assert set(rank.state_dict()) == {"shared.weight", "shared.bias", "used.weight", "used.bias"}


def test_a_module_called_twice_is_cut_before_its_first_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.again(F.gelu(self.again(self.first(x))))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(2, 3)
    layers = split(model, ["again"])
    assert torch.equal(layers[0](x), model.first(x))
    assert torch.equal(layers(x), model(x))
    assert split(model, num_layers=3).names()[-1] == "again, call 2"


@pytest.mark.parametrize("by_pipeline", [True, False])
def test_parameters_that_loading_replaces_are_those_that_are_used(by_pipeline: bool) -> None:
    """Also one that belongs to none of the modules that the layers call."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh() * self.scale)

    torch.manual_seed(0)
    model, x, target = Scaled(), torch.randn(4, 3), torch.randn(4, 1)
    layers = split(model, ["second"])
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=2)
    state = {name: 2 * value for name, value in model.state_dict().items()}
    (pipeline if by_pipeline else layers).load_state_dict(state, assign=True)
    loss = pipeline.step(x, target, F.mse_loss)
    torch.testing.assert_close(loss, F.mse_loss(model(x), target).detach())
    assert all(parameter.grad is not None for parameter in pipeline.parameters())

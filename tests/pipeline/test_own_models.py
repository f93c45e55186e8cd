"""Models that are no sequences: any, cut by its graph, and those of transformers, taken apart. Outputs,
gradients and names are the model's own.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import pairwise
from own_models import CASES, FAMILIES, LENGTH, VOCABULARY, Family, library
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline, layers_of, split
from gpipe_bench.pipeline.model.layers_of import KNOWN
from gpipe_bench.pipeline.stage.trees import split as microbatches

graphs = pytest.mark.parametrize("name", CASES)
families = pytest.mark.parametrize("name", FAMILIES)
WAYS = pairwise((1, 2, 4), ("always", "never"), ("1f1b", "zb-h1"))


def called(model: nn.Module, batch: Tensor | tuple[Tensor, ...]) -> Tensor:
    return model(batch) if isinstance(batch, Tensor) else model(*batch)


# Cut by the graph


@graphs
def test_every_gradient_output_and_name_is_the_models(name: str) -> None:
    case = CASES[name]
    plain, (batch, target) = case.model(dropout=0.0), case.data()
    for inputs, wanted in zip(microbatches(batch, 4), microbatches(target, 4), strict=True):
        (case.loss(called(plain, inputs), wanted) / 4).backward()
    for num_stages, remat, schedule in WAYS:
        model = case.model(dropout=0.0)
        layers = split(model, case.at)
        assert layers.names()[1:] == case.at
        pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=4, schedule=schedule, remat=remat)
        pipeline.step(batch, target, case.loss)
        for key, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(key).grad, parameter.grad, rtol=1e-12, atol=1e-14)
        names = list(model.state_dict())
        assert list(layers.state_dict()) == list(pipeline.state_dict()) == names
        assert sorted(key for part in layers for key in part.state_dict()) == sorted(names)  # each in one
        wanted = called(copy.deepcopy(model).eval(), batch)
        torch.testing.assert_close(pipeline.eval()(batch), wanted, rtol=1e-12, atol=1e-14)


@graphs
@pytest.mark.parametrize("by_example", [False, True])
def test_balanced_layers_compute_the_model(name: str, by_example: bool) -> None:
    model = CASES[name].model().eval()
    batch, _ = CASES[name].data()
    for num_layers in (1, 3, 5):
        layers = split(model, num_layers=num_layers, example=batch if by_example else None).eval()
        assert len(layers) == num_layers
        torch.testing.assert_close(layers(batch), called(model, batch), rtol=1e-12, atol=1e-14)
        assert set().union(*(part.state_dict() for part in layers)) == set(model.state_dict())
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
    counts = [sum(p.numel() for p in part.parameters()) for part in split(model, num_layers=3)]
    assert counts == [144, 144, 144]


def test_only_what_is_used_behind_a_cut_crosses_it() -> None:
    model, value = CASES["u-net"].model(), CASES["u-net"].data()[0]
    shapes = []
    for part in split(model, CASES["u-net"].at):
        value = part(value)
        shapes.append([tuple(t.shape[1:]) for t in (value if isinstance(value, tuple) else (value,))])
    first, second = (3, 8, 8), (6, 4, 4)
    assert shapes == [[first, (3, 4, 4)], [first, second, (6, 2, 2)], [(6, 8, 8)], [(1, 8, 8)]]


def test_the_model_is_not_changed_by_cutting_it() -> None:
    model = CASES["residual"].model().train()
    model.norm.eval()
    before = {name: (module.training, dict(vars(module))) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    split(model, CASES["residual"].at)
    split(model, num_layers=4)
    assert {name: (module.training, dict(vars(module))) for name, module in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)


class Does(nn.Module):
    """Two linear layers, and between them what `do(self, x)` does, which may use both."""

    def __init__(self, do: Callable[[Does, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))
        self.do = do

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Any:
        return self.do(self, x if factor is None else x * factor)


def counts(model: Does, x: Tensor) -> Tensor:
    model.calls += 1
    return model.first(x)


def remembers(model: Does, x: Tensor) -> Tensor:
    model.last = x
    return model.first(x)


OBSTINATE: dict[str, tuple[Callable[[Does, Tensor], Tensor], str]] = {
    "asks": (lambda model, x: model.first(x) if x.sum() > 0 else model.second(x), "control flow"),
    "counts": (counts, "changes Does's calls"),
    "remembers": (remembers, "changes Does's last"),
    "draws": (lambda model, x: model.first(x) * torch.rand(3), "draws random numbers"),
    "draws elsewhere": (
        lambda model, x: model.first(x) if random.random() < 2 else x, "draws random numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OBSTINATE)
def test_what_a_graph_cannot_hold_is_refused_with_a_remedy_or_stays_whole(kind: str) -> None:
    do, words = OBSTINATE[kind]
    model = Does(do)
    for inner, where in ((model, {"num_layers": 1}), (nn.Sequential(nn.Tanh(), model), {"at": ["1.first"]})):
        with pytest.raises(ValueError, match=f"{words}.*module of its own"):
            split(inner, **where)
    assert "last" not in vars(model)
    assert model.calls == 0
    outer = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), Does(do)), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    for layers in (split(outer, num_layers=4), split(outer, ["1", "2"])):
        torch.manual_seed(5)
        wanted = outer(x)
        torch.manual_seed(5)
        assert torch.equal(layers(x), wanted)


class Output(OrderedDict[str, Tensor]):
    """As the outputs of `transformers`."""


def changes_an_older_value(model: Does, x: Tensor) -> Tensor:
    y = model.first(x)
    z = model.second(y.clone())
    y.mul_(2)
    return z + y


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (
            lambda model, x: Output(logits=model.second(model.first(x))),
            r"it gives a Output, .* output\.logits",
        ),
        (changes_an_older_value, "cut before 'second': nothing is computed"),
    ],
)
def test_a_cut_that_would_change_something_is_refused(do: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(Does(do), ["second"])


def makes_tensors(model: Does, x: Tensor) -> Tensor:
    """Out of nothing; and calls a module again."""
    y = model.first(x)
    z = model.second(y * torch.arange(3))
    return model.second(F.gelu(z) + y * torch.tensor([1.0, 2.0, 3.0]))


def test_constants_later_calls_and_inputs_with_a_default() -> None:
    """Constants belong to the layers and not to the state; a module is cut before its first call; inputs with
    a default are taken when they are named.
    """
    model, x = Does(makes_tensors), torch.randn(4, 3)
    layers = split(model, ["second"])
    assert torch.equal(layers(x), model(x))
    assert list(layers.state_dict()) == list(model.state_dict())
    assert sum(1 for part in layers for _ in part.buffers()) >= 2
    assert split(model, num_layers=3).names()[-1] == "second, call 2"
    both = split(model, ["second"], inputs=["factor", "x"])
    assert torch.equal(both((x + 1, x)), model(x, x + 1))


def test_a_rank_calls_a_tied_weight_what_the_model_calls_it() -> None:
    """By its first name in the model, which optimizers' states are saved by."""
    model = Does(lambda model, x: model.first(model.second(x) * model.scale))
    model.second.weight = model.first.weight
    layers, rank = split(model, num_layers=1), nn.Module()
    layers.give_to(rank, [layers[0]])
    assert [name for name, _ in rank.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert set(rank.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("by_pipeline", [True, False])
def test_parameters_that_loading_replaces_are_those_that_are_used(by_pipeline: bool) -> None:
    """Also one that belongs to none of the modules that the layers call."""
    torch.manual_seed(0)
    model = Does(lambda model, x: model.second(model.first(x).tanh() * model.scale))
    x, target = torch.randn(4, 3), torch.randn(4, 3)
    layers = split(model, ["second"])
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=2)
    state = {name: 2 * value for name, value in model.state_dict().items()}
    (pipeline if by_pipeline else layers).load_state_dict(state, assign=True)
    loss = pipeline.step(x, target, F.mse_loss)
    torch.testing.assert_close(loss, F.mse_loss(model(x), target).detach())
    assert all(parameter.grad is not None for parameter in pipeline.parameters())


# Of transformers


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def target_of(logits: Tensor) -> Tensor:
    return torch.randint(logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(2))


def by_library(family: Family, model: nn.Module) -> Any:
    return model(**dict(zip(family.inputs, family.batch(), strict=True)))


def batch_of(family: Family) -> Tensor | tuple[Tensor, ...]:
    batch = family.batch()
    return batch if len(batch) > 1 else batch[0]


@families
@pytest.mark.parametrize("tied", [False, True])
def test_outputs_gradients_and_names_are_the_librarys(name: str, tied: bool) -> None:
    family = FAMILIES[name]
    if tied and not family.tied:
        pytest.skip("has nothing to tie by default")
    model = family.model(tied=tied)
    layers = layers_of(model, family.inputs)
    logits = by_library(family, model).logits
    loss_fn(logits, target := target_of(logits)).backward()
    assert torch.equal(layers(batch_of(family)), logits)
    wanted = {key: p.grad for key, p in model.named_parameters()}
    unused = {key for key, gradient in wanted.items() if gradient is None}
    assert unused <= (set() if tied else {"cls.predictions.bias"})
    scale = max(gradient.abs().max() for gradient in wanted.values() if gradient is not None)
    for num_stages, remat, schedule in WAYS:
        model.zero_grad()
        pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=4, schedule=schedule, remat=remat)
        pipeline.step(batch_of(family), target, loss_fn)
        assert [key for key, _ in pipeline.named_parameters()] == list(wanted)
        for key, parameter in pipeline.named_parameters():
            assert (parameter.grad is None) == (key in unused), key
            if key not in unused:
                assert (parameter.grad - wanted[key]).abs().max() <= 1e-12 * scale, (key, num_stages, remat)
    names, parts = list(model.state_dict()), [set(part.state_dict()) for part in layers]
    assert list(layers.state_dict()) == list(pipeline.state_dict()) == names
    assert set().union(*parts) == set(names)
    assert sum(map(len, parts)) == len(names)


def trained(layers: nn.Sequential, batch: Any, target: Any, loss: Any, **options: Any) -> dict[str, Tensor]:
    """The weights after three steps, with dropout."""
    pipeline = Pipeline(layers, num_microbatches=4, seed=3, **options)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        pipeline.step(batch, target, loss)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in pipeline.state_dict().items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", [*CASES, "gpt2", "t5", "gpt2, tied"])
def test_weights_are_the_same_bits_for_every_number_of_stages(name: str, schedule: str) -> None:
    """Those that are tied, to rounding."""
    found, is_tied = [], "tied" in name
    for num_stages in (1, 2, 4):
        options = {"num_stages": num_stages, "schedule": schedule, "remat": "never"}
        if (case := CASES.get(name)) is not None:
            layers = split(case.model(dtype=torch.float32), case.at)
            found.append(trained(layers, *case.data(torch.float32), case.loss, **options))
        else:
            family = FAMILIES[name.removesuffix(", tied")]
            layers = layers_of(family.model(0.2, tied=is_tied).float(), family.inputs)
            target = (torch.arange(8 * LENGTH) % 5).view(8, LENGTH)
            found.append(trained(layers, batch_of(family), target, loss_fn, **options))
    for other in found[1:]:
        for key, value in found[0].items():
            close = {"rtol": 1e-4, "atol": 1e-5} if is_tied else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(other[key], value, **close)


@families
def test_a_trained_pipeline_is_saved_and_loaded_by_the_library(name: str, tmp_path: Path) -> None:
    """And a batch may be a dict, as tokenizers give it."""
    family = FAMILIES[name]
    model, batch = family.model(tied=family.tied), batch_of(family)
    pipeline = Pipeline(layers_of(model, family.inputs), num_stages=2, num_microbatches=2)
    with torch.no_grad():
        target = target_of(pipeline.eval()(batch))
    pipeline.train().step(batch, target, loss_fn)
    torch.optim.SGD(pipeline.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    again = Pipeline(layers := layers_of(loaded, family.inputs), num_stages=2, num_microbatches=2).eval()
    output = pipeline.eval()(batch)
    assert torch.equal(again(batch), output)
    named = dict(reversed(list(zip(family.inputs, family.batch(), strict=True))))
    assert torch.equal(again(named), output)
    with pytest.raises(ValueError, match=rf"the batch has .*'labels' for the inputs {family.inputs[0]}"):
        layers({**named, "labels": family.batch()[0]})


def test_rotations_that_follow_the_length_of_the_text() -> None:
    """Llama's "dynamic" scaling makes its table anew in a forward that is longer than all before, which an
    attribute says, and takes the first one again for a short one. A recomputation finds the attribute as the
    last forward left it.
    """
    torch.manual_seed(0)
    config = FAMILIES["llama"].model().config
    config.max_position_embeddings = 8
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    plain = library().LlamaForCausalLM(config).double()
    model = copy.deepcopy(plain)
    again = Pipeline(layers_of(copy.deepcopy(plain)), num_stages=2, num_microbatches=4, remat="always")
    tokens = torch.randint(VOCABULARY, (8, 16))
    with pytest.raises(RuntimeError, match=r"something .* such as an attribute, .* or use remat='never'"):
        again.step(tokens, tokens, loss_fn)
    pipeline = Pipeline(layers_of(model), num_stages=2, num_microbatches=4, remat="never")
    for length in (6, 16, 4, 20):
        tokens = torch.randint(VOCABULARY, (8, length))
        logits = plain(tokens).logits
        target = target_of(logits)
        plain.zero_grad(), pipeline.zero_grad()
        loss_fn(logits, target).backward()
        pipeline.step(tokens, target, loss_fn)
        for wanted, found in zip(plain.parameters(), model.parameters(), strict=True):
            assert (found.grad - wanted.grad).abs().max() <= 1e-12 * wanted.grad.abs().max(), length


@pytest.mark.parametrize(
    ("name", "base", "kind"),
    [("bert", "bert", "BertModel"), ("vit", "vit", "ViTModel"), ("llama", "model", "LlamaModel")],
)
def test_the_body_of_a_model_is_a_model_too(name: str, base: str, kind: str) -> None:
    family = FAMILIES[name]
    body = getattr(library(), kind)(getattr(family.model(), base).config).double()
    wanted, found = by_library(family, body), layers_of(body, family.inputs)(batch_of(family))
    assert torch.equal(found if name == "llama" else found[0], wanted.last_hidden_state)
    if name != "llama":
        assert torch.equal(found[1], wanted.pooler_output)


def test_a_classifier_on_bert_and_a_batch_without_masks() -> None:
    family = FAMILIES["bert"]
    model = library().BertForSequenceClassification(family.model().config).double().eval()
    assert torch.equal(layers_of(model, family.inputs)(batch_of(family)), by_library(family, model).logits)
    model, tokens = FAMILIES["gpt2"].model(), FAMILIES["gpt2"].batch()[0]
    assert torch.equal(layers_of(model)(tokens), model(tokens).logits)


def test_models_and_inputs_that_do_not_fit_are_refused() -> None:
    assert [kind for kind in KNOWN if not hasattr(library(), kind)] == []
    t5, llama = FAMILIES["t5"].model(), FAMILIES["llama"].model()

    class Mine(library().LlamaForCausalLM):
        def forward(self, tokens):
            return super().forward(tokens).logits * 2

    hooked = copy.deepcopy(llama)
    hooked.model.register_forward_hook(lambda *arguments: None)
    for model, inputs, words in (
        (
            t5,
            ("input_ids", "labels"),
            "once, from: input_ids, decoder_input_ids, attention_mask, decoder_att",
        ),
        (t5, ("input_ids",), "lacks 'decoder_input_ids', without which T5ForConditionalGeneration's"),
        (Mine(llama.config), (), "which is not that of LlamaForCausalLM;"),
        (hooked, (), r"model \(LlamaModel\) has hooks on its"),
        (nn.Bilinear(2, 2, VOCABULARY), (), "LlamaModel, BertForMaskedLM, "),
    ):
        with pytest.raises(ValueError, match=words):
            layers_of(model, *([inputs] if inputs else []))
    with pytest.raises(ValueError, match="inputs input_ids; give layers_of the names"):
        layers_of(FAMILIES["gpt2"].model())(FAMILIES["gpt2"].batch())

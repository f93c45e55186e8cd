"""Models of transformers as pipelines: the library's own outputs and gradients, names and files."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from own_models import FAMILIES, LENGTH, VOCABULARY, Family, library
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline, layers_of
from gpipe_bench.pipeline.model.layers_of import KNOWN

families = pytest.mark.parametrize("name", FAMILIES)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def target_of(logits: Tensor) -> Tensor:
    return torch.randint(logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(2))


def by_library(family: Family, model: nn.Module, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the library's forward gives for the batch, and a target; its gradients are left in the model."""
    logits = model(**dict(zip(family.inputs, family.batch(), strict=True))).logits
    target = target_of(logits)
    loss_fn(logits, target).backward()
    return logits.detach(), target


def batch_of(family: Family) -> Tensor | tuple[Tensor, ...]:
    batch = family.batch()
    return batch if len(batch) > 1 else batch[0]


def trained(
    name: str, num_stages: int, dtype: torch.dtype = torch.float32, *, tied: bool = False, **options: object
) -> dict[str, Tensor]:
    """The weights after five steps, with dropout."""
    family = FAMILIES[name]
    model = family.model(0.2, tied=tied).to(dtype)
    layers = layers_of(model, family.inputs)
    pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=4, seed=3, **options)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    batch = batch_of(family)
    if name == "vit":
        batch = batch.to(dtype)
    target = torch.arange(8 if name == "vit" else 8 * LENGTH) % 5
    target = target if name == "vit" else target.view(8, LENGTH)
    for _ in range(5):
        pipeline.step(batch, target, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


@families
@pytest.mark.parametrize("tied", [False, True])
def test_outputs_and_every_gradient_are_the_librarys(name: str, tied: bool) -> None:
    family = FAMILIES[name]
    if tied and not family.tied:
        pytest.skip("has nothing to tie by default")
    model = family.model(tied=tied)
    layers = layers_of(model, family.inputs)
    logits, target = by_library(family, model)
    assert torch.equal(layers(batch_of(family)), logits)
    wanted = {key: p.grad for key, p in model.named_parameters()}
    unused = {key for key, gradient in wanted.items() if gradient is None}
    assert unused <= (set() if tied else {"cls.predictions.bias"})
    scale = max(gradient.abs().max() for gradient in wanted.values() if gradient is not None)
    for num_stages, remat, schedule in itertools.product((1, 2, 4), ("always", "never"), ("1f1b", "zb-h1")):
        model.zero_grad()
        pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=4, schedule=schedule, remat=remat)
        pipeline.step(batch_of(family), target, loss_fn)
        assert [key for key, _ in pipeline.named_parameters()] == list(wanted)
        for key, parameter in pipeline.named_parameters():
            assert (parameter.grad is None) == (key in unused), key
            if key in unused:
                continue
            assert (parameter.grad - wanted[key]).abs().max() <= 1e-12 * scale, (key, num_stages, remat)


@families
@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "zb-h1", "remat": "never"}])
def test_weights_with_dropout_are_the_same_bits_for_every_number_of_stages(name: str, options: dict) -> None:
    one = trained(name, 1, **options)
    for num_stages in (2, 4):
        found = trained(name, num_stages, **options)
        different = [key for key in one if not torch.equal(found[key], one[key])]
        assert not different, num_stages


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tied])
@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "zb-h1", "remat": "never"}])
def test_a_tied_weight_agrees_too(name: str, options: dict) -> None:
    one = trained(name, 1, tied=True, **options)
    for num_stages in (2, 4):
        found = trained(name, num_stages, tied=True, **options)
        for key, value in one.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@families
@pytest.mark.parametrize("tied", [False, True])
def test_names_are_the_models_own(name: str, tied: bool) -> None:
    family = FAMILIES[name]
    model = family.model(tied=tied)
    layers = layers_of(model, family.inputs)
    pipeline = Pipeline(layers, num_stages=3, num_microbatches=2)
    names = list(model.state_dict())
    assert list(layers.state_dict()) == list(pipeline.state_dict()) == names
    parts = [set(part.state_dict()) for part in layers]
    assert set().union(*parts) == set(names)
    assert sum(map(len, parts)) == len(names)


@families
def test_a_trained_pipeline_is_saved_and_loaded_by_the_library(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = family.model(tied=family.tied)
    pipeline = Pipeline(layers_of(model, family.inputs), num_stages=2, num_microbatches=2)
    with torch.no_grad():
        target = target_of(pipeline(batch_of(family)))
    pipeline.step(batch_of(family), target, loss_fn)
    torch.optim.SGD(pipeline.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    again = Pipeline(layers_of(loaded, family.inputs), num_stages=2, num_microbatches=2).eval()
    assert torch.equal(again(batch_of(family)), pipeline.eval()(batch_of(family)))


def test_without_masks_the_batch_is_one_tensor() -> None:
    model = FAMILIES["gpt2"].model()
    tokens = FAMILIES["gpt2"].batch()[0]
    assert torch.equal(layers_of(model)(tokens), model(tokens).logits)
    body = layers_of(model.transformer)
    assert torch.equal(body(tokens), model.transformer(tokens).last_hidden_state)


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
    for length in (6, 16, 16, 4, 20, 12):
        tokens = torch.randint(VOCABULARY, (8, length))
        logits = plain(tokens).logits
        target = target_of(logits)
        plain.zero_grad()
        pipeline.zero_grad()
        loss_fn(logits, target).backward()
        pipeline.step(tokens, target, loss_fn)
        for wanted, found in zip(plain.parameters(), model.parameters(), strict=True):
            assert (found.grad - wanted.grad).abs().max() <= 1e-12 * wanted.grad.abs().max(), length


@families
def test_a_batch_may_be_a_dict_as_tokenizers_give_it(name: str) -> None:
    family = FAMILIES[name]
    layers = layers_of(family.model(), family.inputs)
    batch = dict(reversed(list(zip(family.inputs, family.batch(), strict=True))))
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=2).eval()
    assert torch.equal(pipeline(batch), pipeline(batch_of(family)))
    with pytest.raises(ValueError, match=rf"the batch has .*'labels' for the inputs {family.inputs[0]}"):
        layers({**batch, "labels": family.batch()[0]})


@pytest.mark.parametrize(("name", "base"), [("bert", "bert"), ("vit", "vit"), ("llama", "model")])
def test_the_body_of_a_model_is_a_model_too(name: str, base: str) -> None:
    family = FAMILIES[name]
    kinds = {"bert": "BertModel", "vit": "ViTModel", "llama": "LlamaModel"}
    torch.manual_seed(0)
    body = getattr(library(), kinds[name])(getattr(family.model(), base).config).double()
    wanted = body(**dict(zip(family.inputs, family.batch(), strict=True)))
    found = layers_of(body, family.inputs)(batch_of(family))
    if name == "llama":
        assert torch.equal(found, wanted.last_hidden_state)
    else:
        assert torch.equal(found[0], wanted.last_hidden_state)
        assert torch.equal(found[1], wanted.pooler_output)


def test_a_classifier_on_bert() -> None:
    torch.manual_seed(0)
    model = library().BertForSequenceClassification(FAMILIES["bert"].model().config).double().eval()
    family = FAMILIES["bert"]
    wanted = model(**dict(zip(family.inputs, family.batch(), strict=True))).logits
    assert torch.equal(layers_of(model, family.inputs)(batch_of(family)), wanted)


def test_every_class_that_is_said_to_be_known_is_there() -> None:
    assert [kind for kind in KNOWN if not hasattr(library(), kind)] == []


def test_inputs_that_do_not_fit_are_refused() -> None:
    model = FAMILIES["t5"].model()
    with pytest.raises(
        ValueError, match="some of input_ids, decoder_input_ids, attention_mask, decoder_attention_mask,"
    ):
        layers_of(model, ("input_ids", "labels"))
    with pytest.raises(
        ValueError, match="lacks 'decoder_input_ids', without which a T5ForConditionalGeneration"
    ):
        layers_of(model, ("input_ids",))
    layers = layers_of(FAMILIES["gpt2"].model())
    with pytest.raises(ValueError, match="inputs input_ids; give layers_of the names"):
        layers(FAMILIES["gpt2"].batch())


def test_a_forward_of_ones_own_is_refused() -> None:
    kind = library().LlamaForCausalLM

    class Mine(kind):
        def forward(self, tokens):
            return super().forward(tokens).logits * 2

    with pytest.raises(ValueError, match="which is not that of LlamaForCausalLM;"):
        layers_of(Mine(FAMILIES["llama"].model().config))


def test_hooks_on_what_is_taken_apart_are_refused() -> None:
    model = FAMILIES["llama"].model()
    handle = model.model.register_forward_hook(lambda *arguments: None)
    with pytest.raises(ValueError, match=r"model \(LlamaModel\) has hooks on its"):
        layers_of(model)
    handle.remove()
    assert len(layers_of(model)) == 5


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LlamaModel, BertForMaskedLM, "):
        layers_of(nn.Bilinear(2, 2, VOCABULARY))

"""Both Transformers: causality, the two forms of attention, where a layer may be cut, what options do."""

import math

import pytest
import torch
from torch import nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.models.transformer.blocks import to_cut

LM = {"num_layers": 2, "vocab_size": 11, "d_model": 8, "ffn_dim": 12, "num_heads": 2, "seq_len": 6}
SEQ2SEQ = {"num_layers": 2, "vocab_size": 11, "d_model": 8, "ffn_dim": 12, "num_heads": 2, "head_dim": 3} | {
    "seq_len": 6
}
SIZES = {"transformer-lm": LM, "transformer-seq2seq": SEQ2SEQ}
NAMES = list(SIZES)


def build(name, seed=0, **options):
    torch.manual_seed(seed)
    model = MODELS[name](**SIZES[name] | options).double()
    for parameter in model.parameters():  # shifts and gains start at 0 and 1, which hides mistakes
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def batch(name, batch_size=3, seed=0, **options):
    return example_batch(
        name, batch_size, generator=torch.Generator().manual_seed(seed), **SIZES[name] | options
    )


def changed(tokens, position):
    other = tokens.clone()
    other[:, position] = (other[:, position] + 1) % 11
    return other


@pytest.mark.parametrize("attention", ["fused", "explicit"])
@pytest.mark.parametrize("position", range(6))
def test_the_language_model_never_sees_the_future(attention, position):
    model = build("transformer-lm", attention=attention)
    tokens, _ = batch("transformer-lm")
    before, after = model(tokens), model(changed(tokens, position))
    torch.testing.assert_close(before[:, :position], after[:, :position], rtol=0, atol=0)
    assert (before[:, position:] != after[:, position:]).any(-1).all()  # but all of the past


@pytest.mark.parametrize("num_tables", [1, 2, 3])
@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_the_decoder_never_sees_the_future_but_all_of_the_source(attention, num_tables):
    model = build("transformer-seq2seq", attention=attention, num_tables=num_tables)
    (source, target), _ = batch("transformer-seq2seq")
    before = model((source, target))
    for position in range(6):
        after = model((source, changed(target, position)))
        torch.testing.assert_close(before[:, :position], after[:, :position], rtol=0, atol=0)
        assert (before[:, position:] != after[:, position:]).any(-1).all()
        assert (before != model((changed(source, position), target))).any(-1).all()


@pytest.mark.parametrize("name", NAMES)
def test_fused_and_explicit_attention_are_equal(name):
    fused, explicit = build(name, attention="fused"), build(name, attention="explicit")
    inputs, target = batch(name)
    losses = [loss_fn(name)(model(inputs), target) for model in (fused, explicit)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    pairs = zip(losses, (fused, explicit), strict=True)
    grads = [torch.autograd.grad(loss, list(model.parameters())) for loss, model in pairs]
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def test_a_language_model_by_hand():
    model = build("transformer-lm", num_layers=1, num_heads=1)
    tokens, _ = batch("transformer-lm", batch_size=1)
    state = model.state_dict()

    def linear(x, name):
        return x @ state[name + ".weight"].T + state[name + ".bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return x * state[name + ".weight"] + state[name + ".bias"]

    x = state["embedding.table.weight"][tokens[0]] * math.sqrt(8)
    for t in range(6):
        for i in range(4):
            angle = t / 10_000 ** (i / 3)
            x[t, i] += math.sin(angle)
            x[t, 4 + i] += math.cos(angle)
    a = "layer_0.attention."
    normed = norm(x, a + "norm")
    q, k, v = (linear(normed, a + name) for name in ("query", "key", "value"))
    rows = []
    for t in range(6):
        weights = torch.softmax(k[: t + 1] @ q[t] / math.sqrt(8), 0)
        rows.append(weights @ v[: t + 1])
    x = x + linear(torch.stack(rows), a + "out")
    f = "layer_0.feed_forward."
    x = x + linear(linear(norm(x, f + "norm"), f + "inner").clamp(min=0), f + "outer")
    torch.testing.assert_close(model(tokens)[0], linear(x, "softmax.linear"), rtol=1e-6, atol=1e-6)


def test_source_and_target_share_their_table_only_below_three():
    (_, target), _ = batch("transformer-seq2seq")
    for num_tables in (1, 2):
        source_layer = build("transformer-seq2seq", num_tables=num_tables).source
        x, y = source_layer((target, target))
        torch.testing.assert_close(x, y)
    tied = build("transformer-seq2seq", num_tables=1)
    assert tied.softmax.linear.weight is tied.source.table.weight


@pytest.mark.parametrize("name", NAMES)
def test_layers_cut_in_pieces_are_the_same_model(name):
    whole, pieces = build(name), build(name, seed=1, cut="sublayer")
    assert len(pieces) == len(whole) + {"transformer-lm": 2, "transformer-seq2seq": 6}[name]
    pieces.load_state_dict(to_cut(whole.state_dict(), "sublayer"))
    inputs, _ = batch(name)
    torch.testing.assert_close(pieces(inputs), whole(inputs), rtol=0, atol=0)
    assert list(to_cut(pieces.state_dict(), "layer")) == list(whole.state_dict())
    same_seed = build(name, cut="sublayer")
    for left, right in zip(whole.parameters(), same_seed.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", NAMES)
def test_deep_initialisation_divides_the_feed_forward_by_the_number_of_layers(name):
    plain, deep = (build(name, num_layers=3, deep_init=option).state_dict() for option in (False, True))
    scaled = 0
    for key, tensor in plain.items():
        factor = 3 if "feed_forward" in key and tensor.dim() == 2 else 1
        scaled += factor == 3
        torch.testing.assert_close(deep[key] * factor, tensor, rtol=1e-6, atol=0)
    assert scaled == {"transformer-lm": 6, "transformer-seq2seq": 12}[name]


@pytest.mark.parametrize("attention", ["fused", "explicit"])
@pytest.mark.parametrize("name", NAMES)
def test_dropout_works_in_training_only(name, attention):
    model, plain = build(name, dropout=0.5, attention=attention), build(name, attention=attention)
    inputs, _ = batch(name)
    assert not torch.equal(model(inputs), model(inputs))
    torch.testing.assert_close(model.eval()(inputs), plain(inputs))
    torch.manual_seed(1)
    first = model.train()(inputs)
    torch.manual_seed(1)
    assert torch.equal(model(inputs), first)


@pytest.mark.parametrize("name", NAMES)
def test_shorter_sequences_are_accepted_and_longer_ones_refused(name):
    model = build(name)
    inputs, _ = batch(name, seq_len=4)
    assert model(inputs).shape == (3, 4, 11)
    inputs, _ = batch(name, seq_len=7)
    with pytest.raises(ValueError, match="sequences of 7 tokens: the model"):
        model(inputs)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_clipped(name):
    inputs, _ = batch(name)
    plain, clipped = build(name)(inputs), build(name, logit_clip=0.5)(inputs)
    assert plain.abs().max() > 0.5
    torch.testing.assert_close(clipped, plain.clamp(-0.5, 0.5))

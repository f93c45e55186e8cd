"""Both Transformers: causality, the two forms of attention, where a layer may be cut, what options do."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.models.transformer.blocks import Attention, FeedForward, sinusoids, to_cut

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


@pytest.mark.parametrize(("name", "softmaxes"), [("transformer-lm", 2), ("transformer-seq2seq", 6)])
def test_explicit_attention_keeps_its_softmaxes_and_fused_attention_none(name, softmaxes):
    inputs, _ = batch(name)
    for attention, expected in (("fused", 0), ("explicit", softmaxes)):
        kept = {}

        def pack(tensor, kept=kept):
            if tensor.shape[-2:] == (6, 6) and tensor.is_floating_point():
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            build(name, attention=attention)(inputs)
        assert len(kept) == expected


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


def test_the_cross_attention_by_hand():
    torch.manual_seed(0)
    block = Attention(4, 6, 2, source="memory", attention="fused", dropout=0.0).double()
    x, memory = torch.randn(2, 3, 4).double(), torch.randn(2, 5, 4).double()
    out, passed_on = block((x, memory))
    assert passed_on is memory
    normed = F.layer_norm(x, (4,))
    heads = []
    for h in (slice(0, 3), slice(3, 6)):
        q, k, v = block.query(normed)[..., h], block.key(memory)[..., h], block.value(memory)[..., h]
        heads.append(torch.softmax(q @ k.transpose(1, 2) / math.sqrt(3), -1) @ v)
    torch.testing.assert_close(out, x + block.out(torch.cat(heads, -1)))


def test_the_encoder_looks_in_both_directions():
    block = build("transformer-seq2seq").encoder_0
    x = torch.randn(1, 4, 8).double()
    other = x.clone()
    other[:, 3] += torch.randn(8).double()
    rest = torch.zeros(1)
    assert (block((x, rest))[0] != block((other, rest))[0]).any(-1).all()


@pytest.mark.parametrize("num_tables", [1, 2, 3])
def test_what_travels_between_the_layers_of_the_encoder_decoder(num_tables):
    model = build("transformer-seq2seq", num_tables=num_tables)
    (source, target), _ = batch("transformer-seq2seq")
    source = source[:, :4]
    state = (source, target)
    for name, layer in model.named_children():
        state = layer(state)
        if name == "softmax":
            assert state.shape == (3, 6, 11)
        elif name == "source" or name.startswith("encoder"):
            x, waiting = state
            assert x.shape == (3, 4, 8)
            if num_tables == 3:
                assert waiting is target
            else:
                assert waiting.shape == (3, 6, 8)
        else:
            y, memory = state
            assert (y.shape, memory.shape) == ((3, 6, 8), (3, 4, 8))


def test_the_tables_are_as_many_as_stated():
    for num_tables in (1, 2, 3):
        model = build("transformer-seq2seq", num_tables=num_tables)
        assert len({id(p) for p in model.parameters() if p.shape == (11, 8)}) == num_tables
    owners = [sum(any(p is q for q in layer.parameters()) for layer in model) for p in model.parameters()]
    assert set(owners) == {1}


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


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_clipped(name):
    inputs, _ = batch(name)
    plain, clipped = build(name)(inputs), build(name, logit_clip=0.5)(inputs)
    assert plain.abs().max() > 0.5
    torch.testing.assert_close(clipped, plain.clamp(-0.5, 0.5))


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


@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_dropout_hits_attention_weights_hidden_units_results_and_embeddings(attention):
    torch.manual_seed(0)
    x = torch.randn(1, 200, 8)
    block = Attention(8, 8, 1, source="full", attention=attention, dropout=0.5)
    nn.init.zeros_(block.query.weight)
    for linear in (block.value, block.out):
        nn.init.zeros_(linear.weight)
        nn.init.ones_(linear.bias)
    nn.init.eye_(block.out.weight)
    nn.init.zeros_(block.out.bias)
    # All values are 1 and all weights 1/200: without dropping weights each result would be exactly 2 or
    # 0.
    out = block(x) - x
    assert 0.4 < (out == 0).float().mean() < 0.6
    kept = out[out != 0]
    assert kept.mean().item() == pytest.approx(2.0, abs=0.1)
    assert kept.std() > 0.05
    ffn = FeedForward(8, 1000, 0.5)
    nn.init.zeros_(ffn.inner.weight)
    nn.init.ones_(ffn.inner.bias)
    nn.init.constant_(ffn.outer.weight, 0.001)
    out = ffn(x) - x
    assert 0.4 < (out == 0).float().mean() < 0.6
    assert out[out != 0].mean().item() == pytest.approx(2.0, abs=0.1)
    assert out[out != 0].std() > 0.02
    embedding = build("transformer-lm", dropout=0.5, d_model=100, seq_len=500).embedding
    zeros = (embedding(torch.zeros(1, 500, dtype=torch.int64)) == 0).double().mean()
    assert 0.4 < zeros < 0.6


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_learns(name):
    model = build(name)
    inputs, target = batch(name)
    loss_fn(name)(model(inputs), target).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        # A shift of all keys moves all scores of a softmax alike.
        assert parameter.grad.abs().max() > 1e-9 or key.endswith("key.bias"), key


@pytest.mark.parametrize("name", NAMES)
def test_shorter_sequences_are_accepted_and_longer_ones_refused(name):
    model = build(name)
    inputs, _ = batch(name, seq_len=4)
    assert model(inputs).shape == (3, 4, 11)
    inputs, _ = batch(name, seq_len=7)
    with pytest.raises(ValueError, match="sequences of 7 tokens: the model"):
        model(inputs)


def test_positions_are_sines_then_cosines():
    p = sinusoids(50, 6, torch.zeros(1, dtype=torch.float64))
    assert p.shape == (50, 6)
    torch.testing.assert_close(p[0], torch.tensor([0.0, 0, 0, 1, 1, 1]).double())
    expected = [
        math.sin(7),
        math.sin(7 / 100),
        math.sin(7 / 1e4),
        math.cos(7),
        math.cos(7 / 100),
        math.cos(7 / 1e4),
    ]
    torch.testing.assert_close(p[7], torch.tensor(expected).double(), rtol=1e-5, atol=1e-6)
    assert sinusoids(3, 2, torch.zeros(1)).dtype == torch.float32


def test_initial_weights():
    torch.manual_seed(0)
    model = MODELS["transformer-lm"](num_layers=1, vocab_size=500, d_model=64, ffn_dim=128, num_heads=4)
    assert model.embedding.table.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    inner = model.layer_0.feed_forward.inner
    assert inner.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (64 + 128)), rel=0.01)
    assert not any(m.bias.any() for m in model.modules() if isinstance(m, nn.Linear))


def test_the_defaults_are_the_papers():
    with torch.device("meta"):
        lm, seq2seq = MODELS["transformer-lm"](), MODELS["transformer-seq2seq"]()
    assert (len(lm), lm.layer_0.attention.num_heads, lm.embedding.seq_len) == (5, 32, 1024)
    assert (len(seq2seq), seq2seq.decoder_0.cross.num_heads) == (15, 16)
    assert seq2seq.decoder_0.cross.query.out_features == 1024


def test_identical_layers_are_built_identically():
    with torch.device("meta"):
        model = MODELS["transformer-lm"](num_layers=3, deep_init=True)
    assert len({repr(model.get_submodule(f"layer_{i}")) for i in range(3)}) == 1

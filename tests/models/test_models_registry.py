"""The registry: names, options, example batches and losses, and what it says about mistakes."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpipe_bench.models import MODELS, example_batch, layer_parameters, loss_fn
from gpipe_bench.models.tasks import class_loss, token_loss

IMAGES = {"num_classes": 5, "image_size": 16}
AMOEBA = {"num_layers": 2, "num_filters": 8, "aux_head": False} | IMAGES
TOKENS = {"num_layers": 1, "vocab_size": 11, "d_model": 8, "ffn_dim": 12, "num_heads": 2, "seq_len": 6}
SMALL = {
    "amoebanet-a": AMOEBA,
    "amoebanet-b": AMOEBA,
    "amoebanet-c": AMOEBA,
    "amoebanet-d": AMOEBA,
    "transformer-lm": TOKENS,
    "transformer-seq2seq": TOKENS,
    "resnet101": {"num_blocks": (1, 1, 1, 1), "num_filters": 4} | IMAGES,
    "gpt2": {"num_layers": 1, "vocab_size": 11, "d_model": 8, "num_heads": 2, "seq_len": 6},
    "llama": TOKENS | {"num_kv_heads": 1},
    "unet": {"num_convs": 2, "num_filters": 4, "depth": 2, "image_size": 9},
    "attnres": TOKENS | {"num_layers": 3, "num_kv_heads": 1},
}


def test_all_models_are_registered():
    assert list(SMALL) == list(MODELS)


@pytest.mark.parametrize("name", SMALL)
def test_every_model_takes_its_example_batch_and_loss(name):
    torch.manual_seed(0)
    model = MODELS[name](**SMALL[name])
    assert isinstance(model, nn.Sequential)
    inputs, target = example_batch(name, 3, **SMALL[name])
    loss = loss_fn(name, **SMALL[name])(model(inputs), target)
    assert loss.shape == ()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert len(layer_parameters(model)) == len(model)


@pytest.mark.parametrize("name", SMALL)
def test_a_training_step_runs_on_fake_tensors_and_in_bfloat16(name):
    def step():
        model = MODELS[name](**SMALL[name])
        inputs, target = example_batch(name, 2, **SMALL[name])
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(name, **SMALL[name])(model(inputs), target)
        loss.backward()
        return loss, [p.grad for p in model.parameters()]

    with FakeTensorMode():
        fake = step()
    torch.manual_seed(0)
    real = step()
    assert fake[0].dtype == real[0].dtype == torch.float32
    assert [g.shape for g in fake[1]] == [g.shape for g in real[1]]
    assert real[0].isfinite()


def test_batches_by_the_models_own_sizes():
    images, classes = example_batch("amoebanet-d", 2, image_size=9)
    assert (images.shape, images.dtype, classes.shape, classes.dtype) == (
        (2, 3, 9, 9), torch.float32, (2,), torch.int64,
    )  # fmt: skip
    tokens, target = example_batch("transformer-lm", 2, vocab_size=7, seq_len=9)
    assert (tokens.shape, target.shape) == ((2, 9), (2, 9))
    assert torch.equal(tokens[:, 1:], target[:, :-1])
    assert tokens.untyped_storage().nbytes() == tokens.numel() * 8
    (source, given), wanted = example_batch("transformer-seq2seq", 2, vocab_size=7, seq_len=9)
    assert torch.equal(given[:, 1:], wanted[:, :-1])
    assert not torch.equal(source, given)


@pytest.mark.parametrize(
    ("name", "options", "classes"),
    [
        ("amoebanet-d", {"num_classes": 3}, 3),
        ("amoebanet-d", {"preset": "torchgpipe"}, 1000),
        ("amoebanet-d", {}, 1001),
        ("resnet101", {}, 1000),
        ("resnet101", {"num_classes": 4}, 4),
    ],
)
def test_classes_cover_what_the_model_knows(name, options, classes):
    drawn = example_batch(name, 20_000, image_size=1, generator=torch.Generator().manual_seed(0), **options)[
        1
    ]
    assert (drawn.min().item(), drawn.max().item()) == (0, classes - 1)


def test_the_loss_of_amoebanet_by_hand():
    logits, aux = [[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]], [[0.2, 0.1, 0.0], [1.0, 1.0, -1.0]]
    classes = [2, 0]

    def smoothed(rows, smoothing):
        total = 0.0
        for row, label in zip(rows, classes, strict=True):
            log_sum = math.log(sum(map(math.exp, row)))
            for index, value in enumerate(row):
                share = smoothing / 3 + (1 - smoothing if index == label else 0)
                total += share * (log_sum - value)
        return total / 2

    target = torch.tensor(classes)
    both = (torch.tensor(logits), torch.tensor(aux))
    expected = smoothed(logits, 0.1) + 0.4 * smoothed(aux, 0.1)
    assert loss_fn("amoebanet-d")(both, target).item() == pytest.approx(expected)
    assert loss_fn("amoebanet-d", preset="tf")(both[0], target).item() == pytest.approx(smoothed(logits, 0.1))
    unsmoothed = pytest.approx(smoothed(logits, 0.0))
    assert loss_fn("amoebanet-d", preset="torchgpipe")(both[0], target).item() == unsmoothed
    assert loss_fn("resnet101")(both[0], target).item() == unsmoothed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_half_precision_logits_are_computed_in_float32(dtype):
    logits, target = torch.randn(2, 5).to(dtype), torch.tensor([1, 2])
    loss = class_loss((logits, logits), target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, class_loss((logits.float(), logits.float()), target))
    assert token_loss(logits[None], target[None]).dtype == torch.float32
    assert class_loss(logits.double(), target).dtype == torch.float64


def test_the_largest_model_is_built_on_the_meta_device_without_computing():
    """Initialising even a part of it would take minutes."""
    computed = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            result = operation(*arguments, **(options or {}))
            tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            computed.extend(str(operation) for each in tensors if not each.is_meta and each.numel() > 10_000)
            return result

    with torch.device("meta"), Watch():
        model = MODELS["transformer-lm"](num_layers=1663)
    assert len(model) == 1665
    assert computed == []
    assert all(tensor.is_meta for tensor in model.parameters())

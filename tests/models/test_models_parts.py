"""Layers of models: drop path, batch normalization of a single value, the stride control."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_bench.models import MODELS, set_drop_path
from gpipe_bench.models.amoebanet.modules import BatchNorm2d, DropPath, SameConv2d, SamePool2d
from gpipe_bench.models.amoebanet.network import MOVED_STRIDES
from gpipe_bench.models.amoebanet.ops import FactorizedReduction, Style, operation
from gpipe_bench.pipeline import Pipeline


def test_examples_are_dropped_whole_and_the_kept_ones_scaled():
    torch.manual_seed(0)
    x = torch.randint(1, 5, (4000, 2, 3, 3)).float()
    ratio = DropPath(0.8)(x) / x
    per_example = ratio.flatten(1)
    assert (per_example == per_example[:, :1]).all()
    values = per_example[:, 0].unique()
    torch.testing.assert_close(values, torch.tensor([0.0, 1.25]))
    assert per_example.mean().item() == pytest.approx(1.0, abs=0.02)
    assert (per_example[:, 0] > 0).float().mean().item() == pytest.approx(0.8, abs=0.02)


def test_nothing_happens_or_is_drawn_at_1_and_in_evaluation():
    x = torch.randn(5, 2)
    state = torch.random.get_rng_state()
    assert DropPath(1.0)(x) is x
    assert DropPath(0.1).eval()(x) is x
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_model_starts_with_its_option_and_can_be_changed():
    torch.manual_seed(0)
    options = {"num_layers": 2, "num_filters": 8, "num_classes": 3, "image_size": 16, "aux_head": False}
    model = MODELS["amoebanet-d"](drop_path_keep=0.6, dropout=0.0, **options)
    paths = [m for m in model.modules() if isinstance(m, DropPath)]
    assert {path.keep for path in paths} == {0.6}
    assert len(paths) == 6 * 8  # ten operations in each of six cells, two of them `none`
    images = torch.randn(2, 3, 16, 16)
    assert not torch.equal(model(images), model(images))
    assert set_drop_path(model, 1.0) == len(paths)
    assert torch.equal(model(images), model(images))
    assert set_drop_path(nn.Linear(2, 2), 0.5) == 0


# Batch normalization of a single value, where torch refuses to train and the reference does not


def pair():
    torch.manual_seed(0)
    ours, stock = BatchNorm2d(3), nn.BatchNorm2d(3)
    for parameter in ours.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    stock.load_state_dict(ours.state_dict())
    return ours, stock


def test_a_single_value_gives_the_shift_and_no_gradient_for_the_input():
    ours, stock = pair()
    x = torch.tensor([2.0, -3.0, 5.0]).reshape(1, 3, 1, 1).requires_grad_()
    with pytest.raises(ValueError, match="more than 1 value"):
        stock(x)
    out = ours(x)
    assert torch.equal(out.flatten(), ours.bias)
    (out * torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)).sum().backward()
    assert x.grad.flatten().tolist() == [0, 0, 0]
    assert ours.weight.grad.tolist() == [0, 0, 0]
    assert ours.bias.grad.tolist() == [1, 2, 3]
    torch.testing.assert_close(ours.running_mean, torch.tensor([0.2, -0.3, 0.5]))
    torch.testing.assert_close(ours.running_var, torch.full((3,), 0.9))
    assert ours.num_batches_tracked == 1


@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (1, 3, 2, 1), (4, 3, 5, 5)])
def test_otherwise_it_is_the_stock_module(shape):
    ours, stock = pair()
    x = torch.randn(shape)
    assert torch.equal(ours(x), stock(x))
    assert all(map(torch.equal, ours.state_dict().values(), stock.state_dict().values()))
    assert torch.equal(ours.eval()(x), stock.eval()(x))


def test_a_single_value_leaves_the_graph_of_a_batch_before_it_alone():
    """The graph of a batch has saved the averages, which its backward does not read."""
    ours, stock = pair()
    more = torch.randn(2, 3, 1, 1)
    total = ours(more).square().sum()
    (total + ours(torch.ones(1, 3, 1, 1)).sum()).backward()
    (stock(more).square().sum() + (stock.weight * 0 + stock.bias).sum()).backward()
    assert torch.equal(ours.weight.grad, stock.weight.grad)
    assert torch.equal(ours.bias.grad, stock.bias.grad)


@pytest.mark.parametrize("remat", ["never", "always", "except_last"])
def test_a_last_microbatch_of_one_example_trains_as_the_plain_model_does(remat):
    """Three examples in two micro-batches, of which the second is one: all graphs of the step are alive."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 2), nn.AdaptiveAvgPool2d(1), BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2)]
    model = nn.Sequential(*layers).double()
    plain = copy.deepcopy(model)
    images, target = torch.randn(3, 2, 4, 4).double(), torch.randn(3, 2).double()
    pipeline = Pipeline(model, num_stages=2, num_microbatches=2, remat=remat)
    loss = pipeline.step(images, target, nn.functional.mse_loss)
    parts = zip(images.split((2, 1)), target.split((2, 1)), (2 / 3, 1 / 3), strict=True)
    wanted = sum(share * nn.functional.mse_loss(plain(x), y) for x, y, share in parts)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# AmoebaNet of the stride control


def sides(moved_stride: str | None, image_size: int = 65, **options: object) -> dict[str, int]:
    """Side of the map behind every layer but the classifier, from a real forward."""
    given = {"num_layers": 6, "num_filters": 8, "stem_filters": 4, "aux_head": False, "num_classes": 2}
    torch.manual_seed(0)
    model = MODELS["amoebanet-d"](**given | options, image_size=image_size, moved_stride=moved_stride)
    value = torch.randn(2, 3, image_size, image_size)
    found = {}
    for name, layer in model.named_children():
        value = layer(value)
        first = value[0] if isinstance(value, tuple) else value
        if first.dim() == 4:
            found[name] = first.size(2)
    assert value.shape == (2, 2)
    return found


@pytest.mark.parametrize("image_size", [65, 66])
def test_maps_have_twice_the_side_up_to_the_layer_that_the_stride_moves_to(image_size: int) -> None:
    original = sides(None, image_size)
    for moved, last in zip(MOVED_STRIDES, ("reduction_1", "normal_5"), strict=True):
        found = sides(moved, image_size)
        assert list(found) == list(original)
        at = list(found).index(last)
        for place, (name, side) in enumerate(found.items()):
            if place >= at:
                assert side == original[name], name
            else:
                assert abs(side - 2 * original[name]) <= 2, name


# SAME padding, pools and the factorized reduction against torch's own on a map that is padded beforehand

SIZES = st.integers(1, 12)


def padded(x, kernel, stride, value):
    """A map with TensorFlow's SAME padding: what ceil(size / stride) outputs need, the smaller half first."""
    sides = []
    for size, kernel_, stride_ in zip(x.shape[2:], kernel, stride, strict=True):
        more = max((-(-size // stride_) - 1) * stride_ + kernel_ - size, 0)
        sides = [more // 2, more - more // 2, *sides]
    return nn.functional.pad(torch.as_tensor(x), sides, value=value)


def pooled(x, kind, kernel, stride):
    """Pixels outside the map take no part, in a mean neither."""
    if kind == "max":
        return nn.functional.max_pool2d(
            padded(x, [kernel] * 2, [stride] * 2, -np.inf), kernel, stride
        ).numpy()
    total, inside = (
        nn.functional.avg_pool2d(padded(each, [kernel] * 2, [stride] * 2, 0.0), kernel, stride)
        for each in (x, np.ones_like(x))
    )
    return (total / inside).numpy()


def convolved(x, weight, stride):
    return nn.functional.conv2d(
        padded(x, weight.shape[2:], stride, 0.0), torch.as_tensor(weight), stride=stride
    ).numpy()


def image(h, w, channels=2, seed=0):
    # Below zero everywhere: a maximum that saw zero padding would show.
    return torch.from_numpy(np.random.default_rng(seed).uniform(-2.0, -1.0, (2, channels, h, w)))


@settings(max_examples=60)
@given(SIZES, SIZES, st.sampled_from(["max", "avg"]), st.sampled_from([(3, 1), (3, 2), (2, 2)]))
def test_pools_equal_torchs_on_a_padded_map(h, w, kind, window):
    kernel, stride = window
    x = image(h, w)
    ours = SamePool2d(kind, kernel, stride)(x).numpy()
    np.testing.assert_allclose(ours, pooled(x.numpy(), kind, kernel, stride), rtol=1e-12)


@settings(max_examples=60)
@given(
    SIZES, SIZES, st.sampled_from([(1, 1), (3, 3), (1, 7), (7, 1), (5, 5), (7, 7)]), st.sampled_from([1, 2])
)
def test_convolutions_equal_torchs_on_a_padded_map(h, w, kernel, step):
    stride = (1 if kernel == (7, 1) else step, 1 if kernel == (7, 1) else step)
    x = image(h, w)
    layer = SameConv2d(2, 3, kernel, stride, bias=False).double()
    ours = layer(x).detach().numpy()
    np.testing.assert_allclose(ours, convolved(x.numpy(), layer.weight.detach().numpy(), stride), atol=1e-12)


def unchanged(module):
    """Makes every normalization in `module` the identity, so that outputs can be computed by hand."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eps = 1e-30  # lost beside a variance of one; torch 2.11 refuses zero
    return module.double().eval()


@settings(max_examples=30)
@given(st.integers(2, 9), st.integers(2, 9), st.sampled_from([2, 4]))
def test_the_factorized_reduction_takes_even_and_odd_pixels(h, w, stride):
    layer = unchanged(FactorizedReduction(2, 4, "same", stride))
    x = image(h, w).numpy()
    even, odd = (conv.weight.detach().numpy()[:, :, 0, 0] for conv in (layer.even, layer.odd))
    expected = np.zeros((2, 4, -(-h // stride), -(-w // stride)))
    for i in range(expected.shape[2]):
        for j in range(expected.shape[3]):
            expected[:, :2, i, j] = x[:, :, stride * i, stride * j] @ even.T
            if stride * i + 1 < h and stride * j + 1 < w:  # else in the row or column of zeros
                expected[:, 2:, i, j] = x[:, :, stride * i + 1, stride * j + 1] @ odd.T
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach().numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "averaging", "kind"),
    [("max3", False, "max"), ("max3", True, "avg"), ("max2", True, "max"), ("avg3", False, "avg")],
)
@pytest.mark.parametrize("size", [(6, 6), (7, 5)])
def test_pooling_operations_are_what_they_are_called(name, averaging, kind, size):
    layer = operation(name, 4, 4, 2, Style("same", averaging_max_pool=averaging))
    x = image(*size, channels=4)
    np.testing.assert_allclose(layer(x).numpy(), pooled(x.numpy(), kind, int(name[3]), 2), rtol=1e-12)


def relu(x):
    return np.maximum(x, 0)


def weights(layer):
    return [m.weight.detach().numpy() for m in layer.modules() if isinstance(m, nn.Conv2d)]


@pytest.mark.parametrize("size", [(6, 6), (7, 5)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", ["1x1", "3x3", "1x7_7x1", "sep3x3_2", "none"])
def test_convolving_operations_by_hand(name, stride, size):
    layer = unchanged(operation(name, 3, 8, stride, Style("same")))
    x = -image(*size, channels=3).numpy() - 1.5  # both signs, so that each ReLU matters
    kernels = weights(layer)
    strides = {
        "1x1": [(stride, stride)],
        "none": [(stride, stride)],
        "3x3": [(1, 1), (stride, stride), (1, 1)],
        "1x7_7x1": [(1, 1), (1, stride), (stride, 1), (1, 1)],
        "sep3x3_2": [(stride, stride), (1, 1), (1, 1), (1, 1)],
    }[name]
    shapes = {
        "1x1": [(8, 3, 1, 1)],
        "none": [(8, 3, 1, 1)],
        "3x3": [(2, 3, 1, 1), (2, 2, 3, 3), (8, 2, 1, 1)],
        "1x7_7x1": [(2, 3, 1, 1), (2, 2, 1, 7), (2, 2, 7, 1), (8, 2, 1, 1)],
        "sep3x3_2": [(3, 1, 3, 3), (8, 3, 1, 1), (8, 1, 3, 3), (8, 8, 1, 1)],
    }[name]
    assert [kernel.shape for kernel in kernels] == shapes
    expected = x
    for index, (kernel, stride_) in enumerate(zip(kernels, strides, strict=True)):
        if name != "sep3x3_2":
            expected = convolved(relu(expected), kernel, stride_)
        elif index % 2 == 0:
            channels = [
                convolved(relu(expected)[:, c : c + 1], kernel[c : c + 1], stride_)
                for c in range(expected.shape[1])
            ]
            expected = np.concatenate(channels, axis=1)
        else:
            expected = convolved(expected, kernel, stride_)
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach().numpy(), expected, atol=1e-12)


def test_an_operation_changes_channels_where_it_has_to():
    assert isinstance(operation("none", 8, 8, 1, Style()), nn.Identity)
    assert [w.shape for w in weights(operation("none", 8, 8, 2, Style()))] == [(8, 8, 1, 1)]
    assert [w.shape for w in weights(operation("max2", 32, 8, 2, Style()))] == [(8, 32, 1, 1)]
    assert not weights(operation("max2", 8, 8, 2, Style()))
    pool = unchanged(operation("avg3", 3, 5, 2, Style()))
    x = image(4, 4, channels=3)
    expected = convolved(pooled(x.numpy(), "avg", 3, 2), weights(pool)[0], (1, 1))  # no ReLU before it
    np.testing.assert_allclose(pool(x).detach().numpy(), expected, atol=1e-12)

"""SAME padding, pools and the factorized reduction against plain loops over pixels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_bench.models.amoebanet.modules import SameConv2d, SamePool2d
from gpipe_bench.models.amoebanet.ops import FactorizedReduction, Style, operation

SIZES = st.integers(1, 12)


def windows(shape, kernel, stride):
    """(row, column, [(pixel, tap), ...]) of each SAME window; pixels outside the map are left out.

    Straight from TensorFlow's definition: ceil(size / stride) outputs, the padding they need split with
    the smaller half first.
    """
    outputs = [-(-size // stride_) for size, stride_ in zip(shape, stride, strict=True)]
    first = [
        max((out - 1) * stride_ + kernel_ - size, 0) // 2
        for out, stride_, kernel_, size in zip(outputs, stride, kernel, shape, strict=True)
    ]
    for i in range(outputs[0]):
        for j in range(outputs[1]):
            inside = []
            for di in range(kernel[0]):
                for dj in range(kernel[1]):
                    row, column = i * stride[0] + di - first[0], j * stride[1] + dj - first[1]
                    if 0 <= row < shape[0] and 0 <= column < shape[1]:
                        inside.append(((row, column), (di, dj)))
            yield i, j, inside


def pooled(x, kind, kernel, stride):
    n, c, h, w = x.shape
    out = np.zeros((n, c, -(-h // stride), -(-w // stride)))
    for i, j, inside in windows((h, w), (kernel, kernel), (stride, stride)):
        values = np.stack([x[:, :, row, column] for (row, column), _ in inside])
        out[:, :, i, j] = values.max(0) if kind == "max" else values.sum(0) / len(inside)
    return out


def convolved(x, weight, stride):
    n, _, h, w = x.shape
    out = np.zeros((n, weight.shape[0], -(-h // stride[0]), -(-w // stride[1])))
    for i, j, inside in windows((h, w), weight.shape[2:], stride):
        for (row, column), (di, dj) in inside:
            out[:, :, i, j] += x[:, :, row, column] @ weight[:, :, di, dj].T
    return out


def image(h, w, channels=2, seed=0):
    # Below zero everywhere: a maximum that saw zero padding would show.
    return torch.from_numpy(np.random.default_rng(seed).uniform(-2.0, -1.0, (2, channels, h, w)))


@settings(max_examples=60)
@given(SIZES, SIZES, st.sampled_from(["max", "avg"]), st.sampled_from([(3, 1), (3, 2), (2, 2)]))
def test_pools_equal_the_loops(h, w, kind, window):
    kernel, stride = window
    x = image(h, w)
    ours = SamePool2d(kind, kernel, stride)(x).numpy()
    np.testing.assert_allclose(ours, pooled(x.numpy(), kind, kernel, stride), rtol=1e-12)


@settings(max_examples=60)
@given(
    SIZES, SIZES, st.sampled_from([(1, 1), (3, 3), (1, 7), (7, 1), (5, 5), (7, 7)]), st.sampled_from([1, 2])
)
def test_convolutions_equal_the_loops(h, w, kernel, step):
    stride = (1 if kernel == (7, 1) else step, 1 if kernel == (7, 1) else step)
    x = image(h, w)
    layer = SameConv2d(2, 3, kernel, stride, bias=False).double()
    ours = layer(x).detach().numpy()
    np.testing.assert_allclose(ours, convolved(x.numpy(), layer.weight.detach().numpy(), stride), atol=1e-12)


def test_depthwise_convolutions_keep_their_channels_apart():
    x = image(5, 6, channels=3)
    layer = SameConv2d(3, 3, (3, 3), (2, 2), groups=3, bias=False).double()
    ours = layer(x).detach().numpy()
    for channel in range(3):
        weight = layer.weight[channel : channel + 1].detach().numpy()
        alone = convolved(x[:, channel : channel + 1].numpy(), weight, (2, 2))
        np.testing.assert_allclose(ours[:, channel : channel + 1], alone, atol=1e-12)


def test_pools_by_hand():
    x = torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)  # rows 1-4, 5-8, 9-12, 13-16
    assert SamePool2d("max", 3, 2)(x).flatten().tolist() == [11, 12, 15, 16]
    assert SamePool2d("avg", 3, 2)(x).flatten().tolist() == [6, 7.5, 12, 13.5]
    assert SamePool2d("max", 2, 2)(x).flatten().tolist() == [6, 8, 14, 16]
    assert SamePool2d("avg", 3, 1)(x)[0, 0, 0].tolist() == [3.5, 4, 5, 5.5]
    assert SamePool2d("max", 2, 2)(x[..., :3, :3]).flatten().tolist() == [6, 7, 10, 11]


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


def test_the_factorized_reduction_normalizes_both_halves_and_gives_an_odd_filter_to_the_second():
    layer = FactorizedReduction(2, 5, "same")
    assert (layer.even.out_channels, layer.odd.out_channels, layer.bn.num_features) == (2, 3, 5)
    out = layer(torch.randn(4, 2, 6, 6))
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(5), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "averaging", "kind"),
    [("max3", False, "max"), ("max3", True, "avg"), ("max2", True, "max"), ("avg3", False, "avg")],
)
@pytest.mark.parametrize("size", [(6, 6), (7, 5)])
def test_pooling_operations_are_what_they_are_called(name, averaging, kind, size):
    layer = operation(name, 4, 4, 2, Style("same", averaging_max_pool=averaging))
    x = image(*size, channels=4)
    np.testing.assert_allclose(layer(x).numpy(), pooled(x.numpy(), kind, int(name[3]), 2), rtol=1e-12)


def test_symmetric_pools_sample_torchs_grid():
    x = torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)
    outputs = {
        name: operation(name, 1, 1, 2, Style("symmetric"))(x).flatten().tolist()
        for name in ("max3", "avg3", "max2")
    }
    assert outputs == {"max3": [6, 8, 14, 16], "avg3": [3.5, 5, 9.5, 11], "max2": [6, 8, 14, 16]}
    averaging = Style("symmetric", averaging_max_pool=True)
    assert operation("max3", 1, 1, 2, averaging)(x).flatten().tolist() == outputs["avg3"]


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


def test_every_convolution_is_followed_by_a_normalization_except_inside_a_separable_one():
    kinds = {
        "1x1": "RCN",
        "3x3": "RCNRCNRCN",
        "1x7_7x1": "RCNRCNRCNRCN",
        "sep3x3_2": "RCCNRCCN",
        "sep5x5_2": "RCCNRCCN",
        "sep7x7_2": "RCCNRCCN",
    }
    letters = {"ReLU": "R", "BatchNorm2d": "N", "DropPath": "", "ReferenceSameConv2d": "C"}
    for name, expected in kinds.items():
        layer = operation(name, 8, 8, 1, Style("same"))
        assert "".join(letters[type(child).__name__] for child in layer) == expected
    sides = {name: weights(operation(name, 8, 8, 1, Style("same")))[0].shape[2:] for name in kinds}
    assert [sides[name] for name in ("sep3x3_2", "sep5x5_2", "sep7x7_2")] == [(3, 3), (5, 5), (7, 7)]


def test_an_operation_changes_channels_where_it_has_to():
    assert isinstance(operation("none", 8, 8, 1, Style()), nn.Identity)
    assert [w.shape for w in weights(operation("none", 8, 8, 2, Style()))] == [(8, 8, 1, 1)]
    assert [w.shape for w in weights(operation("max2", 32, 8, 2, Style()))] == [(8, 32, 1, 1)]
    assert not weights(operation("max2", 8, 8, 2, Style()))
    pool = unchanged(operation("avg3", 3, 5, 2, Style()))
    x = image(4, 4, channels=3)
    expected = convolved(pooled(x.numpy(), "avg", 3, 2), weights(pool)[0], (1, 1))  # no ReLU before it
    np.testing.assert_allclose(pool(x).detach().numpy(), expected, atol=1e-12)


def test_a_bottleneck_of_less_than_one_channel_is_left_out():
    assert [w.shape for w in weights(operation("3x3", 5, 3, 1, Style()))] == [(3, 5, 3, 3)]
    assert [w.shape for w in weights(operation("1x7_7x1", 5, 3, 1, Style()))] == [(3, 5, 1, 7), (3, 3, 7, 1)]
    assert [w.shape for w in weights(operation("3x3", 5, 7, 1, Style()))] == [
        (1, 5, 1, 1),
        (1, 1, 3, 3),
        (7, 1, 1, 1),
    ]

"""ResNet-101 against torchvision's, with the same weights, and cut in the middle of a block."""

import re

import pytest
import torch
from torch import nn

from gpipe_bench.models import MODELS
from gpipe_bench.models.torchvision_shim import import_torchvision


def from_torchvision(state):
    """A state dict of torchvision's `resnet101`, or whatever has its names, by the names of ours."""
    found = {}
    for name, tensor in state.items():
        name = re.sub(r"^(layer\d)\.(\d+)\.downsample\.", r"\1_\2_residual.downsample.", name)
        found[re.sub(r"^(layer\d)\.(\d+)\.((?:conv|bn)\d)\.", r"\1_\2_\3.module.", name)] = tensor
    return found


@pytest.fixture(scope="module")
def pair():
    """torchvision's model and ours with its weights, in float64, no tensor at its default."""
    torch.manual_seed(0)
    theirs = import_torchvision().models.resnet101(num_classes=10)
    for norm in theirs.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
                nn.init.uniform_(tensor, 0.2, 0.4)
    ours = MODELS["resnet101"](num_classes=10)
    ours.load_state_dict(from_torchvision(theirs.state_dict()))
    return theirs.double(), ours.double()


def test_outputs_gradients_and_statistics_equal_torchvisions(pair):
    theirs, ours = pair
    images = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-12, atol=0)
    left, right = ours.train()(images), theirs.train()(images)
    torch.testing.assert_close(left, right, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.state_dict(), from_torchvision(theirs.state_dict()), rtol=1e-12, atol=0)
    left.square().sum().backward()
    right.square().sum().backward()
    grads = from_torchvision({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-10, atol=1e-12)


def test_parameters_and_buffers_are_torchvisions_in_its_order(pair):
    theirs, ours = pair
    assert list(from_torchvision(theirs.state_dict())) == list(ours.state_dict())


def small(**options):
    defaults = {"num_classes": 3, "num_blocks": (1, 2, 1, 1), "num_filters": 4}
    return MODELS["resnet101"](**defaults | options)


def test_every_cut_hands_on_one_tensor_or_the_tensor_and_its_skip():
    model = small()
    state = torch.randn(2, 3, 32, 32)
    inside = False
    for name, layer in model.named_children():
        given = state
        state = layer(state)
        if name.endswith("stash"):
            inside = True
            assert state[0] is given
            assert state[1] is given
        elif name.endswith("residual"):
            inside = False
        elif inside:
            assert state[1] is given[1]
        assert isinstance(state, tuple) == inside
    assert state.shape == (2, 3)


def test_nothing_overwrites_its_input():
    model = small()
    state = torch.randn(2, 3, 32, 32)
    for name, layer in model.named_children():
        tensors = state if isinstance(state, tuple) else (state,)
        copies = [tensor.clone() for tensor in tensors]
        state = layer(state)
        assert all(map(torch.equal, tensors, copies)), name


def test_the_first_stack_projects_its_skip_and_the_others_halve_the_map():
    model = small(num_blocks=(2, 2, 2, 2))
    projections = [
        name for name, layer in model.named_children() if getattr(layer, "downsample", None) is not None
    ]
    assert projections == [f"layer{i}_0_residual" for i in (1, 2, 3, 4)]
    strides = {
        name: layer.module.stride[0]
        for name, layer in model.named_children()
        if name.endswith(("_conv1", "_conv2", "_conv3"))
    }
    assert [name for name, stride in strides.items() if stride == 2] == [
        f"layer{i}_0_conv2" for i in (2, 3, 4)
    ]


def test_scaled_down_sizes_and_classes():
    model = small(num_filters=8, num_classes=7)
    assert model(torch.randn(2, 3, 40, 40)).shape == (2, 7)
    assert len(model) == 4 + 11 * 5 + 3
    assert model.fc.in_features == 8 * 8 * 4


def test_initial_weights_are_torchvisions():
    torch.manual_seed(0)
    model = small(num_filters=32)
    square, widening = model.layer4_0_conv2.module.weight, model.layer4_0_conv3.module.weight
    assert square.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)
    assert widening.std().item() == pytest.approx((2 / 1024) ** 0.5, rel=0.02)

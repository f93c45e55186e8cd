"""ResNet-101 against torchvision's, with the same weights, and cut in the middle of a block."""

import importlib
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from gpipe_bench.models import MODELS, torchvision_shim
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


# The shim declares operators only where torchvision's own import fails for want of them


class Recorder:
    """Stands for `torch.library.Library`: remembers what was declared."""

    declared: list[str]

    def __init__(self, namespace, kind):
        assert (namespace, kind) == ("torchvision", "FRAGMENT")

    def define(self, schema):
        self.declared.append(schema.split("(")[0])


@pytest.fixture
def failing_import(monkeypatch):
    """Returns a function that makes the next imports of torchvision raise the given errors, then
    succeed.
    """
    package = ModuleType("torchvision")
    Recorder.declared = []
    monkeypatch.setattr(torch.library, "Library", Recorder)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torchvision_shim, "_declared", {})
    monkeypatch.setattr(
        sys, "modules", dict(sys.modules) | {"torchvision.half_done": ModuleType("half_done")}
    )

    def prepare(*errors):
        queue = list(errors)

        def import_module(name):
            assert name == "torchvision"
            if queue:
                raise queue.pop(0)
            return package

        monkeypatch.setattr(importlib, "import_module", import_module)
        return package

    return prepare


def missing(operator):
    return RuntimeError(f"operator torchvision::{operator} does not exist")


def test_a_working_torchvision_is_left_alone(failing_import):
    package = failing_import()
    assert import_torchvision() is package
    assert Recorder.declared == []
    assert "torchvision.half_done" in sys.modules


def test_missing_operators_are_declared_one_after_the_other(failing_import):
    package = failing_import(missing("nms"), missing("qnms"))
    assert import_torchvision() is package
    assert Recorder.declared == ["nms", "qnms"]
    assert "torchvision.half_done" not in sys.modules


@pytest.mark.parametrize(
    "error",
    [missing("roi_align"), RuntimeError("out of luck"), ImportError("no torchvision")],
    ids=["operator", "runtime", "import"],
)
def test_other_failures_are_not_hidden(failing_import, error):
    failing_import(error)
    with pytest.raises(type(error), match=str(error)):
        import_torchvision()
    assert Recorder.declared == []


def test_the_installed_torchvision_can_be_imported_and_models_does_not_do_it():
    script = (
        "import sys, models; assert 'torchvision' not in sys.modules; "
        "from gpipe_bench.models.torchvision_shim import import_torchvision as load; "
        "tv = load(); assert tv is load(); import torch, torchvision; assert torchvision is tv; "
        "print(tv.transforms.CenterCrop(2)(torch.ones(3, 4, 4)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "torch.Size([3, 2, 2])", done.stderr

"""The shim declares operators only where torchvision's own import fails for want of them."""

import importlib
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from gpipe_bench.models import torchvision_shim
from gpipe_bench.models.torchvision_shim import import_torchvision


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


def test_a_declaration_that_does_not_help_is_not_repeated(failing_import):
    failing_import(missing("nms"), missing("nms"))
    with pytest.raises(RuntimeError, match="nms"):
        import_torchvision()
    assert Recorder.declared == ["nms"]


def test_beside_a_cuda_build_the_failure_is_shown(failing_import, monkeypatch):
    failing_import(missing("nms"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match="nms"):
        import_torchvision()


def test_the_installed_torchvision_can_be_imported_and_models_does_not_do_it():
    script = (
        "import sys, models; assert 'torchvision' not in sys.modules; "
        "from gpipe_bench.models.torchvision_shim import import_torchvision as load; "
        "tv = load(); assert tv is load(); import torch, torchvision; assert torchvision is tv; "
        "print(tv.transforms.CenterCrop(2)(torch.ones(3, 4, 4)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "torch.Size([3, 2, 2])", done.stderr

"""The device module on a CPU: harmless answers, so that nothing else needs a second path. And what the engine
asks of torch without its promise: it is there, and one file each asks.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from gpipe_bench.pipeline import devices

CPU = torch.device("cpu")
PIPELINE = Path(devices.__file__).parent


def test_a_cpu_is_no_accelerator_and_there_is_one() -> None:
    assert not devices.is_accelerator(CPU)
    assert devices.is_accelerator(torch.device("cuda", 0))
    assert (devices.count("cpu"), devices.current("cpu")) == (1, CPU)


def test_what_is_asked_of_a_cpu_does_no_harm() -> None:
    tensor = torch.ones(3)
    with devices.on(CPU), devices.using(devices.new_stream(CPU)):
        doubled = tensor * 2
    devices.record_stream(doubled, devices.current_stream(CPU))
    devices.synchronize(CPU)
    devices.hold(CPU, 60.0)
    devices.reset_peak(CPU)
    devices.empty_cache(CPU)
    assert doubled.tolist() == [2, 2, 2]
    assert (devices.total_memory_bytes(CPU), devices.peak_bytes(CPU)) == (0, 0)
    assert devices.generator(CPU) is torch.default_generator
    assert devices.name(CPU)


def test_a_device_gets_its_index_and_its_allocator_is_there_before_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parameter is on "cuda:1", which "cuda" is not; torch 2.11 refuses to reset what is not there."""
    asked: list[object] = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: asked.append("up") or 1)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", asked.append)
    assert devices.exact("cuda") == torch.device("cuda", 1)
    assert [devices.exact(name) for name in ("cuda:3", "cpu")] == [torch.device("cuda", 3), CPU]
    asked.clear()
    devices.reset_peak(torch.device("cuda", 1))
    assert asked == ["up", torch.device("cuda", 1)]


def test_no_other_file_names_an_accelerators_interface() -> None:
    """One file to read for another kind of device."""
    found = []
    for path in sorted(PIPELINE.rglob("*.py")):
        if path.name == "devices.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if named and node.value.id == "torch" and node.attr in ("cuda", "accelerator", "xpu", "mps"):
                found.append(f"{path.relative_to(PIPELINE)}:{node.lineno}")
    assert not found, f"ask `devices` instead: {found}"


def test_a_device_without_a_generator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(ValueError, match="torch names no random generator of"):
        devices.generator(torch.device("hpu", 0))


ASKED = {
    "_get_backend": (dist.ProcessGroup, "ranks/failure.py"),
    "PrefixStore": (dist, "ranks/failure.py"),
    "get_group_store": (dist.ProcessGroup, "ranks/failure.py"),
    "_flatten": (DeviceMesh, "mesh/grid.py"),
    "_fsdp_api": (torch.distributed.fsdp._fully_shard, "mesh/sharding.py"),
    "_get_fsdp_state": (FSDPModule, "mesh/sharding.py"),
    "_root_post_backward_final_callback": (FSDPState, "mesh/sharding.py"),
    "_unscale_grads_": (torch.amp.GradScaler, "mesh/gradients.py"),
    "_set_grad_enabled": (torch._C, "stage/stage.py"),
    "_execution_engine": (torch.autograd.Variable, "stage/split_backward.py"),
    "_FunctionBase": (torch._C, "stage/tensors.py"),
}


@pytest.mark.parametrize("name", ASKED)
def test_it_is_there_and_one_file_asks(name: str) -> None:
    owner, file = ASKED[name]
    assert hasattr(owner, name)
    asking = [path for folder in ("stage", "ranks", "mesh") for path in (PIPELINE / folder).rglob("*.py")]
    asking = [path for path in asking if re.search(rf"\b{name}\b", path.read_text())]
    assert [str(path.relative_to(PIPELINE)) for path in asking] == [file]

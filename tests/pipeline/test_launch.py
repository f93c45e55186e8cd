"""Which device a launched process gets, and what is said where there are too few; with a faked number of
accelerators, since what is tested is decided before any of them is touched.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types

import psutil
import pytest
import torch
from torch import distributed as dist

from gpipe_bench.experiments.paper.consistency import training as consistency
from gpipe_bench.experiments.paper.consistency.recipes import subject_of
from gpipe_bench.experiments.paper.consistency.training import Setting
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.pipeline.ranks import launch


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """As many GPUs as the test's parameter says."""
    count: int = request.param
    monkeypatch.setattr(launch.devices, "default_type", lambda: "cuda" if count else "cpu")
    monkeypatch.setattr(launch.devices, "count", lambda kind: {"cpu": 1, "cuda": count}.get(kind, 0))
    return count


def nothing() -> str:
    return "ran"


def test_windows_is_refused_with_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(launch.signal, "pthread_sigmask")
    monkeypatch.delattr(launch.signal, "SIGHUP")
    monkeypatch.setattr(launch.sys, "platform", "win32")
    with pytest.raises(ValueError, match="launch needs the signals of Linux"):
        launch.launch(nothing, 2)


def test_a_function_of_a_notebook_is_refused_with_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose `__main__` is no file. In a script's it is found by the processes."""
    notebook = types.ModuleType("__main__")
    exec("def train(): pass", notebook.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    with pytest.raises(ValueError, match="the processes of launch import the"):
        launch.launch(notebook.train, 2, device="cpu")


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_processes_than_gpus_are_refused_before_any_starts(
    gpus: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(launch, "start_processes", lambda *arguments, **_: started.append(arguments))
    with pytest.raises(ValueError, match="2 processes, 1 GPU: each process"):
        launch.launch(nothing, 2, device=device)
    assert not started


@pytest.mark.parametrize("gpus", [0], indirect=True)
def test_a_gpu_that_is_asked_for_must_be_there(gpus: int) -> None:
    with pytest.raises(ValueError, match="1 process, 0 GPUs: each process"):
        launch.launch(nothing, 1, device="cuda")


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_processes_on_the_cpu_need_no_gpu(gpus: int) -> None:
    assert launch.launch(nothing, 2, device="cpu") == ["ran", "ran"]


@pytest.mark.parametrize(
    ("gpus", "device", "num_processes", "kind"),
    [(0, "auto", 8, "cpu"), (2, "auto", 2, "cuda"), (4, "cuda:0", 3, "cuda"), (2, "cpu", 9, "cpu")],
    indirect=["gpus"],
)
def test_the_type_of_device_that_processes_get(gpus: int, device: str, num_processes: int, kind: str) -> None:
    assert launch.check_devices(device, num_processes) == kind


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_a_process_of_torchrun_says_it_before_it_joins_the_others(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes, 1 GPU: each process"), launch.start_process():
        pass
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="2 processes, 1 GPU: each process"), launch.start_process():
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_a_process_that_is_shown_one_gpu_takes_it_whatever_its_rank(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As schedulers start processes; which GPU it is only the driver knows."""
    selected: list[torch.device] = []
    monkeypatch.setattr(launch.devices, "select", selected.append)
    monkeypatch.setattr(launch, "prepare_process", lambda *_, **__: None)
    monkeypatch.setattr(launch.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(launch.dist, "destroy_process_group", lambda: None)
    for name, value in (("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4"), ("CUDA_VISIBLE_DEVICES", "3")):
        monkeypatch.setenv(name, value)
    with launch.start_process() as device:
        assert device == torch.device("cuda", 0)
    assert selected == [torch.device("cuda", 0)]


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.parametrize(("device", "pinned"), [("auto", False), ("cpu", True)])
def test_a_process_in_front_of_a_gpu_keeps_all_cores(
    gpus: int, device: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Main, autograd and network threads on one core would keep the device waiting."""
    held: list[set[int]] = []
    selected: list[torch.device] = []
    backends: list[str] = []
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(
        launch.os, "sched_setaffinity", lambda pid, cores: held.append(set(cores)), raising=False
    )
    monkeypatch.setattr(launch, "_cores", [set()])  # nothing to give back where this process forks
    monkeypatch.setattr(launch.devices, "select", selected.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: backends.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # to be given back
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    with launch.start_process(device=device) as own:
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"  # a queue for each stream
    assert held == ([{1}] if pinned else [])
    if device == "cpu":
        assert (own, selected, backends) == (torch.device("cpu"), [], ["gloo"])
    else:
        first = torch.device("cuda", 1)
        assert (own, selected, backends) == (first, [first], ["cpu:gloo,cuda:nccl"])


def test_nobody_else_reaches_what_is_launched() -> None:
    """The launcher's store and the connections of the processes listen on this host alone."""
    found = launch.launch(_listening, 2, device="cpu")
    assert all(addresses for addresses in found)
    assert {address for addresses in found for address in addresses} == {"127.0.0.1"}


def _listening() -> list[str]:
    """The addresses at which this process or its launcher listens, once a connection is there."""
    dist.all_reduce(torch.ones(1))
    processes = [psutil.Process(), psutil.Process().parent()]
    listening = [
        each for of in processes if of for each in of.net_connections("tcp") if each.status == "LISTEN"
    ]
    dist.barrier()
    return [each.laddr.ip for each in listening]


def test_a_real_process_is_held_to_one_core() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system holds no process to a core")
    assert [len(cores) for cores in launch.launch(_cores, 1, device="cpu")] == [1]


def _cores() -> set[int]:
    return set(os.sched_getaffinity(0))


class Ranks:
    """Stands for the processes: what each would have returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, results: list[object]) -> None:
        self.results = dict(enumerate(results))
        self.kinds: list[str] = []
        monkeypatch.setattr(consistency, "launch", self.launch)

    def launch(self, function: object, number: int, *arguments: object, device: str, **_: object) -> object:
        self.kinds.append(device)
        return [*self.results.values()]


@pytest.mark.parametrize("gpus", [1, 2], indirect=True)
def test_consistent_training_over_processes_takes_the_cpu_where_there_is_one_gpu(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclasses.dataclass
    class Part:
        weights: dict[str, int]

    ranks = Ranks(monkeypatch, [Part({"a": 1}), Part({"b": 2})])
    options = RunOptions(profile="smoke", device="cuda")
    setting = Setting("pipeline", 2, 2, 0, "cuda", 0)
    trained = consistency.trained(subject_of("images", options), setting, 2)
    assert trained.weights == {"a": 1, "b": 2}
    assert ranks.kinds == ["cpu" if gpus == 1 else "cuda"]

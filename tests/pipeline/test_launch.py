"""What `launch` and torchrun start, and which device a process gets; with a faked number of accelerators
where that is decided before any of them is touched.
"""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import os
import sys
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.run
from forked import free_port
from ranks import PATIENCE_S, Ranks
from tiny_models import everything, everything_batch, mlp_batch, plain_step, seeded
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.paper import consistency_training as consistency
from gpipe_bench.experiments.paper.consistency_protocol import subject_of as consistency_subject
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.pipeline.ranks import failure, launch

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss


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


@pytest.mark.parametrize(
    ("gpus", "device", "number", "said"),
    [(1, "auto", 2, "2 processes, 1 GPU: each"), (0, "cuda", 1, "1 process, 0 GPUs: each")],
    indirect=["gpus"],
)
def test_more_processes_than_gpus_are_refused(gpus: int, device: str, number: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        launch.launch(nothing, number, device=device)


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.parametrize(("rank", "size"), [("0", "2"), ("1", "")])
def test_a_process_of_torchrun_says_it_before_it_joins_the_others(
    gpus: int, rank: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", rank)
    if size:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
    with pytest.raises(ValueError, match="2 processes, 1 GPU: each process"), launch.start_process():
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("gpus", "device", "shown", "given", "cores"),
    [
        (2, "auto", "", "cuda:1", []),  # network and autograd threads on one core would keep it waiting
        (0, "auto", "", "cpu", [{1}]),
        (2, "cpu", "", "cpu", [{1}]),
        # As schedulers start processes: the one it is shown, whatever its rank.
        (1, "auto", "3", "cuda:0", []),
    ],
    indirect=["gpus"],
)
def test_the_device_and_the_cores_of_a_process(
    gpus: int, device: str, shown: str, given: str, cores: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    variables = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_DEVICE_MAX_CONNECTIONS": ""}
    for name, value in {**variables, "CUDA_VISIBLE_DEVICES": shown}.items():
        monkeypatch.setenv(name, value)  # to be given back
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", *([] if shown else ["CUDA_VISIBLE_DEVICES"])):
        monkeypatch.delenv(name)
    with launch.start_process(device=device) as own:
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"  # a queue for each stream
    assert (str(own), held) == (given, cores)
    assert (selected, backends) == (([], ["gloo"]) if given == "cpu" else ([own], ["cpu:gloo,cuda:nccl"]))


@pytest.mark.parametrize("gpus", [1, 2], indirect=True)
def test_consistent_training_over_processes_takes_the_cpu_where_there_is_one_gpu(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclasses.dataclass
    class Part:
        weights: dict[str, int]

    kinds: list[str] = []

    def launched(function: object, number: int, *arguments: object, device: str) -> list[Part]:
        kinds.append(device)
        return [Part({"a": 1}), Part({"b": 2})]

    monkeypatch.setattr(consistency, "launch", launched)
    subject = consistency_subject("images", RunOptions(profile="smoke", device="cuda"))
    setting = consistency.Setting("pipeline", 2, 2, 0, "cuda", 0)
    assert consistency.trained(subject, setting, 2).weights == {"a": 1, "b": 2}
    assert kinds == ["cpu" if gpus == 1 else "cuda"]


def test_nobody_else_reaches_what_is_launched_and_each_has_a_core() -> None:
    """The launcher's store and the connections of the processes listen on this host alone."""
    found = launch.launch(_listening_and_cores, 2, device="cpu")
    assert all(addresses for addresses, _ in found)
    assert {address for addresses, _ in found for address in addresses} == {"127.0.0.1"}
    if hasattr(os, "sched_getaffinity") and (os.cpu_count() or 1) > 1:
        assert [cores for _, cores in found] == [1, 1]


def _listening_and_cores() -> tuple[list[str], int]:
    """The addresses at which this process or its launcher listens, once a connection is there."""
    dist.all_reduce(torch.ones(1))
    processes = [psutil.Process(), psutil.Process().parent()]
    listening = [
        each for of in processes if of for each in of.net_connections("tcp") if each.status == "LISTEN"
    ]
    dist.barrier()
    return [each.laddr.ip for each in listening], len(os.sched_getaffinity(0))


# Real processes: on GPUs, and as on two hosts


def on_gpus() -> list[tuple[Any, Any]]:
    """A step over NCCL: the loss and the gradients, each beside the plain model's."""
    ranks, model = Ranks(), seeded(everything)
    device, (batch, target) = torch.device("cuda", ranks.rank), everything_batch(9)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a GPU's generator draws other numbers
    pipeline = ranks.pipeline(copy.deepcopy(model), devices=device, remat="except_last")
    plain = plain_step(model, batch, target, cross_entropy, 4)
    own = ranks.own(tuple(t.to(device) for t in batch), target.to(device))
    for _ in range(2):
        pipeline.zero_grad()
        loss = pipeline.step(*own, cross_entropy)
    found = [(loss.cpu(), plain.loss)]
    found += [(p.grad.cpu().clone(), plain.gradients[name]) for name, p in pipeline.named_parameters()]
    assert pipeline.gather_timeline().makespan_s > 0
    pipeline.clip_grad_norm_(1.0)
    return [(ours.numpy(), theirs.numpy()) for ours, theirs in found]


@pytest.mark.gpu
def test_stages_on_gpus_of_their_own() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each stage")
    for pairs in launch.launch(on_gpus, min(torch.cuda.device_count(), 4)):
        for ours, plain in pairs:
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=0, atol=1e-10)


@pytest.mark.gpu
def test_one_gpu_alone_takes_what_the_engine_asks_of_nccl() -> None:
    """Its options, and an abort that returns. Two ranks on one GPU are refused, but one may exchange messages
    with itself, short ones and such as take many blocks of the network's buffers, if they are grouped.
    """
    device = torch.device("cuda")
    keys: Any = types.SimpleNamespace(
        under=lambda name: dist.HashStore(), failure=lambda: None, ranks=(0,), rank=0, timeout_s=60.0
    )
    alone = failure.backend(keys, "alone", accelerated=True)
    assert alone.name() == "nccl"  # by which the engine tells how to cut a connection
    for num_elements in (1, 1000, 2**20, 2**26):
        sent = torch.arange(num_elements, dtype=torch.float32, device=device)
        received = torch.zeros_like(sent)
        alone._start_coalescing()
        alone.recv([received], 0, 0)
        alone.send([sent], 0, 0)
        if (work := alone._end_coalescing()) is not None:
            work.wait()
        assert torch.equal(sent, received), num_elements
    alone.abort()


def raise_on_rank_1() -> None:
    ranks = Ranks()

    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if ranks.rank == 1:
                raise ZeroDivisionError("broken")
            return super().forward(x)

    pipeline = ranks.pipeline([nn.Linear(6, 6), Broken(6, 6)])
    pipeline.step(*ranks.own(*mlp_batch(8, dtype=torch.float32)), mse_loss)


@pytest.mark.usefixtures("spawning")
def test_the_launcher_ends_with_the_first_error() -> None:
    with pytest.raises(Exception, match=r"action 1F0 on rank 1 failed: ZeroDivisionError: broken"):
        launch.launch(raise_on_rank_1, 2, device="cpu")
    left = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert not [line for line in left if "spawn_main" in " ".join(line)]


def agent(folder: Path, arguments: list[str], output: Path) -> None:
    """What `torchrun` does, in a process that has imported torch; its workers are started as for users."""
    os.chdir(folder)
    os.environ.update(PYTHONPATH=str(folder), OMP_NUM_THREADS="1")
    with output.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.distributed.run.main(arguments)


def test_two_agents_as_on_two_hosts(tmp_path: Path) -> None:
    """As docs/running.md starts two hosts; between the two the tensors go through the network."""
    arguments = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two",
                 "--rdzv-endpoint", f"localhost:{free_port()}",
                 "tests/support/network_script.py"]  # fmt: skip
    outputs = [tmp_path / "one host", tmp_path / "other host"]
    context = multiprocessing.get_context("forkserver")
    root = Path(__file__).parents[2]
    agents = [context.Process(target=agent, args=(root, arguments, output)) for output in outputs]
    for process in agents:
        process.start()
    try:
        for process in agents:
            process.join(PATIENCE_S)
    finally:
        for process in agents:
            process.kill()
    said = [output.read_text() for output in outputs]
    assert [process.exitcode for process in agents] == [0, 0], "\n".join(said)
    printed = [line for text in said for line in text.splitlines() if line.startswith("step")]
    losses = [float(line.rpartition(" ")[2]) for line in printed]
    assert len(losses) == 5
    assert losses[-1] < 0.7 * losses[0]

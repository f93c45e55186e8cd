"""One process per stage: cases on four ranks, started once for all of them, and what launches them."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import alias_cases
import distributed_cases
import failure_cases
import message_cases
import own_model_cases
import portal_cases
import psutil
import pytest
import tied_cases
import torch
import torch.distributed.run
import torch_schedule_cases
import tree_cases
import worker_cases
from case_runner import Outcomes, assert_passed, named
from forked import free_port
from own_model_cases import NEED_TRANSFORMERS
from torch.distributed import HashStore
from torch.multiprocessing.spawn import ProcessException

from gpipe_bench.pipeline import launch
from gpipe_bench.pipeline.ranks import wire

pytestmark = pytest.mark.processes  # four at a time
MODULES = (
    distributed_cases, message_cases, failure_cases, worker_cases, torch_schedule_cases, alias_cases,
    tied_cases, tree_cases, own_model_cases, portal_cases,
)  # fmt: skip
ALL = named(*(case for module in MODULES for case in module.CASES))
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
CASES = {name: case for name, case in ALL.items() if HAS_TRANSFORMERS or name not in NEED_TRANSFORMERS}


@pytest.mark.parametrize("case", ALL)
def test_case(case: str, outcomes: Outcomes) -> None:
    if case not in CASES:
        pytest.skip("needs transformers: pip install -e .[transformers]")
    assert_passed(outcomes, case)


@pytest.mark.gpu
def test_stages_on_gpus_of_their_own() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each stage")
    for pairs in launch(distributed_cases.on_gpus, min(torch.cuda.device_count(), 4)):
        for ours, plain in pairs:
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=0, atol=1e-10)


@pytest.mark.gpu
def test_one_gpu_alone_takes_what_the_engine_asks_of_nccl() -> None:
    """Its options, and an abort that returns. Two ranks on one GPU are refused, but one may exchange messages
    with itself, short ones and such as take many blocks of the network's buffers, if they are grouped.
    """
    device = torch.device("cuda")
    keys: Any = SimpleNamespace(under=lambda name: HashStore())
    alone = wire.backend(keys, 0, 1, name="alone", accelerated=True, timeout_s=60.0)
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


@pytest.mark.usefixtures("spawning")
def test_the_launcher_ends_with_the_first_error() -> None:
    with pytest.raises(ProcessException, match=r"action 1B0 on rank 1 failed: ZeroDivisionError: broken"):
        launch(failure_cases.raise_one, 2, "gpipe", device="cpu")
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
    agents = [
        context.Process(target=agent, args=(Path(__file__).parents[2], arguments, output))
        for output in outputs
    ]
    for process in agents:
        process.start()
    try:
        for process in agents:
            process.join(failure_cases.PATIENCE_S)
    finally:
        for process in agents:
            process.kill()
    said = [output.read_text() for output in outputs]
    assert [process.exitcode for process in agents] == [0, 0], "\n".join(said)
    printed = [line for text in said for line in text.splitlines() if line.startswith("step")]
    losses = [float(line.rpartition(" ")[2]) for line in printed]
    assert len(losses) == 5
    assert losses[-1] < 0.7 * losses[0]

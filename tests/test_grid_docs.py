"""The page "From one process to data x pipeline x tensor parallel": its script runs by its commands."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from command_line import free_port

pytestmark = pytest.mark.processes  # four at a time
PAGE = (Path(__file__).parents[1] / "docs" / "grid.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^torchrun --nproc-per-node (\d+) train\.py (.*)$", PAGE, re.MULTILINE)


def as_torchrun_does(folder: str, arguments: list[str], rank: int, size: int, port: int) -> None:
    """One process of a command, with what torchrun tells it."""
    os.chdir(folder)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    said = open(f"rank {rank}", "wb", buffering=0)  # noqa: SIM115  until the process ends
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    sys.argv = ["train.py", *arguments]
    runpy.run_path("train.py", run_name="__main__")


def test_every_command_goes_on_where_the_one_before_stopped(tmp_path: Path) -> None:
    """The losses are those of one process that takes all steps."""
    assert len(COMMANDS) == 5
    (tmp_path / "train.py").write_text(SCRIPT)
    context = multiprocessing.get_context("forkserver")

    def losses(size: int, arguments: list[str]) -> list[tuple[int, float]]:
        port = free_port()
        processes = [
            context.Process(target=as_torchrun_does, args=(str(tmp_path), arguments, rank, size, port))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        said = [(tmp_path / f"rank {rank}").read_text() for rank in range(size)]
        assert [process.exitcode for process in processes] == [0] * size, "\n".join(said)
        return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss (\S+)", said[0])]

    found = [pair for size, rest in COMMANDS for pair in losses(int(size), shlex.split(rest))]
    wanted = losses(1, ["--steps", str(3 * len(COMMANDS))])
    assert [step for step, _ in found] == list(range(3 * len(COMMANDS)))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], abs=2e-4)
    assert wanted[-1][1] < wanted[0][1]

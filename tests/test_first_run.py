"""The README's first run, shortened: two processes, real digits, a loss that falls."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_bench.experiments import first_run

ROOT = Path(__file__).parents[1]


def test_the_loss_falls_over_two_processes() -> None:
    command = [sys.executable, "-m", "gpipe_bench.experiments.first_run", "--steps", "15"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", process.stdout)[0])
    assert last < first / 2


def test_two_agents_of_torchrun_form_one_pipeline() -> None:
    """As on two hosts, here both on this one: docs/running.md."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-id", "t", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
    ]  # fmt: skip
    agents = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank), "-m", "gpipe_bench.experiments.first_run", "--steps", "15"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        outputs = [agent.communicate(timeout=300)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    reports = [line for output in outputs for line in output.splitlines() if "2 processes" in line]
    assert len(reports) == 1, "one process reports the loss"


def test_digits_are_all_there_in_the_range_of_the_reference() -> None:
    images, classes = first_run.digits()
    assert images.shape == (1797, 3, 32, 32)
    assert (images.min().item(), images.max().item()) == (-1, 1)
    assert sorted(set(classes.tolist())) == list(range(10))


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        first_run.main(["--steps", "1"])
    assert stopped.value.code == 2
    assert "--steps 1" in capsys.readouterr().err

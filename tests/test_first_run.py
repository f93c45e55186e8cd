"""The README's first run, shortened: two processes, real digits, a loss that falls."""

from __future__ import annotations

import re

import pytest
from torch.distributed.launcher.api import elastic_launch

from gpipe_bench.experiments import first_run
from gpipe_bench.pipeline.ranks import launch


def test_the_loss_falls_over_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_run.main(["--steps", "15"]) == 0
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", capsys.readouterr().out)[0])
    assert last < first / 2


def test_processes_of_torchrun_form_one_pipeline() -> None:
    """What torchrun does on one host: one of them reports the loss, which can't halve in two steps."""
    config = launch.LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="t", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )  # fmt: skip
    assert elastic_launch(config, first_run.main)(["--steps", "2"]) == {0: 1, 1: 0}


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

"""SIGINT and SIGTERM end `plan` and `size` wherever they are: 130 and 143, and no traceback.

Where processes that time layers are ended by force, Python's tracker of semaphores may warn behind the word.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest
from command_line import START, finish, start

OWN = """
import os
import time

import torch
from torch import nn


def arrive():
    with open(os.environ["ARRIVED"], "w") as pipe:
        pipe.write("x")
    time.sleep(60)


def given(loss_fn):
    return [nn.Linear(4, 4), nn.Linear(4, 4)], torch.empty(8, 4), torch.empty(8, 4), loss_fn


def built():
    arrive()


def profiled():
    return given(lambda output, target: arrive())


def timed():
    def loss_fn(output, target):
        if type(output) is torch.Tensor and not output.is_meta:  # a real one, in a process that times
            arrive()
        return (output - target).square().mean()

    return given(loss_fn)
"""
PLAN = "plan {} --accelerators 2 --memory-gib 1 --batch-size 8 --pp 2 --schedule 1f1b"
SIZE = "size {} --accelerators 2 --memory-gib 1"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "moment", "number"),
    [
        (SIZE, "built", signal.SIGINT),
        (SIZE, "profiled", signal.SIGTERM),
        (PLAN, "profiled", signal.SIGINT),
        (PLAN, "timed", signal.SIGTERM),
    ],
)
def test_a_signal_ends_it(tmp_path: Path, command: str, moment: str, number: signal.Signals) -> None:
    (tmp_path / "own_slow_models.py").write_text(OWN, encoding="utf-8")
    os.mkfifo(tmp_path / "arrived")
    arrived = os.open(tmp_path / "arrived", os.O_RDWR)  # both ends, so that opening never blocks
    try:
        process = start(
            *command.format(f"own_slow_models:{moment}").split(),
            code=f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{START}",
            ARRIVED=str(tmp_path / "arrived"),
        )  # fmt: skip
        assert select.select([arrived], [], [], 300)[0], "it did not get there"
        process.send_signal(number)
        status, out, err = finish(process)
    finally:
        os.close(arrived)
    assert (status, out) == (128 + number, "")
    assert "interrupted" in err.splitlines()
    assert "Traceback" not in err

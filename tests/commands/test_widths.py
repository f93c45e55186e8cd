"""No command's output is wider than 100 columns, or than the terminal."""

from __future__ import annotations

import shlex

import pytest
from command_line import call

PLAN = "--accelerators 4 --memory-gib 24 --batch-size 64 --device-type a10"


@pytest.mark.parametrize(
    "line",
    [
        "", "list", "list --models", "compare table1", "compare table2",
        "schedule gpipe --num-stages 8 --num-microbatches 32", "schedule zb-v --workers 8 --microbatches 24",
        "plan gpt2 --bytes --accelerators 2 --memory-gib 8",
        f"plan gpt2 --num-layers 4 {PLAN} --num-microbatches 32",
    ],
)  # fmt: skip
def test_no_output_is_wider_than_a_hundred_columns(line: str) -> None:
    status, out, err = call(*shlex.split(line))
    assert status == 0, err
    script = out.partition("the script that trains so")[0]  # a file, whose lines are as long as they are
    assert [each for each in script.splitlines() if len(each) > 100] == []

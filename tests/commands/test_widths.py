"""No command's output is wider than 100 columns, or than the terminal."""

from __future__ import annotations

import shlex

import pytest
from command_line import call

from gpipe_bench.experiments.commands import output, plan, schedule

PLAN = "--accelerators 4 --memory-gib 24 --batch-size 64 --device-type a10"


@pytest.mark.parametrize(
    "line",
    [
        "", "list", "list --models", "compare table1", "compare table2",
        "schedule gpipe --workers 8 --microbatches 32", "schedule zb-v --workers 8 --microbatches 24",
        "plan gpt2 --bytes --accelerators 2 --memory-gib 8",
        f"plan gpt2 --num-layers 4 {PLAN} --num-microbatches 32",
    ],
)  # fmt: skip
def test_no_output_is_wider_than_a_hundred_columns(line: str) -> None:
    status, out, err = call(*shlex.split(line))
    assert status == 0, err
    script = out.partition("the script that trains so")[0]  # a file, whose lines are as long as they are
    assert [each for each in script.splitlines() if len(each) > 100] == []


@pytest.mark.parametrize(
    "line",
    [
        "list", "list --models", "schedule zb-v --workers 4 --microbatches 24",
        f"plan gpt2 --num-layers 2 {PLAN} --pp 2 --schedule 1f1b --num-microbatches 8",
    ],
)  # fmt: skip
def test_a_narrower_terminal_gets_narrower_text(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for commands, which are to be copied."""
    for module in (output, plan, schedule):
        monkeypatch.setattr(module, "screen_width", lambda: 80)
    status, out, err = call(*shlex.split(line))
    assert status == 0, err
    commands = ("torchrun ", "--script ", "run one with: ")
    assert [each for each in out.splitlines() if len(each) > 80 and not each.startswith(commands)] == []

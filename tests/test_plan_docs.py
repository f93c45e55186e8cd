"""The page "How should I train my model on my machines?": its example runs, its options are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpipe_bench.experiments.commands.parsing.parser import parser

PAGE = (Path(__file__).parents[1] / "docs" / "plan.md").read_text(encoding="utf-8")


def test_the_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(code, "docs/plan.md", "exec"), {"__name__": "example"})
    schedule, step, command = capsys.readouterr().out.splitlines()
    assert schedule.split()[0] in ("gpipe", "1f1b")
    assert re.fullmatch(r"[\d.]+ s \([\d.]+ \.\. [\d.]+\), [\d.]+ GiB", step)
    assert command == "torchrun --nproc-per-node 2 train.py"


@pytest.mark.parametrize("line", re.findall(r"^python -m experiments (plan .*)$", PAGE, re.MULTILINE))
def test_the_command_lines_are_understood(line: str) -> None:
    arguments = parser().parse_args(line.split())
    assert arguments.verb == "plan"
    assert arguments.batch_size > 0

"""The page "From one process to data x pipeline x tensor parallel": its script runs by its commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from forked import torchrun

pytestmark = pytest.mark.processes  # four at a time
PAGE = (Path(__file__).parents[1] / "docs" / "grid.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^torchrun --nproc-per-node (\d+) train\.py (.*)$", PAGE, re.MULTILINE)


def test_every_command_goes_on_where_the_one_before_stopped(tmp_path: Path) -> None:
    """The losses are those of one process that takes all steps."""
    assert len(COMMANDS) == 5
    (tmp_path / "train.py").write_text(SCRIPT)

    def losses(size: int, arguments: list[str]) -> list[tuple[int, float]]:
        said = torchrun(tmp_path / "train.py", arguments, size, tmp_path)[0]
        return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss (\S+)", said)]

    found = [pair for size, rest in COMMANDS for pair in losses(int(size), shlex.split(rest))]
    wanted = losses(1, ["--steps", str(3 * len(COMMANDS))])
    assert [step for step, _ in found] == list(range(3 * len(COMMANDS)))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], abs=2e-4)
    assert wanted[-1][1] < wanted[0][1]

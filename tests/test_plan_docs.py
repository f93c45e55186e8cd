"""The page "How should I train my model on my machines?": its example runs, its options are there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from gpipe_bench.experiments.commands.cli import main, parser

PAGE = (Path(__file__).parents[1] / "docs" / "plan.md").read_text(encoding="utf-8")


CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_ones_own_model_is_sized_from_its_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "(../examples/own_model_plan.py)" in PAGE
    monkeypatch.chdir(Path(__file__).parents[1] / "examples")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    command = "size own_model_plan:build --accelerators 4 --memory-gib 24 --batch-size 256 --schedule 1f1b"
    assert main(command.split()) == 0
    embedding, block = 50257 * 2048, 12 * 2048**2 + 9 * 2048
    assert f"own_model_plan:build: {2 * embedding + 24 * block:,} parameters under 1f1b on 4 x 24 GiB" in (
        capsys.readouterr().out
    )


def test_the_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (each for each in CODE if "import Request" in each)
    exec(compile(code, "docs/plan.md", "exec"), {"__name__": "example"})
    schedule, step, command = capsys.readouterr().out.splitlines()
    assert schedule.split()[0] in ("gpipe", "1f1b")
    assert re.fullmatch(r"[\d.]+ s \([\d.]+ \.\. [\d.]+\), [\d.]+ GiB", step)
    assert command == "torchrun --nproc-per-node 2 train.py"


@pytest.mark.parametrize(
    "line", re.findall(r"^(?:cd examples && )?gpipe-bench (plan .*)$", PAGE, re.MULTILINE)
)
def test_the_command_lines_are_understood(line: str) -> None:
    arguments = parser().parse_args(line.split())
    assert arguments.verb == "plan"
    assert arguments.batch_size > 0

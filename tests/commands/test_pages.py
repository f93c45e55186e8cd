"""Pages whose programs run as they stand, by the commands that stand beside them."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from forked import torchrun
from own_models import library

from gpipe_bench.experiments.commands.cli import main

PLAN = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


CODE = re.findall(r"^```python\n(.*?)^```", PLAN, re.MULTILINE | re.DOTALL)


def test_ones_own_model_is_sized_from_its_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "(../examples/own_model_plan.py)" in PLAN
    monkeypatch.chdir(Path(__file__).parents[2] / "examples")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    command = (
        "plan own_model_plan:build --bytes --accelerators 4 --memory-gib 24 --batch-size 256 --schedule 1f1b"
    )
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


# The page "From one process to data x pipeline x tensor parallel"


GRID = (Path(__file__).parents[2] / "docs" / "grid.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```", GRID, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^torchrun --nproc-per-node (\d+) train\.py (.*)$", GRID, re.MULTILINE)


@pytest.mark.processes
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


# The page "Bring your own model"


OWN_MODEL = (Path(__file__).parents[2] / "docs" / "own-model.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^## (.*?)$|^```python\n(.*?)^```", OWN_MODEL, re.MULTILINE | re.DOTALL)


def sections() -> list[tuple[str, str]]:
    """Each snippet with the heading it stands under."""
    found, title = [], ""
    for heading, code in SNIPPETS:
        title = heading or title
        if code:
            found.append((title, code))
    return found


@pytest.mark.parametrize(("title", "code"), sections(), ids=lambda text: text.splitlines()[0][:20])
def test_snippet(title: str, code: str) -> None:
    if "import transformers" in code:
        library()
    torch.manual_seed(0)
    exec(compile(code, f"docs/own-model.md, {title}", "exec"), {"__name__": "snippet"})

"""Pages and examples whose programs run as they stand, by the commands that stand beside them."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forked import HANGING_S, Script, torchrun
from own_models import library
from torch import Tensor
from torch.utils.data import DataLoader

from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.pipeline import Pipeline, checkpoint, launch

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


# The page "Combine data, pipeline and tensor parallelism"


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


ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
LINE = re.compile(r"^epoch \d: .*$", re.MULTILINE)


def example(name: str) -> ModuleType:
    """As a module; `sys.path` stays as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module(name)


def test_none_is_longer_than_a_page() -> None:
    assert [path.name for path in SCRIPTS] == ["own_engine.py", "own_model_plan.py", "two_processes.py"]
    assert [path.name for path in SCRIPTS if len(path.read_text().splitlines()) > 90] == []


# two_processes.py


def plain_weights(two: ModuleType) -> dict[str, Tensor]:
    """What the example's loop makes of the plain model: micro-batch by micro-batch, clipped by a norm in
    float64.
    """
    model = two.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, two.EPOCHS)
    text = torch.tensor(list(Path(two.__file__).read_bytes())).unfold(0, 32, 16)[:-16]
    for epoch in range(two.EPOCHS):
        order = torch.Generator().manual_seed(epoch)
        for batch in DataLoader(text, batch_size=16, shuffle=True, generator=order):
            for part in batch.tensor_split(min(4, len(batch))):
                (two.next_byte(model(part), part) * (len(part) / len(batch))).backward()
            parameters = list(model.parameters())
            norms = torch.stack([parameter.grad.norm().double() for parameter in parameters])
            torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norms.norm())
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


def stopped_and_begun_again(folder: Path) -> str:
    """In each of two processes: what the example prints when its first run ends after one epoch."""
    two = example("two_processes")
    save, printed = checkpoint.save, io.StringIO()

    def save_and_stop(*arguments: object) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save_and_stop)
        with contextlib.suppress(KeyboardInterrupt):
            two.train(folder, torch.device("cpu"))
        patch.setattr(checkpoint, "save", save)
        two.train(folder, torch.device("cpu"))
    return printed.getvalue()


@pytest.mark.processes
def test_two_processes_train_what_the_plain_model_does_and_go_on_where_they_were_ended(
    tmp_path: Path,
) -> None:
    """To the bit: the weights of the plain model, and every loss of a run that was ended in between."""
    printed = LINE.findall("".join(torchrun(ROOT / "examples" / "two_processes.py", ["whole"], 2, tmp_path)))
    assert len(printed) == 3
    assert LINE.findall("".join(launch(stopped_and_begun_again, 2, tmp_path / "ended"))) == printed
    two = example("two_processes")
    again = Pipeline(two.build(), num_stages=1, num_microbatches=4)
    checkpoint.load(tmp_path / "whole", again, torch.optim.AdamW(again.parameters(), lr=3e-3))
    wanted, found = plain_weights(two), again.state_dict()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


# own_engine.py: test_engines.py checks it and test_timed.py times it; own_model_plan.py


def test_ones_own_model_is_planned_and_its_script_written(tmp_path: Path) -> None:
    run = Script(ROOT / "examples" / "own_model_plan.py", [], tmp_path, tmp_path / "said", os.environ)
    lines = run.communicate(HANGING_S)[0].splitlines()
    assert run.returncode == 0
    assert len(lines) == 6
    for line in lines[:-1]:
        assert re.fullmatch(r"pp \d.*, M = \d+: [\d.]+ s, [\d.]+ GiB", line)
    assert lines[-1] == "the first as a script: torchrun --nproc-per-node 4 train.py"
    assert "own_model_plan import build" in (tmp_path / "train.py").read_text()

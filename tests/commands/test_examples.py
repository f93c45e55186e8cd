"""The scripts under examples/: short, they run as they stand, and train what the plain model would."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forked import HANGING_S, Script, torchrun
from torch import Tensor
from torch.utils.data import DataLoader

from gpipe_bench.pipeline import Pipeline, checkpoint, launch

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

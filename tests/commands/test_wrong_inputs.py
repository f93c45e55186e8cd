"""What a user hears who typed something wrong: `wrong_inputs.txt`, one line for each, with the remedy.

    python -m tests.commands.test_wrong_inputs    writes what is said now; the diff is what changed for users

A line that begins with `gpipe-bench` is a command, any other one a call. Below it stands what is said.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "support"))  # for what is not run by pytest
import command_line
from tiny_models import mlp, mlp_batch, seeded

from gpipe_bench import models, pipeline, planner

PAGE = Path(__file__).with_name("wrong_inputs.txt")
MACHINES = {"accelerators": 4, "memory_bytes": 2**30, "batch_size": 16, "link": pipeline.LINKS["nvlink4"]}


def pipe(**arguments: Any) -> pipeline.Pipeline:
    """Eight layers on two stages, but for these arguments."""
    given = {"layers": seeded(mlp), "num_stages": 2, "num_microbatches": 4, **arguments}
    return pipeline.Pipeline(**given)


def request(**arguments: Any) -> planner.Request:
    """Of four accelerators, but for these arguments."""
    return planner.Request(**{**MACHINES, **arguments})


NAMES = {
    **{name: getattr(module, name) for module in (planner, models, pipeline) for name in module.__all__},
    "pipe": pipe, "request": request, "batch": mlp_batch, "nn": nn, "torch": torch,
    "mse": nn.functional.mse_loss,
}  # fmt: skip


def said(line: str) -> str:
    """In an empty folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if line.startswith("gpipe-bench "):
            status, out, err = command_line.call(*shlex.split(line)[1:])
            err = err.strip().replace(folder, "FOLDER")
            return err if (status, out) == (2, "") else f"status {status}: {out}{err}"
        try:
            with mock.patch.object(sys, "path", sys.path.copy()):
                eval(line, dict(NAMES))
        except (ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong_inputs() -> dict[str, str]:
    """What each is to be answered with."""
    found, line = dict[str, str](), ""
    for text in PAGE.read_text(encoding="utf-8").splitlines():
        if text.startswith("    "):
            found[line] = text.strip()
        elif text and not text.startswith("#"):
            line, found[text] = text, ""
    return found


INPUTS = wrong_inputs()


def test_there_are_many() -> None:
    assert len(INPUTS) >= 60


@pytest.mark.parametrize("line", INPUTS)
def test_a_wrong_input_is_answered_in_one_line_with_the_remedy(line: str) -> None:
    assert said(line) == INPUTS[line]


def test_a_wrong_revision_is_refused_before_anything_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = "gpipe_bench.experiments.guard.own.content"
    monkeypatch.setattr(counted, lambda: pytest.fail("counted in vain"))
    status, _, err = command_line.call("guard", "--base", "nosuchref")
    assert status == 2
    assert err.startswith("error: unknown revision 'nosuchref'; fetch it first (git fetch)")


def main() -> None:
    parts = [
        "# What is typed wrong, and the answer; python -m tests.commands.test_wrong_inputs writes it anew."
    ]
    for line in INPUTS:
        answer = said(line)
        if answer == "nothing" or "\n" in answer:
            sys.exit(f"{line}: {answer}")
        parts += [line, f"    {answer}"]
    PAGE.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

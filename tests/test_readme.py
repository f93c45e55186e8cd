"""The README's table is the records', and its examples run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from experiments import readme

TEXT = readme.README.read_text(encoding="utf-8")


def test_the_table_is_that_of_the_reference_records() -> None:
    assert readme.rewritten(TEXT) == TEXT, "stale: run python -m experiments.readme"
    assert "| reproduced |" in TEXT
    assert "nothing fits" in TEXT


def test_lost_markers_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"README\.md has lost its markers"):
        readme.rewritten(TEXT.replace(readme.END, ""))


def test_python_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 1
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    names = {"torch": torch, "model": model, "batch": torch.randn(16, 4), "target": torch.randint(4, (16,))}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)  # the examples of this repository itself
    assert names["loss"].ndim == 0


@pytest.mark.parametrize(
    "command", re.findall(r"^python -m experiments ([a-z1 -]+?)(?:  .*)?$", TEXT, re.MULTILINE)
)
def test_command_lines_are_accepted(command: str) -> None:
    if command.startswith("run"):  # what it runs is tested elsewhere; here only that it parses
        command += " --help"
    if command.startswith("compare"):  # on a fresh clone there are no records but the reference
        command += f" --results {readme.REFERENCE.relative_to(readme.ROOT)}"
    arguments = [sys.executable, "-m", "experiments", *command.split()]
    process = subprocess.run(
        arguments, cwd=readme.ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr

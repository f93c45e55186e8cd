"""The README's table is the records', and its examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_bench.experiments import readme, registry
from gpipe_bench.harness.places import ROOT

TEXT = readme.README.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_reference_records_and_the_experiments() -> None:
    assert readme.rewritten(TEXT) == TEXT, "stale: run python -m gpipe_bench.experiments.readme"
    assert "| reproduced |" in TEXT
    assert "nothing fits" in TEXT


def test_every_experiment_has_a_row_with_what_it_says_of_itself() -> None:
    rows = readme.sessions().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [f"nox -s {name}" for name in registry.EXPERIMENTS]
    (row,) = [row for row in rows if "consistency`" in row]
    experiment = registry.load("consistency")
    assert experiment.title in row
    assert experiment.describe in row
    assert "([more](docs/consistency.md))" in row
    assert row.endswith("| 11 min |"), "two trainings at a time on two cores"


@pytest.mark.parametrize("section", readme.SECTIONS)
def test_lost_markers_are_an_error(section: str) -> None:
    for marker in readme.markers(section):
        with pytest.raises(ValueError, match=r"README\.md has lost its markers"):
            readme.rewritten(TEXT.replace(marker, ""))


def test_python_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 1
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    names = {"torch": torch, "model": model, "batch": torch.randn(16, 4), "target": torch.randint(4, (16,))}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)  # the examples of this repository itself
    assert names["loss"].ndim == 0


def commands() -> list[str]:
    """Every `python -m` line of the README; test_sessions.py runs the nox lines."""
    blocks = re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`(python -m [^`]+)`", TEXT)
    found = [line.partition("#")[0].strip() for line in lines if line.startswith("python -m")]
    return [line for line in found if not re.search(r"-m pip|experiments$", line)]


def test_every_command_is_found() -> None:
    assert len(commands()) >= 10
    assert sum(line.startswith("python -m experiments size") for line in commands()) == 2


@pytest.mark.parametrize("command", commands())
def test_command_lines_run(command: str, tmp_path: Path) -> None:
    if " run " in command:
        command += f" --profile smoke --results {tmp_path}"
    elif (
        " compare " in command and "--results" not in command
    ):  # a fresh clone has the reference records alone
        command += f" --results {readme.RECORDS.relative_to(ROOT)}"
    elif "first_run" in command:
        command += " --help"  # tests/test_first_run.py runs it
    process = subprocess.run(
        [sys.executable, *command.split()[1:]],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout

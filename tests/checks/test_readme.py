"""The generated tables of the pages are the records', and the examples of the pages run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from command_line import call
from torch import nn

from gpipe_bench.experiments import readme, registry
from gpipe_bench.harness.places import ROOT
from gpipe_bench.models import zoo

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    page: (ROOT / page).read_text(encoding="utf-8")
    for page in ("README.md", "docs/commands.md", "docs/memory.md")
}


@pytest.mark.parametrize("section", readme.SECTIONS)
def test_the_tables_are_those_of_the_reference_records_and_the_experiments(section: str) -> None:
    text = readme.SECTIONS[section][0].read_text(encoding="utf-8")
    assert readme.rewritten(section, text) == text, "stale: run python -m gpipe_bench.experiments.readme"


def test_table_1_is_on_the_page_of_results() -> None:
    text = readme.SECTIONS["table1"][0].read_text(encoding="utf-8")
    assert "| ours (modelled) | 81.79M |" in text
    assert "nothing fits" in text


def test_every_experiment_has_rows_with_what_it_says_of_itself() -> None:
    short, long = readme.sessions().splitlines()[2:], readme.descriptions().splitlines()[2:]
    assert [row.split("`")[1] for row in short] == [f"nox -s {name}" for name in registry.EXPERIMENTS]
    assert [row.split("`")[1] for row in long] == list(registry.EXPERIMENTS)
    experiment = registry.load("consistency")
    (row,) = [row for row in short if "consistency`" in row]
    assert f"| {experiment.title} ([more](docs/consistency.md)) |" in row
    assert row.endswith("| 17 min |"), "two trainings at a time on two cores"
    (row,) = [row for row in long if "`consistency`" in row]
    assert experiment.describe in row
    assert "([more](consistency.md))" in row


@pytest.mark.parametrize("section", readme.SECTIONS)
def test_lost_markers_are_an_error_before_anything_is_made(
    section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = readme.SECTIONS[section][0]
    monkeypatch.setitem(readme.SECTIONS, section, (page, lambda: pytest.fail("made in vain")))
    for marker in readme.markers(section):
        with pytest.raises(ValueError, match=rf"{page.name} has lost its markers"):
            readme.rewritten(section, page.read_text(encoding="utf-8").replace(marker, ""))


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = python_blocks("README.md")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    names = {"torch": torch, "model": model, "batch": torch.randn(16, 4), "target": torch.randint(4, (16,))}
    exec(compile(block, "README.md", "exec"), names)  # the examples of this repository itself
    assert names["loss"].ndim == 0
    names = {}
    for block in python_blocks("docs/memory.md"):  # one goes on where the other ends
        exec(compile(block, "docs/memory.md", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said[:4]] == [
        "layers 0 to 5", "layers 6 to 11", "layers 12 to 17", "layers 18 to 23",
    ]  # fmt: skip
    assert [line.partition(" ")[0] for line in said[4:]] == ["interleaved", "zb-v", "v-min"]


def commands() -> list[str]:
    """Every `python -m` line of the pages; test_sessions.py runs the nox lines."""
    found = []
    for text in PAGES.values():
        blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        lines += re.findall(r"`(python -m [^`]+)`", text)
        found += [line.partition("#")[0].strip() for line in lines if line.startswith("python -m")]
    return [line for line in dict.fromkeys(found) if not re.search(r"-m pip|experiments$", line)]


def test_every_command_is_found() -> None:
    assert len(commands()) >= 10
    assert sum(line.startswith("python -m experiments size") for line in commands()) == 5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all commands, so that what one has run is on record for the next."""
    return tmp_path_factory.mktemp("results")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("command", commands())
def test_command_lines_run(command: str, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand there, but for cases of the smoke profile that cost nothing."""
    arguments = command.split()[3:]
    monkeypatch.chdir(ROOT)
    if "run" in arguments:
        arguments += ["--profile", "smoke", "--results", str(results), "--only", "half=transformer"]
        arguments += ["--only", "part=paper", "--jobs", "1"]
    elif {"compare", "hypotheses"} & {*arguments} and "--results" not in arguments:
        # A fresh clone has the reference records alone.
        arguments += ["--results", str(readme.RECORDS.relative_to(ROOT))]
    elif (
        "amoebanet-d" in arguments
    ):  # tests/test_largest.py cuts one; this says that the words are understood
        status, _, err = call(*arguments, "--accelerators", "0")
        assert (status, err.partition(":")[2].split()[:2]) == (2, ["--accelerators", "0:"])
        return
    elif "--models" in arguments:  # tests/test_cli.py counts them all
        monkeypatch.setattr(zoo, "CONFIGURATIONS", zoo.CONFIGURATIONS[-1:])
    status, out, err = call(*arguments)
    assert status == 0, err
    assert out

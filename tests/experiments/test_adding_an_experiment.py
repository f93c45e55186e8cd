"""docs/adding-an-experiment.md, followed to the letter in a copy of the project, finds its experiment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-an-experiment.md").read_text(encoding="utf-8")
TITLE = "How long three stages wait"


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return text


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with the page's folder, line and rows, and with its records."""
    project = tmp_path_factory.mktemp("project")
    hidden = shutil.ignore_patterns("__pycache__", "reference", "local")
    for folder in ("gpipe_bench", "experiments", "harness", "models", "pipeline", "planner", "results"):
        shutil.copytree(ROOT / folder, project / folder, symlinks=True, ignore=hidden)
    for file in ("noxfile.py", "README.md"):
        shutil.copy(ROOT / file, project)
    (project / "experiments" / "idle.py").write_text(block("python"))
    registry = project / "experiments" / "registry.py"
    before, brace, after = registry.read_text().partition("EXPERIMENTS: dict[str, str] = {\n")
    registry.write_text(f"{before}{brace}{block('registry')}{after}")
    with (project / "results" / "paper.csv").open("a", encoding="utf-8") as paper:
        paper.write(block("csv"))
    with (project / "results" / "tables.toml").open("a", encoding="utf-8") as tables:
        tables.write("\n" + block("toml"))
    return project


def python(project: Path, *arguments: str) -> str:
    """What `python ARGUMENTS` prints in the copy."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=project, env={**environment, "PYTHONPATH": str(project)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def ran(project: Path) -> str:
    """What `run` prints."""
    return python(project, "-m", "experiments", "run", "idle")


def test_it_is_listed(project: Path) -> None:
    """By nox before anything but nox is installed."""
    code = (
        "import sys; sys.modules.update(torch=None, msgspec=None, gpipe_bench=None); import nox; nox.main()"
    )
    sessions = json.loads(python(project, "-c", code, "--list", "--json", "--session", "idle"))
    assert [(each["session"], each["description"]) for each in sessions] == [("idle", TITLE)]
    lines = python(project, "-m", "experiments", "list", "--json").splitlines()
    (entry,) = [entry for entry in map(json.loads, lines) if entry["name"] == "idle"]
    assert (entry["title"], [each["cases"] for each in entry["profiles"]]) == (TITLE, [2, 2, 2])
    code = "from gpipe_bench.experiments.commands.report import sessions; print(sessions())"
    assert f"| `nox -s idle` | {TITLE} |" in python(project, "-c", code)


def test_it_runs_and_is_held_against_the_paper(project: Path, ran: str) -> None:
    assert "here: 2 follow" in ran
    assert len((project / "results" / "local" / "idle.jsonl").read_text().splitlines()) == 2
    lines = python(project, "-m", "experiments", "compare", "idle", "--json").splitlines()
    cells = {cell["column"]: cell for cell in map(json.loads, lines)}
    assert {column: cell["verdict"] for column, cell in cells.items()} == dict.fromkeys(cells, "identity")
    assert (len(cells), cells["M=6"]["ours"]) == (2, 25)


def test_the_report_has_its_table_and_words(project: Path, ran: str) -> None:
    python(project, "-m", "experiments", "report")
    page = (project / "results" / "local" / "report.html").read_text(encoding="utf-8")
    for part in ("Idle share of three stages", TITLE, "For K = 3.", "2 follow"):
        assert part in page, part
    assert page.count('data-key="idle|idle share|') == 2

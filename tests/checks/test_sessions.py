"""Every nox session that docs/commands.md names runs its command, and every session is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from gpipe_bench.experiments import registry

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
PYTEST = ["tests", "checks"]
LISTED = re.findall(r"^\| `nox -s ([\w-]+)` \|", PAGE, re.MULTILINE)


def nox(*arguments: str) -> subprocess.CompletedProcess[str]:
    """With this interpreter instead of the sessions' shared environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "nox", "--no-venv", "--noxfile", str(ROOT / "noxfile.py"), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_page_lists_every_session_and_no_page_another_one() -> None:
    shown = nox("--list").stdout
    sessions = re.findall(r"^[-*] ([\w-]+) .*->", shown, re.MULTILINE)
    assert sorted(LISTED) == sorted(sessions)
    assert len(sessions) == len(set(sessions)) > 10
    pages = "".join(
        path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    )
    assert {*re.findall(r"nox (?:--no-venv )?-s ([\w-]+)", pages)} - {"NAME", "idle"} <= set(sessions)


def test_titles_read_from_the_source_are_the_experiments_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in registry.EXPERIMENTS:
        experiment = registry.load(name)
        assert (experiment.name, experiment.title) == (name, registry.title(name))
    monkeypatch.setitem(registry.EXPERIMENTS, "untitled", "gpipe_bench.experiments.gpu")
    with pytest.raises(ValueError, match=r"gpu\.py has no EXPERIMENT = .*; nox lists"):
        registry.title("untitled")


def test_the_sessions_to_run_by_default_are_the_checks() -> None:
    listed = json.loads(nox("--list", "--json").stdout)
    assert {each["session"] for each in listed} == {"tests", "lint"}


@pytest.mark.parametrize(
    ("sessions", "arguments"),
    [
        ([name for name in LISTED if name not in PYTEST and name != "lint"], ["--here", "--help"]),
        (PYTEST, ["--version"]),
    ],
)
def test_every_session_of_the_page_runs_its_command(sessions: list[str], arguments: list[str]) -> None:
    """With arguments that end it at once; `--here` is the session's own and does not reach the command."""
    process = nox("--session", *sessions, "--", *arguments)
    assert process.returncode == 0, process.stdout + process.stderr
    for session in sessions:
        assert f"* {session}: success" in process.stderr
    ran = [line.split(" -m ")[-1].split() for line in process.stderr.splitlines() if "python -m " in line]
    if sessions is PYTEST:
        assert [words[:2] for words in ran] == [["pytest", "--version"], ["pytest", "tests/checks"]]
    else:
        assert {tuple(words[:3]) for words in ran} >= {
            ("experiments", "run", name) for name in registry.EXPERIMENTS
        }


def test_what_workflows_run_is_there_and_they_take_the_oldest_torch() -> None:
    workflows = [yaml.safe_load(path.read_text()) for path in sorted(ROOT.glob(".github/workflows/*.yml"))]
    rows = [
        row
        for workflow in workflows
        for job in workflow["jobs"].values()
        for row in job.get("strategy", {}).get("matrix", {}).get("include", [])
    ]
    named = [row["session"] for row in rows if "session" in row]
    named += re.findall(r"nox -s ([\w-]+)", json.dumps(workflows))
    assert {"tests", "lint", "checks", "guard", "smoke"} <= set(named) <= set(LISTED)
    assert "nox -s guard -- --base" in (said := json.dumps(workflows))
    assert "--require-conclusive" in said, "what a busy machine cannot tell has not passed"
    oldest = min(row["torch"] for row in rows if "torch" in row)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={oldest.removesuffix('.0')}" in project["dependencies"]

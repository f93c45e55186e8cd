"""Every nox session that the README names runs its command, and every session is in the README."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_bench.experiments import registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^\| `nox -s (\w+)` \|", README, re.MULTILINE)

CHEAP = {
    "tests": ("--collect-only", "-q", "tests/test_sessions.py"),
    "bench": ("--collect-only", "-q"),
    "doctor": (),
}
"""Arguments with which a session is done in seconds; the others print their command's help."""


def nox(*arguments: str) -> subprocess.CompletedProcess[str]:
    """With this interpreter instead of the sessions' shared environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "nox", "--no-venv", "--noxfile", str(ROOT / "noxfile.py"), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_readme_lists_every_session() -> None:
    shown = nox("--list").stdout
    sessions = re.findall(r"^[-*] (\w+) .*->", shown, re.MULTILINE)
    assert sorted(LISTED) == sorted(sessions)
    assert len(sessions) == len(set(sessions)) > 10


def test_titles_read_from_the_source_are_the_experiments_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in registry.EXPERIMENTS:
        experiment = registry.load(name)
        assert (experiment.name, experiment.title) == (name, registry.title(name))
    monkeypatch.setitem(registry.EXPERIMENTS, "untitled", "gpipe_bench.experiments.first_run")
    with pytest.raises(ValueError, match=r"first_run\.py has no EXPERIMENT = .*; nox lists"):
        registry.title("untitled")


def test_the_sessions_to_run_by_default_are_the_checks() -> None:
    listed = json.loads(nox("--list", "--json").stdout)
    assert {each["session"] for each in listed} == {"tests", "lint"}


@pytest.mark.parametrize("session", [name for name in LISTED if name != "lint"])
def test_every_session_of_the_readme_runs_its_command(session: str) -> None:
    process = nox("--session", session, "--", *CHEAP.get(session, ("--help",)))
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"Session {session} was successful" in process.stderr
    command = {"tests": "-m pytest", "bench": "-m pytest tests/benchmarks"}.get(session, "-m experiments")
    assert command in process.stderr


def test_the_main_job_runs_whole_through_its_session(tmp_path: Path) -> None:
    """As a user would with arguments of their own; the other experiments' smoke profiles run in CI's."""
    process = nox("-s", "table1", "--", "--here", "--profile", "smoke", "--results", str(tmp_path))
    assert process.returncode == 0, process.stdout + process.stderr
    assert "paper" in process.stdout
    assert list(tmp_path.glob("**/table1*.jsonl"))


def test_lint_refuses_arguments() -> None:
    process = nox("-s", "lint", "--", "--fix")
    assert process.returncode != 0
    assert "lint takes no arguments, got --fix" in process.stderr

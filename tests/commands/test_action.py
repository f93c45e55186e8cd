"""The action for other repositories: its steps are run as a runner would, by a shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import their_repository
import yaml

from gpipe_bench.experiments.guard.run import HEADERS

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
EXPRESSION = re.compile(r"\$\{\{\s*(.+?)\s*\}\}")


def play(tmp_path: Path, given: dict[str, str]) -> list[list[str]]:
    """Runs the action's steps with these inputs; the commands that they gave, which are not carried out."""
    bin_folder, log = tmp_path / "bin", tmp_path / "log"
    bin_folder.mkdir()
    for program in ("gpipe-bench", "python"):
        script = bin_folder / program
        script.write_text(
            f"#!/usr/bin/env python3\nimport json, sys\n"
            f"open({str(log)!r}, 'a').write(json.dumps([{program!r}, *sys.argv[1:]]) + '\\n')\n"
        )
        script.chmod(0o755)
    done = carried_out(
        given, check=True, PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"),
    )  # fmt: skip
    assert done is not None
    return [json.loads(line) for line in log.read_text().splitlines()]


def carried_out(
    given: dict[str, str], *, cwd: Path | None = None, check: bool = False, capture_output: bool = False,
    text: bool = False, **variables: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs the steps one after another; the last one's ending."""
    inputs = {name: given.get(name, each.get("default")) for name, each in ACTION["inputs"].items()}
    values = {f"inputs.{name}": value for name, value in inputs.items()}
    values["github.action_path"] = "/action"

    def replaced(text: str) -> str:
        return EXPRESSION.sub(lambda match: values[match.group(1)], text)

    for step in ACTION["runs"]["steps"]:
        if "if" in step:
            name, wanted = re.fullmatch(r"inputs\.(\w+) == '(\w+)'", step["if"]).groups()  # type: ignore[union-attr]
            if inputs[name] != wanted:
                continue
        assert not EXPRESSION.search(step["run"]), "an input that is pasted into a script could run as one"
        environment = {name: replaced(value) for name, value in step["env"].items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            env={**variables, **environment}, cwd=cwd, check=check, capture_output=capture_output, text=text,
        )  # fmt: skip
    return done


OPTIONS = {
    "base": "--base", "benchmarks": "--benchmarks", "command": "--command", "number": "--number",
    "repository": "--repo", "path": "--path", "build": "--build", "budget-s": "--budget-s",
    "timeout-s": "--timeout-s",
}  # fmt: skip
SWITCHES = ("require-conclusive", "higher-is-better")


@pytest.mark.parametrize("odd", ["a b", "$(touch /tmp/should-not-be)", '"; exit 3; "'])
def test_everything_arrives_as_it_was_said(tmp_path: Path, odd: str) -> None:
    assert {*OPTIONS, *SWITCHES, "only", "install"} == {*ACTION["inputs"]}
    given = {name: f"{name} {odd}" for name in OPTIONS} | dict.fromkeys(SWITCHES, "true")
    (guard,) = play(tmp_path, {**given, "only": "one other", "install": "false"})
    for name, option in OPTIONS.items():
        assert guard[guard.index(option) + 1] == f"{name} {odd}"
    assert [guard[i + 1] for i, word in enumerate(guard) if word == "--only"] == ["one", "other"]
    assert {"--require-conclusive", "--higher-is-better"} <= {*guard}


def test_a_guard_that_ends_before_it_says_anything_is_in_the_summary(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "gpipe-bench"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 2\n")
    program.chmod(0o755)
    summary = tmp_path / "summary.md"
    done = carried_out(
        {"base": "main", "install": "false"}, PATH=f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        GITHUB_STEP_SUMMARY=str(summary),
    )  # fmt: skip
    assert done.returncode == 2
    assert summary.read_text() == "### guard: not run, exit status 2\n"


def test_the_steps_of_the_example_guard_somebody_elses_repository(tmp_path: Path) -> None:
    """Carried out by this checkout's command, as the runner does in the folder that was checked out: what
    lies in the job's summary is what was printed.
    """
    theirs = their_repository.make(tmp_path / "theirs")
    their_repository.slow_down(theirs, 3.0)
    given = {"base": "HEAD", "benchmarks": "benchmarks.py", "budget-s": "3"}
    summary = tmp_path / "summary.md"
    summary.write_text("what an earlier step said\n")
    program = tmp_path / "bin" / "gpipe-bench"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpipe_bench.experiments "$@"\n')
    program.chmod(0o755)
    done = carried_out(
        {**given, "install": "false"}, cwd=theirs, capture_output=True, text=True,
        PATH=f"{program.parent}{os.pathsep}{os.environ['PATH']}", PYTHONPATH=str(ROOT),
        GITHUB_STEP_SUMMARY=str(summary), GITHUB_ACTIONS="true", HOME=str(tmp_path),
    )  # fmt: skip
    printed, told = done.stdout.splitlines(), summary.read_text()
    assert done.returncode in (0, 1), done.stderr
    assert told.startswith("what an earlier step said\n### guard: ")
    assert printed[-1] == told.splitlines()[1].removeprefix("### ")
    (sentence,) = [line for line in printed if line.startswith("rows: ")]
    assert f"- {sentence}\n" in told
    (row,) = [line for line in told.splitlines() if line.startswith("| rows")][:1]
    assert len(row.split("|")) == len(HEADERS) + 2
    assert "title=guard::rows: " in done.stderr  # slower by three: a failure, or a warning on a busy machine
    assert (done.returncode == 1) == ("::error" in done.stderr) == (printed[-1] == "guard: FAILED")

"""Makes a user's repository: benchmarks, a folder `models/` of its own, a slower commit.

Tests run the guard on it as its owner would.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_BENCHMARKS = '''\
"""What this repository times by itself."""

import models


def build_rows():
    """sums of many rows"""
    rows = [list(range(200)) for _ in range(40)]

    def step():
        total = 0
        for _ in range(round(10 * (1 + models.SLOWER_BY))):
            total = sum(sum(row) for row in rows)
        return total

    return step


BENCHMARKS = {"rows": build_rows}
'''


def make(folder: Path) -> Path:
    """The repository, with one commit."""
    (folder / "models").mkdir(parents=True)
    (folder / "benchmarks.py").write_text(_BENCHMARKS)
    slow_down(folder, 0.0)
    git(folder, "init", "-q")
    commit(folder, "benchmarks")
    return folder


def slow_down(folder: Path, share: float) -> None:
    """Makes every step longer by `share`."""
    (folder / "models" / "__init__.py").write_text(f"SLOWER_BY = {share}\n")


def commit(folder: Path, message: str) -> None:
    """Commits everything; the commit may be empty."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", message)


def git(folder: Path, *arguments: str) -> str:
    """Runs git; returns its output."""
    settings = ("user.name=owner", "user.email=owner@example.org", "core.hooksPath=/dev/null")
    given = [word for setting in settings for word in ("-c", setting)]
    command = ["git", "-C", str(folder), *given, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

"""Somebody else's repository, made up: an engine of its own, a folder `models/` of its own, a slowed commit.

Tests guard it as its owner would.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from gpipe_bench.harness import ROOT

ENGINE = "fast_pipe.engine:Engine"

_ENGINE = '''\
"""The engine of this repository."""

import time

import models
from fast_pipe.fill_drain import FillDrain


class Engine(FillDrain):
    def step(self, batch, target, loss_fn):
        begin_s = time.perf_counter()
        loss = super().step(batch, target, loss_fn)
        end_s = time.perf_counter() + models.SLOWER_BY * (time.perf_counter() - begin_s)
        while time.perf_counter() < end_s:
            pass
        return loss
'''

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
    package = folder / "fast_pipe"
    package.mkdir(parents=True)
    (folder / "models").mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(_ENGINE)
    example = (ROOT / "examples" / "own_engine.py").read_text(encoding="utf-8")
    (package / "fill_drain.py").write_text(example)
    (folder / "benchmarks.py").write_text(_BENCHMARKS)
    slow_down(folder, 0.0)
    git(folder, "init", "-q")
    commit(folder, "an engine")
    return folder


def slow_down(folder: Path, share: float) -> None:
    """From here on every step takes longer by that share."""
    (folder / "models" / "__init__.py").write_text(f"SLOWER_BY = {share}\n")


def commit(folder: Path, message: str) -> None:
    """Everything that lies there; an empty commit where nothing has changed."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", message)


def git(folder: Path, *arguments: str) -> None:
    settings = ("user.name=owner", "user.email=owner@example.org", "core.hooksPath=/dev/null")
    given = [word for setting in settings for word in ("-c", setting)]
    subprocess.run(["git", "-C", str(folder), *given, *arguments], check=True, capture_output=True)

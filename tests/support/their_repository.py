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


_COUNTER = r"""
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Prints how much it worked, as if measured: with noise that follows from how often it was run. */
int main(int count, char **given) {
    long run = 0;
    FILE *file = count > 1 ? fopen(given[1], "r+") : NULL;
    if (!file || fscanf(file, "%ld", &run) != 1) return 1;
    rewind(file);
    fprintf(file, "%ld", run + 1);
    fclose(file);
    srand48(run);
    double noise = sqrt(-2 * log(1 - drand48())) * cos(6.283185307179586 * drand48());
    printf("counted %.3f units\n", 1e6 * (1 + MORE) * exp(0.05 * noise));
    return 0;
}
"""


def make_counter(folder: Path) -> Path:
    """A repository without any Python: a program in C that `make` builds as `work`, with one commit."""
    folder.mkdir()
    (folder / "work.c").write_text(_COUNTER)
    (folder / ".gitignore").write_text("work\n")
    git(folder, "init", "-q")
    count_more(folder, 0.0)
    return folder


def count_more(folder: Path, share: float) -> None:
    """Commits that the program counts more by that share; an empty commit where that is not new."""
    (folder / "Makefile").write_text(f"work: work.c Makefile\n\t$(CC) -DMORE={share} -o work work.c -lm\n")
    commit(folder, "count")


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

"""The files for trend tools, read as those tools read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpipe_bench.harness.guard.history import Commit, Entry, github, pytest_benchmark, save, stats
from gpipe_bench.harness.guard.judge import Change, Judgement

NOW = datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC)
COMMIT = Commit("0123456789abcdef", dirty=False, branch="main")
JUDGED = Judgement(
    "regression",
    12,
    0.975,
    Change(0.25, 0.2, 0.3),
    Change(0.0, -0.01, 0.01),
    Change(0.2, 0.1, 0.3),
    0.01,
    0.0125,
)
ENTRY = Entry("tiny", "linear layers", JUDGED, (0.0125, 0.0120, 0.0130, 0.0125, 0.0200), 4)


def test_github_action_benchmark_gets_what_it_asks_for() -> None:
    """Each entry needs name, unit and a number, bigger being better; range and extra are text."""
    entries = json.loads(json.dumps(github([ENTRY])))
    for entry in entries:
        assert isinstance(entry["name"], str)
        assert isinstance(entry["unit"], str)
        assert isinstance(entry["value"], float)
        assert isinstance(entry["range"], str)
        assert isinstance(entry["extra"], str)
    rate, relative = entries
    assert (rate["name"], rate["unit"], rate["value"]) == ("tiny", "steps/s", pytest.approx(80.0))
    assert relative["name"] == "tiny against its base"
    assert relative["value"] == pytest.approx(0.8)  # a quarter slower
    assert len({entry["name"] for entry in entries}) == len(entries)


def test_pytest_benchmark_compares_the_files(tmp_path: Path) -> None:
    """Two runs, compared by its own command line."""
    for _ in range(2):
        *_, run = save(tmp_path, [ENTRY], COMMIT, NOW)
    names = sorted(path.name for path in run.parent.iterdir())
    assert names == [f"000{n}_0123456789ab_20260301_120005.json" for n in (1, 2)]
    command = [sys.executable, "-m", "pytest_benchmark", "--storage", f"file://{tmp_path}", "compare"]
    done = subprocess.run(
        [*command, "--columns=min,median,iterations", "--csv", str(tmp_path / "table")],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tiny (0001_0123456" in done.stdout
    assert "tiny (0002_0123456" in done.stdout
    assert "0.0125" in (tmp_path / "table.csv").read_text()


def test_its_statistics_are_those_of_pytest_benchmark() -> None:
    from pytest_benchmark.stats import Stats

    theirs = Stats()
    for sample in ENTRY.samples_s:
        theirs.update(sample)
    ours = stats(ENTRY.samples_s, 4)
    for name in ("min", "max", "mean", "median", "rounds", "total", "ops", "stddev"):
        assert ours[name] == pytest.approx(getattr(theirs, name)), name
    assert set(theirs.as_dict()) <= set(ours)
    assert ours["iqr_outliers"] == 1
    assert ours["hd15iqr"] == 0.0130


def test_it_says_what_was_measured() -> None:
    content = pytest_benchmark([ENTRY], COMMIT, NOW)
    assert content["commit_info"]["id"] == COMMIT.id
    assert content["datetime"] == "2026-03-01T12:00:05+00:00"
    assert content["benchmarks"][0]["extra_info"]["verdict"] == "regression"


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="the history can't be written to"):
        save(tmp_path / "file", [ENTRY], COMMIT, NOW)

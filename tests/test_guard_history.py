"""The file for a trend tool, read as that tool reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpipe_bench.harness.guard.history import Entry, save
from gpipe_bench.harness.guard.judge import Change, Judgement

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
ENTRY = Entry("tiny", "linear layers", JUDGED, (0.0125, 0.0120, 0.0130, 0.0125, 0.0200))


def test_github_action_benchmark_gets_what_it_asks_for(tmp_path: Path) -> None:
    """Each entry needs name, unit and a number, bigger being better; range and extra are text."""
    entries = json.loads(save(tmp_path, [ENTRY]).read_text())
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


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="the history can't be written to"):
        save(tmp_path / "file", [ENTRY])

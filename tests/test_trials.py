"""A series of trials: stopped at any time, gone on with, and what is on record is not run again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from gpipe_bench.harness.trials import BEGIN, END, Series, timed


def series(folder: Path, stop_before: int | None = None) -> tuple[Series[int], list[int]]:
    """Three trials, and the list of those that ran; the machine is switched off in one of them."""
    ran: list[int] = []

    def run(number: int) -> Mapping[str, Any]:
        if number == stop_before:
            raise KeyboardInterrupt
        ran.append(number)
        return timed(lambda: {"number": number})

    return Series(
        program="a.program", about="What it is for.",
        records=folder / "results" / "trials.jsonl", docs=folder / "page.md",
        plan=lambda: range(3), which=lambda record: int(record["number"]), ready=lambda: nullcontext(run),
        said=lambda record: f"{record['number']}: right", summary=lambda records: f"{len(records)} trials",
    ), ran  # fmt: skip


def test_a_series_that_was_stopped_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    broken, first = series(tmp_path, stop_before=1)
    with pytest.raises(KeyboardInterrupt):
        broken.main([])
    whole, then = series(tmp_path)
    assert whole.main([]) == 0
    assert (first, then) == ([0], [1, 2])
    *_, last, said = capsys.readouterr().out.splitlines()
    assert last.startswith("2: right (")
    assert said == "3 trials"
    lines = whole.records.read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]
    assert list(json.loads(lines[0])) == [
        "number", "started_at", "duration_s", "load_before", "load_after", "cores", "machine",
    ]  # fmt: skip


def test_no_trial_begins_after_the_time_given(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    late, ran = series(tmp_path)
    assert late.main(["--seconds", "-1"]) == 0
    assert (ran, capsys.readouterr().out) == ([], "0 trials\n")


def test_other_records_are_said_and_written_into_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    said, ran = series(tmp_path)
    elsewhere = tmp_path / "elsewhere.jsonl"
    elsewhere.write_text('{"number": 0}\n{"number": 2}\n')
    assert said.main(["--records", str(elsewhere), "--summary"]) == 0
    assert capsys.readouterr().out == "2 trials\n"
    said.docs.write_text(f"before\n{BEGIN}stale\n{END}after\n")
    assert said.main(["--records", str(elsewhere), "--write-docs"]) == 0
    assert said.docs.read_text() == f"before\n{BEGIN}\n```text\n2 trials\n```\n\n{END}after\n"
    assert ran == []

"""Text for people in the width that there is: nothing longer, nothing lost, and as it is without one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import termios
from pathlib import Path

import pytest
from command_line import ROOT

from gpipe_bench.experiments.commands import doctor
from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.experiments.engines.examination import Row
from gpipe_bench.experiments.guard.run import Finding
from gpipe_bench.experiments.guard.run import table as guard_table
from gpipe_bench.harness.guard import Change, Judgement
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.report.width import fill, fitted, labelled, width, width_of, within

WIDTHS = (40, 80, 120)
REFERENCE = str(ROOT / "results" / "reference" / "cpu-2-cores")
OWN = "planning_models:tied --accelerators 2 --memory-gib 3"
PLAN = f"plan {OWN} --batch-size 8 --device-type a10 --link pcie"
ZOO = [
    {
        "model": "a model",
        "configuration": {"num_layers": 18, "preset": "tf"},
        "layers": 24,
        "parameters": 10**9,
    }
]
VERBS = {
    "list": "list",
    "list --models": "list --models",
    "schedule": "schedule zb-v --workers 4 --microbatches 8",
    "size": f"size {OWN}",
    "size under zb-v": f"size {OWN} --schedule zb-v",
    "plan": f"{PLAN} --pp 2 --schedule 1f1b --schedule zb-v --num-microbatches 4",
    "compare table1": f"compare table1 --results {REFERENCE}",
    "compare figure2": f"compare figure2 --results {REFERENCE}",
}


def words(text: str) -> set[str]:
    """Without rules between the lines, and what stands between a table's heading and its cells in a card."""
    return {word.strip(":") for word in text.split() if set(word) - set("-|+.:")}


def check(text: str, columns: int) -> None:
    """No line is longer but for a single word behind its indentation."""
    for line in text.splitlines():
        assert len(line) <= columns or " " not in line.strip(), (columns, line)


def code_of(text: str) -> tuple[str, str]:
    """What is printed of a plan, without and with the script, which stays whole."""
    before, marker, after = text.partition('"""Trains')
    return before, marker + after


@pytest.mark.parametrize("verb", VERBS)
def test_no_line_is_wider_and_nothing_is_lost(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpipe_bench.models.zoo.rows", lambda: iter(ZOO))  # counting all of them takes long
    found = {}
    for columns in (0, *WIDTHS):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(VERBS[verb].split()) == 0
        found[columns] = code_of(capsys.readouterr().out)
    for columns in WIDTHS:
        text, code = found[columns]
        check(text, columns)
        assert words(text) >= words(found[0][0])
        assert code == found[0][1], "what is to be copied stays as it is"


def test_what_is_for_programs_knows_no_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main([*VERBS["size"].split(), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert len(json.loads(line)["workers"]) == 2
    assert main([*VERBS["compare table1"].split(), "--markdown"]) == 0
    assert any(line.startswith("|") and len(line) > 80 for line in capsys.readouterr().out.splitlines())
    assert main(["plan", "vgg", "--accelerators", "2", "--memory-gib", "1", "--batch-size", "2"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1, "an error is one line"


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_doctor_keeps_to_it(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = [
        doctor.Check("packages", "missing", "without one, another and a third", "python -m pip install -e ."),
        doctor.Check("step by step", "optional", "a long finding " * 9, "a remedy that has many words, too"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: iter(found))
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["doctor", "--results", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    check(text, columns)
    for each in found:
        assert words(each.found) | words(each.remedy) <= words(text)


@pytest.mark.parametrize("columns", WIDTHS)
def test_check_engine_keeps_to_it(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row("one process", "gradients of layer 3", "failed", "differ by 0.25, which is a lot; " * 4)]
    monkeypatch.setattr("gpipe_bench.experiments.commands.exchange.check_engine.examination", lambda *_: rows)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["check-engine", "gpipe"]) == 1
    text = capsys.readouterr().out
    check(text, columns)
    assert words(rows[0].text) | words(rows[0].check) <= words(text)


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_guards_table_keeps_to_it(columns: int) -> None:
    change = Change(0.012, -0.003, 0.029)
    run = Judgement(
        verdict="unchanged", rounds=20, confidence=0.95, head=change, control=change, cpu=change, base_s=0.1,
        head_s=0.102,
    )  # fmt: skip
    findings = [Finding("gpipe two stages", [run, run])]
    whole = guard_table(findings).text()
    with within(columns):
        text = guard_table(findings).text()
    check(text, columns)
    assert words(text) >= words(whole)


def test_a_table_that_fits_is_a_table_and_one_that_does_not_is_cards() -> None:
    grid = Grid(
        title="What there is", columns=["", "", "paper", "ours"],
        lines=[["K=2", "step", "1.8", "1.75 [1.7, 1.8]"], ["", "memory", "", "3 GB"]], notes=["a note " * 5],
    )  # fmt: skip
    with within(40):
        assert grid.text().splitlines()[2] == "             paper    ours"
    with within(24):
        assert grid.text().splitlines() == [
            "What there is", "", "K=2 step", "  paper: 1.8", "  ours: 1.75 [1.7, 1.8]", "", "memory",
            "  ours: 3 GB", "a note a note a note a", "  note a note",
        ]  # fmt: skip


def test_prose_is_wrapped_under_its_own_beginning_and_drawings_are_folded() -> None:
    drawn = "stage 0 | F0 F1 .  .  B1 B1 B0 B0\nstage 1 | .  F0 F1 B1 B1 B0 B0"
    with within(24):
        assert fitted("  12. one two three four five six").splitlines() == [
            "  12. one two three four", "      five six",
        ]  # fmt: skip
        assert labelled("name  ", "some words that go on").splitlines() == [
            "name  some words that go", "      on",
        ]  # fmt: skip
        assert fitted(drawn).splitlines() == [
            "stage 0 | F0 F1 .  .  B1", "stage 1 | .  F0 F1 B1 B1", "",
            "stage 0 | B1 B0 B0", "stage 1 | B0 B0",
        ]  # fmt: skip
        assert fill("a-word-with-hyphens stays in one piece").splitlines()[0] == "a-word-with-hyphens"
    assert fitted(drawn) == drawn
    assert fill("word " * 40).count("\n") == 1


def test_the_width_is_columns_or_the_terminals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = pty.openpty()
    try:
        fcntl.ioctl(second, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 63, 0, 0))
        with os.fdopen(os.dup(second), "w") as terminal, (tmp_path / "file").open("w") as file:
            monkeypatch.delenv("COLUMNS", raising=False)
            assert (width_of(terminal), width_of(file)) == (63, None)
            monkeypatch.setenv("COLUMNS", "50")
            assert (width_of(terminal), width_of(file)) == (50, 50)
            monkeypatch.setenv("COLUMNS", "wide")
            assert width_of(file) is None
    finally:
        os.close(first)
        os.close(second)
    assert width() is None
    with within(3):
        assert width() == 20, "below that nothing can be laid out"
    assert re.fullmatch(r"a+", fitted("a" * 200))

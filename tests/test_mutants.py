"""The script that plants mistakes: what it says of its mutants, and that the table fits the code."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mutants
import pytest
from mutant_table import MUTANTS, Mutant


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The projects of these tests need no torch."""
    monkeypatch.setattr(mutants, "PRELOADED", ("pytest",))


def test_every_mutant_applies_and_has_a_name_of_its_own() -> None:
    mutants.check(MUTANTS)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


# The script itself, on a project of two lines.

SIGN = Mutant(
    name="sign",
    file="pipeline/add.py",
    old="a + b",
    new="a - b",
    why="sums are sums",
    tests=("tests/test_add.py::test_sum",),
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("gpipe_bench", "pipeline", "planner", "models", "harness", "experiments", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "results").mkdir()
    for name in mutants.COPIED:
        if name.startswith("results/"):
            (tmp_path / name).write_text("")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')
    (tmp_path / "pipeline/add.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "tests/test_add.py").write_text(
        "from pipeline.add import add\n\n\ndef test_sum():\n    assert add(2, 2) == 4\n\n\n"
        "def test_zero():\n    assert add(1, 0) == 1\n\n\ndef test_wrong():\n    assert add(1, 1) == 3\n"
    )
    return tmp_path


def test_a_mutant_is_killed_by_a_failing_test_alone(project: Path) -> None:
    planted = [
        SIGN,
        dataclasses.replace(SIGN, name="unnoticed", tests=("tests/test_add.py::test_zero",)),
        dataclasses.replace(SIGN, name="not Python", new="a +"),
    ]
    found = list(mutants.judge_all(planted, root=project))
    assert [outcome.verdict for outcome in found] == ["killed", "survived", "unclear"]
    assert found[0].detail == "tests/test_add.py::test_sum"
    assert "SyntaxError" in found[2].detail
    assert (project / SIGN.file).read_text() == "def add(a, b):\n    return a + b\n"


def test_a_mutant_that_hangs_is_not_killed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = dataclasses.replace(SIGN, old="    return a + b", new="    import signal\n    signal.pause()")
    with mutants.pristine([endless], project) as copy:
        monkeypatch.setattr(mutants, "TIMEOUT_S", 0.5)
        outcome = mutants.judge(endless, copy)
    assert outcome.verdict == "unclear"
    assert "no result after 0.5 s" in outcome.detail


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"old": "a * b"}, "'sign' does not apply: its text occurs 0 times in pipeline/add.py"),
        ({"old": "a"}, "occurs 3 times"),
        ({"new": "a + b"}, "changes nothing"),
        ({"tests": ()}, "names no tests"),
        ({"tests": ("tests/test_add.py::test_difference",)}, "test_difference, which is not there"),
        ({"tests": ("tests/test_sub.py::test_sum",)}, "test_sub.py::test_sum, which is not there"),
        ({"tests": ("tests/test_add.py::test_wrong",)}, "do not pass without any mutant"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    project: Path, changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        list(mutants.judge_all([dataclasses.replace(SIGN, **changes)], root=project))


def test_exit_statuses_and_the_list(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unnoticed = dataclasses.replace(SIGN, name="unnoticed", tests=("tests/test_add.py::test_zero",))
    monkeypatch.setattr(mutants, "MUTANTS", (SIGN, unnoticed))
    monkeypatch.setattr(mutants, "ROOT", project)
    assert mutants.main(["--list"]) == 0
    assert "sign\n    pipeline/add.py: sums are sums\n" in capsys.readouterr().out
    assert mutants.main([]) == 1
    assert capsys.readouterr().out.endswith("1 of 2 mutants killed\n")
    assert mutants.main(["--only", "sign"]) == 0
    assert mutants.main(["--jobs", "0"]) == 2
    assert "--jobs is 0" in capsys.readouterr().err
    assert mutants.main(["--only", "difference"]) == 2
    assert "there is no mutant 'difference'" in capsys.readouterr().err

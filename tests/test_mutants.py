"""Planted mistakes: what rules make, that those made by hand fit the code, how one is planted and judged."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mutants
import pytest
from mutation_rules import by_rule
from planted import MISTAKES, Mistake

SOURCE = '''"""A module."""
LIMIT = 1 << 2
class Box:
    @property
    def size(self) -> int:
        """How large, at least 1."""
        if self.given:
            print("given", file=None)
        return max(self.width + 2, 1) if not self.empty else 0

def first(a, b):
    if a < b and a != 0:
        raise ValueError(f"{a + 1} is wrong")
    return a - b
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Of the source above, as a project of its own."""
    (tmp_path / "box.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_box.py").write_text("\ndef test_size():\n    pass\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    spec = importlib.util.spec_from_file_location("box", tmp_path / "box.py")
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "box", made)
    spec.loader.exec_module(made)
    for name in ("PLANTED", "PYTHONPATH"):  # what is planted is told to whatever starts
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return made


def test_every_mistake_made_by_hand_fits_the_code_and_is_no_other_one() -> None:
    made = [mutants.by_hand(mistake) for mistake in MISTAKES]
    assert len({mutant.name for mutant in made}) == len({mutant.make() for mutant in made}) == len(MISTAKES)


def test_rules_change_neither_messages_nor_docstrings(module: object) -> None:
    found = {
        mutant.name.partition("::")[2]: (mutant.before, mutant.after)
        for mutant in by_rule("box.py", mutants.ROOT)
    }
    assert found == {
        "first::never 1": ("if a < b and a != 0:", "if False:"),
        "first::always 1": ("if a < b and a != 0:", "if True:"),
        "first::and-or 1": ("a < b and a != 0", "a < b or a != 0"),
        "first::dropped operand 1": ("a < b and a != 0", "a != 0"),
        "first::dropped operand 2": ("a < b and a != 0", "a < b"),
        "first::compare 1": ("a < b", "a <= b"),
        "first::compare 2": ("a != 0", "a == 0"),
        "first::constant 1": ("0", "1"),
        "first::early return 1": ("return a - b", "return None"),
        "first::arithmetic 1": ("a - b", "a + b"),
        "first::left alone 1": ("a - b", "a"),
        "first::right alone 1": ("a - b", "b"),
        "Box.size::never 1": ("if self.given:", "if False:"),
        "Box.size::always 1": ("if self.given:", "if True:"),
        "Box.size::dropped call 1": ("print('given', file=None)", ""),
        "Box.size::dropped keyword 1": ("print('given', file=None)", "print('given')"),
        "Box.size::early return 1": (
            "return max(self.width + 2, 1) if not self.empty else 0", "return None",
        ),
        "Box.size::always 2": ("max(self.width + 2, 1) if not self.empty else 0", "max(self.width + 2, 1)"),
        "Box.size::never 2": ("max(self.width + 2, 1) if not self.empty else 0", "0"),
        "Box.size::other function 1": ("max(self.width + 2, 1)", "min(self.width + 2, 1)"),
        "Box.size::one argument 1": ("max(self.width + 2, 1)", "self.width + 2"),
        "Box.size::one argument 2": ("max(self.width + 2, 1)", "1"),
        "Box.size::not 1": ("not self.empty", "self.empty"),
        "Box.size::arithmetic 1": ("self.width + 2", "self.width - 2"),
        "Box.size::left alone 1": ("self.width + 2", "self.width"),
        "Box.size::right alone 1": ("self.width + 2", "2"),
        "Box.size::constant 1": ("2", "3"),
        "Box.size::constant 2": ("1", "2"),
        "Box.size::constant 3": ("0", "1"),
    }  # fmt: skip


WIDER = Mistake(
    name="wider", place="box.py::Box.size", old="self.width + 2", new="self.width + 20",
    why="boxes are small", tests=("tests/test_box.py::test_size",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first::arithmetic 1", 8),
        ("first::compare 2", 2),
        ("Box.size::constant 1", 6),
        ("Box.size::not 1", 0),
        ("wider", 23),
    ],
)
def test_a_mistake_is_planted_in_the_function_that_is_there(
    module: object, tmp_path: Path, name: str, value: int
) -> None:
    made = {mutant.name: mutant for mutant in (*by_rule("box.py", mutants.ROOT), mutants.by_hand(WIDER))}
    mutant = made[name if name == "wider" else f"box.py::{name}"]
    box = type("Small", (module.Box,), {"given": False, "empty": False, "width": 3})()
    read: dict[str, Callable[[], int]] = {"first": lambda: module.first(5, 3), "Box.size": lambda: box.size}
    assert read[mutant.function]() == {"first": 2, "Box.size": 5}[mutant.function]
    assert mutants.plant(mutant, tmp_path) == 1
    assert read[mutant.function]() == value


def test_a_mistake_is_in_a_statement_of_a_module_too_and_in_what_is_started(
    module: object, tmp_path: Path
) -> None:
    limit = dataclasses.replace(WIDER, place="box.py", old="1 << 2", new="5")
    (tmp_path / "tests" / "planting").symlink_to(Path(__file__).parent / "planting")
    assert mutants.plant(mutants.by_hand(limit), tmp_path) == 1
    assert module.LIMIT == 5
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import box; print(box.LIMIT)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "5\n"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"old": "self.depth"}, "'wider' does not fit: its text occurs 0 times in box.py::Box.size"),
        ({"old": "self"}, "occurs 4 times"),
        ({"new": "self.width + 2"}, "is not changed"),
        ({"place": "box.py::Box.weight"}, "there is no box.py::Box.weight"),
        ({"tests": ("tests/test_box.py::test_depth",)}, "test_depth, which is not there"),
        ({"tests": ("tests/test_lid.py::test_size",)}, "test_lid.py::test_size, which is not there"),
    ],
)
def test_a_mistake_that_does_not_fit_is_refused(
    module: object, changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        mutants.by_hand(dataclasses.replace(WIDER, **changes))


PROJECT = {
    "pytest.ini": "[pytest]\nmarkers =\n    deep\n    alone\n    gpu\n    processes\n",
    "add.py": "def add(a, b):\n    return a + b\n\n\ndef unused(a):\n    return a * 2\n",
    "tests/test_add.py": "import add\n\n\ndef test_sum():\n    assert add.add(2, 3) == 5\n\n\n"
    "def test_zero():\n    assert add.add(1, 0) == 1\n\n\ndef test_wrong():\n    assert add.add(1, 1) == 3\n",
}
MADE = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import mutants, planted
from pathlib import Path
mutants.ROOT, mutants.RESULTS = Path({root!r}), Path({root!r})
TESTS = "tests/test_add.py::test_"
sum_ = planted.Mistake("sum", "add.py::add", "a + b", "a - b", "sums are sums", (TESTS + "sum",))
zero = planted.Mistake("zero", "add.py::add", "a + b", "a - b", "", (TESTS + "zero",))
wrong = planted.Mistake("wrong", "add.py::add", "a + b", "a - b", "", (TESTS + "wrong",))
mutants.MISTAKES = (sum_, zero, wrong)
sys.exit(mutants.main(sys.argv[1:]))
"""


def judged(project: Path, *arguments: str) -> tuple[int, str]:
    """Status and output of the command, in a project of a few lines."""
    for name, text in PROJECT.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
    if not (planting := project / "tests" / "planting").exists():
        planting.symlink_to(Path(__file__).parent / "planting", target_is_directory=True)
    code = MADE.format(root=str(project), tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=project, capture_output=True, text=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("names", "status", "said"),
    [
        (["sum", "zero"], 1, "1 of 2 mistakes noticed\n"),
        (["sum"], 0, "sum: tests/test_add.py::test_sum\n"),
        (["wrong"], 1, "without any mistake these do not pass: ['tests/test_add.py::test_wrong']"),
    ],
    ids=["one is not noticed", "noticed", "a test that fails anyway"],
)
def test_mistakes_made_by_hand_are_judged_by_the_tests_that_they_name(
    tmp_path: Path, names: list[str], status: int, said: str
) -> None:
    found = judged(tmp_path, *(word for name in names for word in ("--only", name)))
    assert said in found[1]
    assert found[0] == status


def test_a_test_that_stands_still_ends_the_run_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any mistake, where a limit of processor time would be no limit."""
    waits = "import threading\n\n\ndef test_sum():\n    threading.Event().wait()\n"
    monkeypatch.setitem(PROJECT, "tests/test_add.py", waits)
    monkeypatch.setitem(
        globals(), "MADE", MADE.replace("import mutants,", "import mutants; mutants.STILL_S = 1.0; import")
    )
    status, said = judged(tmp_path, "--only", "sum")
    assert status != 0
    assert "tests/test_add.py::test_sum stands still without any mistake\n" in said
    assert 'test_add.py", line 5 in test_sum' in said


def test_the_list_and_what_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--list"]) == 0
    assert f"{MISTAKES[0].name}\n    {MISTAKES[0].place}: {MISTAKES[0].why}\n" in capsys.readouterr().out
    assert mutants.main(["--jobs", "0"]) == mutants.main(["--only", "difference"]) == 2
    said = capsys.readouterr().err
    assert "--jobs is 0" in said
    assert "there is no mistake 'difference'" in said


def test_rules_are_judged_by_the_tests_that_run_a_line_and_go_on_where_they_ended(tmp_path: Path) -> None:
    every = "add.py", "--matrix", "--tests", "tests/test_add.py"
    status, said = judged(tmp_path, *every)
    assert status == 0, said
    results = tmp_path / "matrix.jsonl"
    lines = results.read_text().splitlines()
    found = {each["name"]: (each["verdict"], each["killers"]) for each in map(json.loads, lines)}
    both = ["tests/test_add.py::test_sum", "tests/test_add.py::test_zero"]
    assert found["add.py::add::arithmetic 1"] == ("killed", both[:1])
    assert sorted(found["add.py::add::early return 1"][1]) == both
    assert found["add.py::unused::constant 1"] == ("no test here", [])
    results.write_text("\n".join(lines[1:]) + "\n")
    judged(tmp_path, *every)
    assert [line.partition(",")[0] for line in results.read_text().splitlines()] == [
        line.partition(",")[0] for line in (*lines[1:], lines[0])
    ]


def test_what_was_noticed_and_no_longer_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no longer made, because its function is gone, is no loss."""
    runs = [
        {"a": "killed", "b": "timed out", "c": "survived", "d": "killed"},
        {"a": "killed", "b": "survived", "c": "survived"},
    ]
    paths = [tmp_path / "before", tmp_path / "after"]
    for path, run in zip(paths, runs, strict=True):
        path.write_text("".join(json.dumps({"name": n, "verdict": v}) + "\n" for n, v in run.items()))
    assert mutants.main(["--compare", *map(str, paths)]) == 1
    assert capsys.readouterr().out == "b\n"
    assert mutants.main(["--compare", str(paths[0]), str(paths[0])]) == 0

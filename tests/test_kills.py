"""Mutants by rule: what is changed, how it is planted, and what became of one that was noticed before."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import kills
import pytest

SOURCE = '''"""A module."""
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
    monkeypatch.setattr(kills, "ROOT", tmp_path)
    spec = importlib.util.spec_from_file_location("box", tmp_path / "box.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_operator_and_neither_messages_nor_docstrings(module: object) -> None:
    found = {
        mutant.name.partition("::")[2]: (mutant.before, mutant.after)
        for mutant, *_ in kills.mutants_of("box.py")
    }
    assert found == {
        "first::condition 1": ("if a < b and a != 0:", "if not (a < b and a != 0):"),
        "first::and-or 1": ("a < b and a != 0", "a < b or a != 0"),
        "first::compare 1": ("a < b", "a <= b"),
        "first::compare 2": ("a != 0", "a == 0"),
        "first::constant 1": ("0", "1"),
        "first::early return 1": ("return a - b", "return None"),
        "first::arithmetic 1": ("a - b", "a + b"),
        "Box.size::condition 1": ("if self.given:", "if not self.given:"),
        "Box.size::dropped call 1": ("print('given', file=None)", ""),
        "Box.size::early return 1": (
            "return max(self.width + 2, 1) if not self.empty else 0", "return None",
        ),
        "Box.size::swapped arguments 1": ("max(self.width + 2, 1)", "max(1, self.width + 2)"),
        "Box.size::not 1": ("not self.empty", "self.empty"),
        "Box.size::arithmetic 1": ("self.width + 2", "self.width - 2"),
        "Box.size::constant 1": ("2", "3"),
        "Box.size::constant 2": ("1", "2"),
        "Box.size::constant 3": ("0", "1"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first::arithmetic 1", 8),
        ("first::compare 2", 2),
        ("Box.size::constant 1", 6),
        ("Box.size::not 1", 0),
    ],
)
def test_a_mutant_is_planted_in_the_function_that_is_there(module: object, name: str, value: int) -> None:
    (mutant,) = [each for each, *_ in kills.mutants_of("box.py") if each.name == f"box.py::{name}"]
    box = type("Small", (module.Box,), {"given": False, "empty": False, "width": 3})()
    read: dict[str, Callable[[], int]] = {"first": lambda: module.first(5, 3), "Box.size": lambda: box.size}
    function = name.partition("::")[0]
    assert read[function]() == {"first": 2, "Box.size": 5}[function]
    assert kills.plant(mutant) == 1
    assert read[function]() == value


def test_what_was_noticed_and_no_longer_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no longer made, because its function is gone, is no loss."""
    runs = [
        {"a": "killed", "b": "timed out", "c": "survived", "d": "killed"},
        {"a": "killed", "b": "survived", "c": "survived"},
    ]
    paths = [tmp_path / "before", tmp_path / "after"]
    for path, run in zip(paths, runs, strict=True):
        path.write_text("".join(json.dumps({"name": n, "verdict": v}) + "\n" for n, v in run.items()))
    assert kills.main(["--compare", *map(str, paths)]) == 1
    assert capsys.readouterr().out == "b\n"
    assert kills.main(["--compare", str(paths[0]), str(paths[0])]) == 0


def test_a_replaced_node_leaves_the_rest() -> None:
    tree = ast.parse("f(a + b)\ng()")
    call = tree.body[1]
    assert ast.unparse(kills._Replace(call, None).visit(tree)) == "f(a + b)\npass"

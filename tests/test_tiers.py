"""The first tier of tests leaves no area out, and says where its time went."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tiers import Spent, is_deep, patterns, spent_s

FOLDER = Path(__file__).parent
# Files of each area that stay in the first tier, with at least so many tests of it.
AREAS = {
    "exactness of the engine": (
        20,
        ["test_transparency", "test_bitwise", "test_joined"],
    ),
    "processes": (2, ["test_distributed", "test_joined"]),
    "replicas and shards": (2, ["test_mesh", "test_sharding_parts"]),
    "schedules": (30, ["test_schedule", "test_named_schedules", "test_remat", "test_replay"]),
    "memory": (20, ["test_memory", "test_profile", "test_footprint", "test_split_memory"]),
    "planner": (20, ["test_planning_search", "test_planning_predict", "test_plan_verb"]),
    "models": (20, ["test_models_counts", "test_models_amoebanet", "test_models_transformer"]),
    "records and verdicts": (20, ["test_harness_store", "test_harness_verdict", "test_harness_runner"]),
    "command line": (20, ["test_cli", "test_schedule_verb", "test_plan_verb"]),
    "signals and kills": (5, ["test_signals", "test_checkpoint_file"]),
}


def names_in(path: Path) -> list[str]:
    """The test functions of a file, as pytest names them."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return [f"{path.name}::{name}" for name in functions if name.startswith("test_")]


def stays(name: str) -> bool:
    """In the first tier, at least with some of its parameters."""
    lines = patterns()
    return not is_deep(name, lines) or any(line.startswith(f"!{name}[") for line in lines)


@pytest.mark.parametrize("area", AREAS)
def test_every_area_is_in_the_first_tier(area: str) -> None:
    fewest, files = AREAS[area]
    found = {file: [name for name in names_in(FOLDER / f"{file}.py") if stays(name)] for file in files}
    assert all(found.values()), {file for file in found if not found[file]}
    assert sum(map(len, found.values())) >= fewest


def test_every_line_names_a_test_that_is_there() -> None:
    """A file may have gone, or a test may have another name now, and would be back in the first tier."""
    named = {line.removeprefix("!").partition("[")[0] for line in patterns()}
    there = {path.name for path in FOLDER.glob("test_*.py")} | {"benchmarks"}
    there |= {name for path in FOLDER.glob("test_*.py") for name in names_in(path)}
    assert named <= there, named - there


def test_a_later_line_wins() -> None:
    lines = ["test_a.py", "!test_a.py::test_b", "test_a.py::test_b[1]"]
    deep = [
        is_deep(f"test_a.py{name}", lines)
        for name in ("", "::test_c", "::test_b", "::test_b[1]", "::test_b[11]")
    ]
    assert deep == [True, True, False, True, False]
    assert not is_deep("test_ab.py::test_c", lines)


def test_time_is_the_processors_of_this_process_and_of_those_it_started(tmp_path: Path) -> None:
    spent = Spent(str(tmp_path / "spent"))
    before_s = spent_s()
    while spent_s() - before_s < 0.02:
        pass
    for name, seconds in (("a.py::test_x", 2.0), ("a.py::test_y", 0.5), ("b.py::test_z", 1.0)):
        report = pytest.TestReport(name, (name, 1, name), {}, "passed", None, "call", processor_s=seconds)
        spent.pytest_runtest_logreport(report)
    assert spent.seconds.most_common(1) == [("a.py::test_x", 2.0)]
    assert (tmp_path / "spent").read_text().splitlines()[1] == '["a.py::test_y", "call", 0.5]'

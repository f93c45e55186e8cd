"""What tests are made with: cases of several processes, covering arrays, tiers."""

from __future__ import annotations

import ast
import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import forked
import pytest
from case_runner import Outcome, Outcomes, once, watched
from covering import pairwise
from tiers import Spent, is_deep, patterns, spent_s
from torch import distributed as dist


def test_of_several_that_need_the_same_outcomes_one_launches(tmp_path: Path) -> None:
    both, made = threading.Barrier(2), []

    def make() -> Outcomes:
        made.append(1)
        return [{"case": Outcome(None, 0.5)}]

    def ask(_: int) -> Outcomes:
        both.wait()
        return once(tmp_path / "outcomes", make)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == [[{"case": Outcome(None, 0.5)}]] * 2
    assert len(made) == 1


def meet(missing: int) -> None:
    if dist.get_rank() == missing:
        wait_for_ever()
    dist.barrier()


def wait_for_ever() -> None:
    threading.Event().wait()


@pytest.mark.processes
def test_a_deadlock_ends_with_the_stacks_of_all_ranks() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 of 3:.*rank 1 of 3:.*rank 2 of 3:") as caught:
        watched(meet, 3, 1, hanging_s=2.0)
    said = str(caught.value)
    assert said.count("in wait_for_ever") == 1
    assert said.count("in barrier") == 2


def compute(missing: int) -> int:
    """Its others wait for long, which is no deadlock."""
    if dist.get_rank() == missing:
        start_s = time.process_time()
        while time.process_time() - start_s < 1.5:
            pass
    dist.barrier()
    return dist.get_rank()


@pytest.mark.processes
def test_who_waits_for_a_rank_that_computes_does_not_hang() -> None:
    assert watched(compute, 2, 0, hanging_s=1.0) == [0, 1]


def wait_for_nobody(said: Connection) -> None:
    os.dup2(said.fileno(), 2)
    threading.Thread(target=signal.pause).start()
    os.write(2, b"has an end\n" if signal.getitimer(signal.ITIMER_REAL)[0] > 0 else b"has no end\n")
    forked.end_if_it_hangs(0.01)  # instead of what it began with
    signal.pause()


def test_a_process_that_hangs_says_where_and_ends() -> None:
    context = forked.fork_server()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=wait_for_nobody, args=(there,))
    process.start()
    there.close()
    said = ""
    while "in wait_for_nobody" not in said and (more := os.read(here.fileno(), 4096)):
        said += more.decode()
    assert said.startswith("has an end\nTimeout (0:00:00.01")
    assert said.count("hread 0x") == 2, "the stacks of all its threads"
    os.kill(process.pid, signal.SIGALRM)  # as it would itself
    process.join()
    assert process.exitcode == -signal.SIGALRM


# Covering arrays


AXES = (range(5), range(5), "abc", "xyz")


def test_every_two_values_of_different_axes_meet_in_a_row() -> None:
    rows = pairwise(*AXES, keep=[(4, 4, "c", "z")])
    assert rows[0] == (4, 4, "c", "z")
    assert rows == pairwise(*AXES, keep=[(4, 4, "c", "z")])
    for (i, first), (j, second) in itertools.combinations(enumerate(AXES), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(first, second))
    assert 25 <= len(rows) <= 30, "of 225"


def test_one_axis_alone_and_a_row_of_each_value() -> None:
    assert sorted(pairwise(range(3), "a")) == [(0, "a"), (1, "a"), (2, "a")]


# The first tier of tests leaves no area out, and says where its time went


FOLDER = Path(__file__).parents[1]
# Files of each area that stay in the first tier, with at least so many tests of it.
AREAS = {
    "exactness of the engine": (
        20,
        ["test_transparency", "test_bitwise", "test_joined"],
    ),
    "processes": (2, ["test_distributed", "test_joined"]),
    "replicas and shards": (2, ["test_mesh", "test_sharding"]),
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
    return [f"{path.relative_to(FOLDER)}::{name}" for name in functions if name.startswith("test_")]


def stays(name: str) -> bool:
    """In the first tier, at least with some of its parameters."""
    lines = patterns()
    return not is_deep(name, lines) or any(line.startswith(f"!{name}[") for line in lines)


@pytest.mark.parametrize("area", AREAS)
def test_every_area_is_in_the_first_tier(area: str) -> None:
    fewest, files = AREAS[area]
    found = {
        file: [name for name in names_in(next(FOLDER.glob(f"*/{file}.py"))) if stays(name)] for file in files
    }
    assert all(found.values()), {file for file in found if not found[file]}
    assert sum(map(len, found.values())) >= fewest


def test_every_line_names_a_test_that_is_there() -> None:
    """A file may have gone, or a test may have another name now, and would be back in the first tier."""
    named = {line.removeprefix("!").partition("[")[0] for line in patterns()}
    there = {str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/test_*.py")} | {"benchmarks"}
    there |= {name for path in FOLDER.glob("*/test_*.py") for name in names_in(path)}
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

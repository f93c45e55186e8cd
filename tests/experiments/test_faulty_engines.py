"""Engines that raise, hang, die or are wrong: named with their error, and nobody else's results are lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import call, lines
from engines_checked import PAGE, rewritten
from planted_engines import OVER_PROCESSES, PLANTED, RIGHT

from gpipe_bench.experiments.beyond import engine_turns
from gpipe_bench.experiments.beyond.engines import ALL_CORES, ALONE, ALWAYS, FACTORIES, WORKLOADS
from gpipe_bench.experiments.engines import cases as cases_module
from gpipe_bench.experiments.engines.cases import BASE, CASES, GROUPS, Row, examine, faults, in_place, settled
from gpipe_bench.experiments.paper.timed.steps import run_processes

ROOT = Path(__file__).parents[2]
SCENE = """
import os
import time

from own_engine import FillDrain


class Good(FillDrain):
    pass


class Raises(FillDrain):
    def step(self, batch, target, loss_fn):
        raise RuntimeError("boom of the engine\\nand more of it")


class Hangs(FillDrain):
    def step(self, batch, target, loss_fn):
        while True:
            time.sleep(0.05)


class Wrong(FillDrain):
    def step(self, batch, target, loss_fn):
        return super().step(batch, target, lambda output, wanted: loss_fn(output, wanted) * self.count)


class Picky(FillDrain):
    def step(self, batch, target, loss_fn):
        raise ValueError("no batch is good enough")


class Dies(FillDrain):
    def step(self, batch, target, loss_fn):
        os._exit(7)


class Empty:
    def __init__(self, setup):
        pass


class Refuses:
    def __init__(self, setup):
        raise ValueError("needs another kind of computer")

    def step(self, batch, target, loss_fn):
        pass
"""


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scene_engines.py").write_text(SCENE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), str(tmp_path), *sys.path])
    return tmp_path


def check(name: str, *options: str) -> tuple[int, str, dict[str, str]]:
    """Exit status, what is said first, and the verdict of every case in the last place."""
    status, out, err = call("check-engine", f"scene_engines:{name}", "--json", *options)
    return status, err.strip(), {row["case"]: row["verdict"] for row in lines(out)}


def only(monkeypatch: pytest.MonkeyPatch, *places: str) -> None:
    kept = {place: cases_module.PLACES[place] for place in places}
    monkeypatch.setattr(cases_module, "PLACES", kept)


def in_this_process(name: str) -> dict[str, Row]:
    """What `check-engine` finds in one process, in this one."""
    rows: list[Row] = []
    for group in GROUPS:
        rows += examine(name, group, "one process")
        assert rows[0].verdict == "ok"
    return {row.case: row for row in settled(rows)}


# In processes of their own


def answer(tell: Any, value: int) -> int:
    tell(value)
    return 2 * value


def boom(tell: Any) -> None:
    raise ZeroDivisionError("by nothing")


# check-engine


def test_a_good_engine_passes_in_one_process_and_over_two(scene: Path) -> None:
    status, out, err = call("check-engine", "scene_engines:Good", "--json")
    assert status == 0, err
    cannot = {
        (row["place"], row["case"]): row["text"] for row in lines(out) if row["verdict"] == "cannot be asked"
    }
    assert {row["verdict"] for row in lines(out)} == {"ok", "cannot be asked"}
    assert len(lines(out)) == 2 * len(CASES)
    methods = ("clipping over stages", "evaluation first")
    assert set(cannot) == {
        *((place, case) for place in cases_module.PLACES for case in (*methods, "ragged mini-batch")),
        ("two processes", "shared weights"),
    }
    assert cannot["two processes", methods[0]] == "it has no method clip(max_norm)"
    assert cannot["one process", "ragged mini-batch"].startswith("10 examples do not divide into 4")
    assert err.strip().endswith("scene_engines:Good: 41 cases passed, 7 cannot be asked")


@pytest.mark.parametrize("name", RIGHT)
def test_no_right_engine_is_blamed(name: str) -> None:
    assert faults([*in_this_process(name).values()]) == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_named_by_its_case_and_by_no_other(name: str) -> None:
    cases, said = PLANTED[name]
    found = faults([*in_this_process(f"planted_engines:{name}").values()])
    assert {row.case for row in found} == cases
    assert said in found[0].text, "which is what is said first"


@pytest.mark.parametrize("name", OVER_PROCESSES)
def test_over_processes_too_it_is_named_by_what_it_is(scene: Path, name: str) -> None:
    case, verdict, said = OVER_PROCESSES[name]
    found = faults(in_place(f"planted_engines:{name}", "two processes", 20.0, ["accumulation over steps"]))
    assert (found[0].case, found[0].verdict) == (case, verdict)
    assert said in found[0].text


def test_the_page_shows_what_is_on_record_about_others() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert rewritten(text) == text, "stale: python tests/support/engines_checked.py --write-docs"


def test_the_table_fits_a_screen_and_says_who_has_met_it(
    scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "one process")
    status, out, _ = call("check-engine", "planted_engines:sums")
    assert status == 1
    shown = out.splitlines()
    assert max(map(len, shown[1:])) <= 100
    (row,) = [line for line in shown if line.startswith("summed loss")]
    assert "failed: every gradient" in row
    assert row.split("  ")[-1].strip().startswith("the learning rate is off")
    assert shown[-1] == "  summed loss: https://github.com/pytorch/torchtitan/issues/2972"


@pytest.mark.parametrize(
    ("name", "status", "first"),
    [
        ("Raises", 3, "RuntimeError: boom of the engine, in line 14 of scene_engines.py (step) [step, one"),
        ("Dies", 3, "its process ended with status 7 [step, one process]"),
        (
            "Wrong",
            1,
            "every gradient is 4 times that of the mean loss over the mini-batch: the losses of the",
        ),
        ("Empty", 1, "engine 'scene_engines:Empty' returned Empty, which has no method step(batch, target,"),
        ("Refuses", 1, "it can do nothing that was asked: needs another kind of computer"),
    ],
)
def test_a_bad_engine_is_named_in_the_first_line(
    scene: Path, monkeypatch: pytest.MonkeyPatch, name: str, status: int, first: str
) -> None:
    only(monkeypatch, "one process")
    found, head, _ = check(name)
    assert found == status
    assert head.startswith(f"scene_engines:{name}: {first}")


def test_one_that_hangs_is_ended_and_its_place_named(scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "one process")
    status, head, verdicts = check("Hangs", "--timeout-s", "1")
    assert status == 3
    assert "no answer within 1 s: its process was in line 20 of scene_engines.py (step)" in head
    assert list(verdicts.values()) == ["broken"] + ["not tried"] * (len(CASES) - len(BASE))


def test_a_name_that_leads_nowhere_is_bad_usage(scene: Path) -> None:
    status, head, _ = check("Missing")
    assert (status, head) == (
        2,
        "error: engine 'scene_engines:Missing': scene_engines has no attribute 'Missing'; "
        "name a class or function that takes a Setup",
    )
    assert check("Good", "--timeout-s", "0")[:2] == (2, "error: --timeout-s is 0; give seconds, such as 30")


# run engines


@pytest.mark.usefixtures("undrawn")
def test_four_bad_engines_and_a_good_one_are_four_reasons_and_a_result(
    scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"num_layers": 6, "vocab_size": 8, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "seq_len": 8}
    monkeypatch.setitem(WORKLOADS, "transformer", WORKLOADS["transformer"]._replace(options=tiny))
    monkeypatch.setattr(engine_turns, "TRIAL_S", 8.0)
    names = [f"scene_engines:{name}" for name in ("Raises", "Hangs", "Wrong", "Empty", "Good", "Picky")]
    status, _, err = call(
        "run", "engines", "--profile", "smoke", "--engine", ",".join(names), "--results", scene / "results",
        "--only", "where=processes", "--only", "workload=transformer",
    )  # fmt: skip
    assert status == 3, err
    (found,) = [json.loads(line) for line in (scene / "results/engines.jsonl").read_text().splitlines()]
    assert found["status"] == "failed"
    faulty = found["details"]["faulty"]
    assert list(faulty) == names[:4]
    assert faulty[names[0]].startswith("RuntimeError: boom of the engine, in line 14 of scene_engines.py")
    assert faulty[names[1]].startswith("no answer within 8 s: process 0 was in line 20 of scene_engines.py")
    assert "gradients of scene_engines:Wrong are wrong" in faulty[names[2]]
    assert "Empty, which has no method step(batch, target, loss_fn)" in faulty[names[3]]
    numbers = {(each["name"], *each["key"].values()): each for each in found["metrics"]}
    for engine in ("ours", "torch-gpipe", "torch-1f1b", names[4]):
        assert numbers["step", engine]["value"] > 0
        assert numbers["peak memory", engine, 0]["value"] > 0
    assert len(numbers["speed", "torch-gpipe", names[4]]["samples"]) == found["details"]["rounds"]
    right = ["ours", "torch-gpipe", "torch-1f1b", ALWAYS, names[4]]
    (refused,) = found["details"]["refused"].items()
    assert refused[0] == names[5]
    assert refused[1].startswith("no batch is good enough, in line ")
    assert [name for name in found["details"]["engines"] if name not in faulty] == [*right, names[5]]
    assert found["options"]["engine"].startswith(f"{names[0]}@")
    for checks in found["details"]["checks"]:
        assert [checks[name]["forwards"] for name in right] == [7, 8, 8, 8, 7]
        assert {(checks[name]["backwards"], checks[name]["examples"]) for name in right} == {(4, 2)}
    shown = call("compare", "engines", "--full", "--results", scene / "results")[1]
    for name in names[:4]:
        assert f"{name} failed: {faulty[name]}" in " ".join(shown.split())
    assert f"{names[5]} skipped: {refused[1]}" in " ".join(shown.split())


def test_peaks_are_counted_beside_a_process_that_only_waits() -> None:
    """The sequential model runs in the first process alone; whoever waits there must wait in all."""
    options = {"num_layers": 4, "d_model": 8, "ffn_dim": 16, "num_heads": 2, "vocab_size": 16, "seq_len": 4}
    compared = {name: (FACTORIES.get(name, name), "never") for name in ("ours", ALONE, ALL_CORES)}
    job = engine_turns.Job("transformer-lm", options, 1, 2, 2, compared, with_peaks=True)
    first, second = run_processes(engine_turns.work, 2, job, 1)
    assert list(first.details["peak_bytes"]) == ["ours", ALONE, ALL_CORES]
    assert list(second.details["peak_bytes"]) == ["ours", ALL_CORES]

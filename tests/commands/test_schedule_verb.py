"""The verb schedule, and that no output is wider than 100 columns."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from command_line import call


def test_a_picture_with_its_length_bubble_and_activations() -> None:
    status, out, err = call("schedule", "1f1b", "--workers", 2, "--microbatches", 3, "--remat", "never")
    assert (status, err) == (0, "")
    found = out.splitlines()
    assert found[0] == "1f1b: 2 stages on 2 workers, 3 micro-batches, remat never, valid"
    assert found[2:4] == [
        "stage 0 | F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2",
        "stage 1 | .  F0 B0 B0 F1 B1 B1 F2 B2 B2",
    ]
    assert found[5:7] == [
        "makespan 12 slots, bubble 25.0%",
        "  (slots: F 1, R 1, B 2, I 1, W 1; equal stages, messages take no time)",
    ]
    assert [line.split() for line in found[-2:]] == [["0", "0", "2", "2", "9"], ["1", "1", "1", "1", "9"]]


def test_json_is_one_line_with_every_action() -> None:
    asked = ("gpipe", "--workers", 4, "--microbatches", 8, "--json")
    status, out, _ = call("schedule", *asked)
    (line,) = out.splitlines()
    found = json.loads(line)
    assert status == 0
    assert (found["schedule"], found["remat"]) == ("gpipe", "always")
    assert found["makespan_slots"] == (8 + 3) * 4 - 3  # K - 1 recomputations fill waits
    assert found["bubble"] == pytest.approx(1 - 8 * 4 / found["makespan_slots"])
    assert [worker["live_activations"] for worker in found["workers"]] == [1] * 4
    assert found["workers"][3]["actions"][:9] == [f"3F{m}" for m in range(8)] + ["3R7"]


def test_no_workers_are_named_by_their_option() -> None:
    asked = ("gpipe", "--workers", 0, "--microbatches", 2)
    assert call("schedule", *asked) == (2, "", "error: --workers 0: give 1 or more\n")


def test_a_file_comes_back_as_the_same_schedule(tmp_path: Path) -> None:
    path = tmp_path / "gpipe.csv"
    asked = ("gpipe", "--workers", 3, "--microbatches", 4, "--remat", "except_last")
    _, drawn, _ = call("schedule", *asked, "--csv", path)
    assert path.read_text().splitlines()[2] == "2F0,2F1,2F2,2F3,2B3,2R2,2B2,2R1,2B1,2R0,2B0"
    path.write_text("\ufeff" + path.read_text(), encoding="utf-8")  # as a spreadsheet saves it
    assert call("schedule", "--from", path) == (0, drawn, "")


def test_several_stages_per_worker(tmp_path: Path) -> None:
    """Makespan in slots of a stage and of a whole share, and what each worker holds."""
    path = tmp_path / "zb-v.svg"
    asked = ("zb-v", "--workers", 4, "--microbatches", 8, "--draw", path, "--csv", tmp_path / "zb-v.csv")
    status, out, err = call("schedule", *asked)
    assert (status, err) == (0, "")
    found = out.splitlines()
    assert found[0] == "zb-v: 8 stages on 4 workers, 8 micro-batches, remat never, valid"
    assert found[2].startswith("worker 0 | 0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0")
    assert "makespan 51 slots, 25.5 of a worker's whole share, bubble 5.9%" in out
    assert [line.split() for line in found[-4:]] == [
        ["0", "0", "7", "8", "4", "48"], ["1", "1", "6", "8", "4", "48"],
        ["2", "2", "5", "8", "4", "48"], ["3", "3", "4", "8", "4", "48"],
    ]  # fmt: skip
    picture = path.read_text()
    assert picture.count('"FillBetweenPolyCollection_') + picture.count('"PolyCollection_') == 3 * 8 * 8
    assert call("schedule", "--from", tmp_path / "zb-v.csv") == (0, out, "")
    status, out, _ = call("schedule", "zb-v", "--workers", 4, "--microbatches", 8, "--json")
    facts = json.loads(out)
    assert (facts["num_workers"], facts["makespan_slots"], facts["makespan_shares"]) == (4, 51, 25.5)
    assert facts["placement"] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [worker["live_activations"] for worker in facts["workers"]] == [8] * 4
    assert facts["workers"][3]["stages"] == [3, 4]
    _, out, _ = call("schedule", "interleaved", "--workers", 2, "--microbatches", 4)
    assert out.startswith("interleaved: 4 stages on 2 workers"), "two a worker unless asked otherwise"


def test_a_file_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "theirs.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    status, judged, err = call("schedule", "--from", path)
    assert (status, err) == (0, "")
    assert judged.startswith("theirs: 2 stages on 2 workers")
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    why = (
        "schedule 'theirs' deadlocks: worker 0 stands at 0B0 and needs 1B0, which worker 1 takes only behind "
        "1F1; worker 1 stands at 1F1 and needs 0F1, which worker 0 takes only behind 0B0"
    )
    assert call("schedule", "--from", path) == (1, f"{path} cannot be executed: {why}\n", "")
    status, out, _ = call("schedule", "--from", path, "--json")
    assert (status, json.loads(out)["why"]) == (1, why)


PLAN = "--accelerators 4 --memory-gib 24 --batch-size 64 --device-type a10"


@pytest.mark.parametrize(
    "line",
    [
        "", "list", "list --models", "compare table1", "compare table2",
        "schedule gpipe --workers 8 --microbatches 32", "schedule zb-v --workers 8 --microbatches 24",
        "plan gpt2 --bytes --accelerators 2 --memory-gib 8",
        f"plan gpt2 --num-layers 4 {PLAN} --num-microbatches 32",
    ],
)  # fmt: skip
def test_no_output_is_wider_than_a_hundred_columns(line: str) -> None:
    status, out, err = call(*shlex.split(line))
    assert status == 0, err
    script = out.partition("the script that trains so")[0]  # a file, whose lines are as long as they are
    assert [each for each in script.splitlines() if len(each) > 100] == []

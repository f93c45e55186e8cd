"""`schedule`: the picture, what follows from it, files there and back, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import NO_TORCH, call, finish, start


def test_a_picture_with_its_length_bubble_and_activations() -> None:
    status, out, err = call(
        "schedule", "1f1b", "--num-stages", 2, "--num-microbatches", 3, "--remat", "never"
    )
    assert (status, err) == (0, "")
    found = out.splitlines()
    assert found[0] == "1f1b: 2 stages, 3 micro-batches, remat never, valid"
    assert found[2:4] == [
        "stage 0 | F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2",
        "stage 1 | .  F0 B0 B0 F1 B1 B1 F2 B2 B2",
    ]
    assert found[5].startswith("makespan 12 slots, bubble 25.0% (slots: F 1, R 1, B 2")
    assert [line.split() for line in found[-2:]] == [["0", "2", "2", "9"], ["1", "1", "1", "9"]]


def test_json_is_one_line_with_every_action() -> None:
    asked = ("gpipe", "--num-stages", 4, "--num-microbatches", 8, "--json")
    status, out, _ = call("schedule", *asked)
    (line,) = out.splitlines()
    found = json.loads(line)
    assert status == 0
    assert (found["schedule"], found["remat"]) == ("gpipe", "always")
    assert found["makespan_slots"] == (8 + 3) * 4 - 3  # K - 1 recomputations fill waits
    assert found["bubble"] == pytest.approx(1 - 8 * 4 / found["makespan_slots"])
    assert [stage["in_flight"] for stage in found["stages"]] == [8] * 4
    assert [stage["live_activations"] for stage in found["stages"]] == [1] * 4
    assert found["stages"][3]["actions"][:9] == [f"3F{m}" for m in range(8)] + ["3R7"]


def test_a_file_comes_back_as_the_same_schedule(tmp_path: Path) -> None:
    path = tmp_path / "gpipe.csv"
    asked = ("gpipe", "--num-stages", 3, "--num-microbatches", 4, "--remat", "except_last")
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
    assert picture.count("<g>") == 3 * 8 * 8
    assert "stage 3, 4" in picture
    assert call("schedule", "--from", tmp_path / "zb-v.csv") == (0, out, "")
    status, out, _ = call("schedule", "zb-v", "--num-stages", 8, "--microbatches", 8, "--json")
    facts = json.loads(out)
    assert (facts["num_workers"], facts["makespan_slots"], facts["makespan_shares"]) == (4, 51, 25.5)
    assert facts["placement"] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [worker["live_activations"] for worker in facts["workers"]] == [8] * 4
    assert facts["workers"][3]["stages"] == [3, 4]


def test_loops_of_more_stages_and_recomputation() -> None:
    asked = (
        "interleaved",
        "--workers",
        2,
        "--stages-per-worker",
        3,
        "--microbatches",
        4,
        "--remat",
        "always",
    )
    status, out, _ = call("schedule", *asked)
    assert status == 0
    assert out.startswith("interleaved: 6 stages on 2 workers, 4 micro-batches, remat always, valid")
    assert out.count("4R3") == 1
    assert out.index("4R3") < out.index("4B3")


def test_a_schedule_is_drawn_where_torch_is_missing() -> None:
    asked = ("schedule", "naive", "--num-stages", 2, "--num-microbatches", 1)
    status, out, _ = finish(start(*asked, code=NO_TORCH))
    assert status == 0
    assert "stage 1 | .  F0 B0 B0" in out


PRINTED = {
    "table": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "zero-bubble": "f0 sf0 f1 rb0 b0 w0 rb1 b1 w1 F0 rf0 B0 W0 F1 B1 W1\n",
    "Primus": "loading\n\x1b[33mRank 0: (F|0|0),(SF|0|0),(F|1|0),(BW|0|0),(BW|1|0)\n"
    "Rank 1: (RF|0|0),(F|0|0),(BW|0|0),(F|1|0),(BW|1|0)\n",
    "V": "f0 f1 F0 B0 F1 B1 b0 b1\nf0 F0 f1 F1 B0 b0 B1 b1\n",
    "loop": "f0 f1 F0 F1 B0 B1 b0 b1\nf0 f1 F0 B0 F1 B1 b0 b1\n",
}


@pytest.mark.parametrize(
    ("printed", "form", "verdict", "actions", "placement"),
    [
        ("table", "a table of actions", "runs", "1F0 1B0 1F1 1B1", None),
        ("zero-bubble", "zero-bubble's rows", "stops", None, None),  # one worker's, and in a wrong order
        ("Primus", "Primus' table", "runs", "1F0 1B0 1F1 1B1", None),
        ("V", "zero-bubble's rows", "runs", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1", [0, 1, 1, 0]),
        ("loop", "zero-bubble's rows", "runs", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1", [0, 1, 0, 1]),
    ],
)
def test_what_others_print_is_read_and_judged(
    tmp_path: Path, printed: str, form: str, verdict: str, actions: str | None, placement: list[int] | None
) -> None:
    path = tmp_path / "theirs.txt"
    path.write_text(PRINTED[printed])
    status, out, err = call("schedule", "check", path, "--json")
    (found,) = map(json.loads, out.splitlines())
    assert (status, err) == (int(verdict != "runs"), "")
    assert (found["form"], found["verdict"], found.get("placement")) == (form, verdict, placement)
    if actions is not None:
        assert found["workers" if placement else "stages"][1]["actions"] == actions.split()
        assert 0 < found["bubble"] < 1
        assert call("schedule", "--from", path)[0] == 0


def test_where_a_schedule_stops_is_said_and_drawn(tmp_path: Path) -> None:
    path, picture = tmp_path / "theirs.csv", tmp_path / "theirs.svg"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    status, out, err = call("schedule", "check", path, "--draw", picture)
    assert (status, err) == (1, "")
    assert out.splitlines() == [
        f"{path}, a table of actions: stops after 2 of 8 actions",
        "  worker 0 stands at 0B0 and waits for what 1B0 makes, which worker 1 takes only behind 1F1",
        "  worker 1 stands at 1F1 and waits for what 0F1 makes, which worker 0 takes only behind 0B0",
        "",
        "stage 0 | F0 | stands at 0B0",
        "stage 1 | .  F0 | stands at 1F1",
    ]
    assert '<text x="714.00" y="45" fill="#d62728">0B0</text>' in picture.read_text()
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    status, out, _ = call("schedule", "check", path)
    assert status == 0
    assert out.endswith("buffers that every ring comes out with: 2 for activations, 2 for gradients\n")
    status, out, _ = call("schedule", "check", path, "--buffers", 1)
    assert (status, out.splitlines()[0]) == (
        1,
        f"{path}, a table of actions: stops with 1 buffer after 3 of 8 actions",
    )
    path.write_text("0F0,0B0\n")
    status, out, _ = call("schedule", "check", path, "--json")
    assert (status, json.loads(out)["buffers"]) == (0, {"activations": 0, "gradients": 0})
    path.write_text("0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n")
    assert "mixes up messages after 2 of 8 actions" in call("schedule", "check", path)[1]
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n")
    status, out, _ = call("schedule", "check", path)
    assert status == 1
    assert "incomplete\n  stage 1 takes micro-batch 1 through F; with remat='never' it needs F B" in out

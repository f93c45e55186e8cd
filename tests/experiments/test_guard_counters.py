"""The exact numbers: equal to the committed ones, and anything that moves them is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_bench.experiments.commands.guard import COUNTERS
from gpipe_bench.experiments.guard.counters import (
    CASES,
    content,
    counters,
    differences,
    encode,
    load,
    of_schedule,
)
from gpipe_bench.pipeline import gpipe, one_f_one_b
from gpipe_bench.pipeline.stage.layers import LayerRunner

SMALL = CASES[0]


@pytest.fixture(scope="module")
def found() -> dict:
    return content()


def changes(before: dict, now: dict) -> list[str]:
    return differences({"counters": before}, {"counters": now, "benchmarks": []})


def test_the_committed_numbers_are_what_the_code_does(found: dict) -> None:
    assert differences(load(COUNTERS), found) == [], "see docs/guard.md, --update"
    assert COUNTERS.read_text(encoding="utf-8") == encode(found)


def test_the_numbers_are_those_of_the_algebra(found: dict) -> None:
    """K = 4, M = 8: (M + K - 1) rounds of F and B, and recomputations that hide in no gap but the last."""
    plain = found["counters"]["transformer-lm gpipe K=4 M=8 never"]
    again = found["counters"]["transformer-lm gpipe K=4 M=8 always"]
    kept = found["counters"]["transformer-lm gpipe K=4 M=8 except_last"]
    assert plain["makespan in slots"] == 3 * (8 + 4 - 1)
    assert plain["bubble"] == "3/11"
    assert again["graphs alive, per stage"] == "1 1 1 1"
    assert plain["graphs alive, per stage"] == "8 8 8 8"
    assert plain["messages forward"] == plain["messages backward"] == 3 * 8
    # (N, T, d) of float32 for each of the 3 boundaries.
    assert plain["bytes forward"] == 3 * 16 * 8 * 16 * 4
    # A forward is a third of forward and backward here: recomputing all of them adds a third.
    assert 3 * again["flops"] == 4 * plain["flops"]
    assert 24 * kept["flops"] == 31 * plain["flops"]
    one = found["counters"]["transformer-lm 1f1b K=4 M=8 never"]
    assert one["graphs alive, per stage"] == "4 3 2 1"


def test_a_second_recomputation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before, once = counters(SMALL), LayerRunner.run

    def twice(self: LayerRunner, m: int, value: object, *, recording: bool) -> object:
        if not recording:  # a recomputation
            once(self, m, value, recording=False)
        return once(self, m, value, recording=recording)

    monkeypatch.setattr(LayerRunner, "run", twice)
    (line,) = changes({"case": before}, {"case": counters(SMALL)})
    assert line == f"case: flops {before['flops']} -> {before['flops'] * 5 // 4}"


def test_a_schedule_that_holds_more_or_idles_more_is_seen() -> None:
    before = {"case": of_schedule(one_f_one_b(4, 8, "never"))}
    lines = changes(before, {"case": of_schedule(gpipe(4, 8, "never"))})
    assert lines == [
        'case: graphs alive, per stage "4 3 2 1" -> "8 8 8 8"',
        'case: micro-batches in flight, per stage "4 3 2 1" -> "8 8 8 8"',
    ]


def test_missing_and_new_entries_are_differences() -> None:
    expected = {"gone": {"x": 1}, "both": {"x": 1, "lost": 2}}
    found = {"both": {"x": 1, "fresh": 3}, "new": {"x": 1}}
    assert differences(
        {"counters": expected, "benchmarks": ["a", "b"]}, {"counters": found, "benchmarks": ["b", "c"]}
    ) == [
        "gone: x 1 -> nothing",
        "both: lost 2 -> nothing",
        "benchmark a timed -> nothing",
        "both: fresh nothing -> 3",
        "new: x nothing -> 1",
        "benchmark c nothing -> timed",
    ]


@pytest.mark.parametrize("value", [4.0, True, "4", None, [4]])
def test_only_the_same_number_of_the_same_type_is_equal(value: object) -> None:
    assert len(changes({"a": {"x": value}}, {"a": {"x": 4}})) == 1


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_broken_file_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "counters.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="write it"):
        load(path)

"""The exact numbers: equal to the committed ones, and anything that moves them is seen."""

from __future__ import annotations

import pytest

from gpipe_bench.experiments.commands.guard import COUNTERS
from gpipe_bench.experiments.guard.counters import (
    CASES,
    content,
    counters,
    differences,
    encode,
    load,
)
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
    assert line.startswith(f"case: flops {before['flops']} -> ")
    assert line.endswith("(+25.000%)")


def test_missing_and_new_entries_are_differences() -> None:
    expected = {"gone": {"x": 1}, "both": {"x": 1, "lost": 2}}
    found = {"both": {"x": 1, "fresh": 3}, "new": {"x": 1}}
    assert differences(
        {"counters": expected, "benchmarks": ["a", "b"]}, {"counters": found, "benchmarks": ["b", "c"]}
    ) == [
        "gone: missing, but in the file",
        "new: new, not in the file",
        "both: lost: missing, but in the file",
        "both: fresh: new, not in the file",
        "benchmark a: missing, but in the file",
        "benchmark c: new, not in the file",
    ]

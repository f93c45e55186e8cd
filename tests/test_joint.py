"""Tables judged as a whole: one setting must give everything, and what cancels is what is compared."""

from __future__ import annotations

import pytest

from gpipe_bench.harness.hypotheses import Claim, Condition, Walk, joint_text, judge_jointly, load_claims
from gpipe_bench.harness.paper import PaperNumber

A, B = ("t", "r", "a"), ("t", "r", "b")
PAPER = [
    PaperNumber(
        table="t", row="r", column=name, value=value, printed=f"{value:g}", unit="ratio", kind="result",
        source="paper",
    )
    for name, value in (("a", 2.0), ("b", 4.0))
]  # fmt: skip
SETTINGS = [{"batch": 1}, {"batch": 2}, {"batch": 3}]


def claim(*conditions: Condition, **more: str) -> Claim:
    return Claim(name="n", table="t", statement="s", conditions=conditions, **more)


def judged(values_a, values_b, *conditions: Condition, error=(1.0, 1.0), **more: str):
    walk = Walk("t", SETTINGS, {A: values_a, B: values_b}, error)
    (found,) = judge_jointly([walk], [claim(*conditions, **more)], PAPER)
    return found


BOTH = (Condition(over=("r | a",)), Condition(over=("r | b",)))


def test_every_cell_may_be_met_by_a_setting_of_its_own_and_all_by_none() -> None:
    found = judged([2.0, 9.0, 1.0], [1.0, 4.0, 2.0], *BOTH)
    assert (found.verdict, len(found.holding), found.tried) == ("impossible", 0, 3)
    assert found.nearest == pytest.approx(3.5 / 2), (
        "the last, of which b is 2 and the least that rounds to 4 is 3.5"
    )
    assert "0 of 3 settings" in found.words


def test_the_settings_that_give_all_are_listed_and_those_without_numbers_are_not_tried() -> None:
    found = judged([2.0, 2.2, None], [4.0, 7.0, 4.0], *BOTH, by="batch")
    assert (found.verdict, found.holding, found.tried) == ("possible", ({"batch": 1},), 2)
    assert found.words == "possible (1 of 2 settings)"
    assert found.split == {"1": (1, 1), "2": (0, 1)}
    text = joint_text([found])
    assert "t: s" in text
    assert "4 to 7 (4)" in text
    assert "possible (1 of 2 settings)" in text
    assert max(map(len, text.splitlines())) <= 120


def test_in_a_quotient_what_moves_both_cancels() -> None:
    apart = Condition(over=("r | b",), under=("r | a",), within=0.1)
    found = judged([20.0, 200.0, 1.0], [40.0, 400.0, 9.0], apart)
    assert [each["batch"] for each in found.holding] == [1, 2]
    assert judged([1e-15, 2.0, None], [4.0, 4.0, 4.0], apart).tried == 1, "nothing is divided by zero, nearly"
    assert found.numbers == ((pytest.approx(2.0, rel=0.1), 2.0, 9.0),)


def test_the_predictions_error_makes_possible_what_it_says_and_moves_no_order() -> None:
    found = judged([3.0, 5.0, 5.0], [4.0, 4.0, 4.0], BOTH[0], error=(0.8, 1.2))
    assert (found.verdict, len(found.holding), found.exact) == ("possible", 1, 0)
    assert found.words == (
        "possible (1 of 3 settings; 0 without the prediction's error, the nearest is off by 1.2 times)"
    )
    order = Condition(over=("r | a",), under=("r | b",), at_least=1)
    assert len(judged([5.0, 5.0, 3.9], [4.0, 4.0, 4.0], order, error=(0.8, 1.2)).holding) == 2


def test_a_claim_without_its_walk_is_not_answered() -> None:
    assert judge_jointly([Walk("other", SETTINGS, {})], [claim(*BOTH)], PAPER) == []
    assert judge_jointly([Walk("t", SETTINGS, {A: [1.0] * 3})], [claim(*BOTH)], PAPER) == []


def test_the_file_names_numbers_of_the_paper() -> None:
    assert len(load_claims()) > 20

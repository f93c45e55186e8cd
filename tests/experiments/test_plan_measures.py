"""How predictions are judged: errors, ranks, regret, and which candidates are run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.experiments.beyond.plan.rules import (
    RULES,
    Compared,
    Peaks,
    Rule,
    found,
    rank_correlation,
    regret,
)
from gpipe_bench.experiments.beyond.plan.steps import to_run

SOME = [
    Compared("one", "a", 1.0, 1.1, chosen=True),
    Compared("one", "b", 1.2, 1.0, chosen=True),
    Compared("one", "c", 2.0, 2.5),
    Compared("two", "a", 3.0, 3.0, chosen=True),
    Compared("two", "b", 4.0, 3.2),
]


def test_the_error_is_that_of_the_prediction_with_its_sign() -> None:
    assert SOME[0].error == pytest.approx(1 / 1.1 - 1)
    assert SOME[1].error == pytest.approx(0.2)


def test_regret_is_what_the_first_choice_took_over_the_fastest_that_ran() -> None:
    assert regret(SOME[:3]) == pytest.approx(0.1)
    assert regret(SOME[3:]) == 0


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=12))
def test_rank_correlation_is_scipys(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    one, other = (list(map(float, column)) for column in zip(*pairs, strict=True))
    varied = len(set(one)) > 1 and len(set(other)) > 1
    expected = stats.spearmanr(one, other).statistic if varied else 0.0
    assert rank_correlation(one, other) == pytest.approx(expected)


def test_all_configurations_count_once_and_models_by_their_median() -> None:
    numbers = found(SOME, [Peaks("one", "a", (100, 50), (101, 60))])
    expected = {
        "configurations": 5,
        "models": 2,
        "median_error": 0.2,
        "worst_error": 0.25,
        "rank_correlation": (0.5 + 1) / 2,
        "median_regret": 0.05,
        "worst_regret": 0.1,
        "memory_error": 1 / 101,  # the fullest worker's, not the worst
    }
    assert numbers == pytest.approx(expected)
    assert {rule.number for rule in RULES} == set(numbers)


def test_the_worst_worker_keeps_its_sign() -> None:
    peaks = Peaks("one", "a", (100, 50), (101, 60))
    assert peaks.error == pytest.approx(-1 / 101)
    assert peaks.of_any == pytest.approx(-1 / 6)


def test_a_rule_holds_on_its_bound() -> None:
    assert Rule("", "", True, 20).holds(20)
    assert not Rule("", "", True, 20).holds(19)
    assert Rule("", "", False, 0.05).holds(0.05)
    assert not Rule("", "", False, 0.05).holds(0.051)


@pytest.mark.parametrize("total", range(1, 40))
def test_the_best_five_run_and_five_others_down_to_the_last(total: int) -> None:
    ranking = list(range(total))
    places = [place for place, _ in to_run(ranking, 5, 5)]  # type: ignore[arg-type]
    assert places[:5] == list(range(min(total, 5)))
    assert len(places) == len(set(places)) == min(total, 10)
    assert places == sorted(places)
    assert places[-1] == total - 1

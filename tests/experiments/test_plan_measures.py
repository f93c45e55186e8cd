"""How predictions are judged, and the experiment on grids."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from records import metric, record
from waiting_grid import Waits

from gpipe_bench.experiments.beyond import grid, plan
from gpipe_bench.experiments.beyond.plan_steps import BY_THE_CLOCK, PREDICTED, STEP, to_run
from gpipe_bench.harness.record import Record

SOME = {
    "one": {"a": (1.0, 1.1), "b": (1.2, 1.0), "c": (2.0, 2.5)},
    "two": {"a": (3.0, 3.0), "b": (4.0, 3.2)},
}
"""By model and configuration, milliseconds that were predicted and measured."""


def records(void: str = "") -> list[Record]:
    """Of the models; the model `void` is."""
    found = []
    for model, ways in SOME.items():
        numbers = [
            metric(value, name=name, key={"configuration": way}, unit="ms", low=value, high=value)
            for way, (predicted, measured) in ways.items()
            for name, value in ((PREDICTED, predicted), (STEP, measured), (BY_THE_CLOCK, 2 * measured))
        ]
        details = {
            "title": model, "scale": "tiny", "batch_size": 8, "chosen": 2,
            "plan": {"places": [*range(len(ways))], "ranking": [{"name": way} for way in ways]},
            "costs": {"plan_s": 1.0, "probes_s": 2.0},
        }  # fmt: skip
        if model == void:
            details["void"] = "somebody else was there"
        case = {"part": "steps", "model": model}
        found.append(record(experiment="plan", case=case, metrics=tuple(numbers), details=details))
    return found


def test_regret_is_what_the_first_choice_took_over_the_fastest_that_ran() -> None:
    own = plan.choices(plan.ran(records()))
    assert own.regret.to_dict() == pytest.approx({"one": 0.1, "two": 0.0})
    assert own["rank correlation"].to_dict() == pytest.approx({"one": 0.5, "two": 1.0})


def test_all_configurations_count_once_and_models_by_their_median() -> None:
    numbers = plan.found(plan.ran(records()))
    expected = {
        "configurations": 5,
        "models": 2,
        "median_error": 0.2,
        "worst_error": 0.25,
        "rank_correlation": (0.5 + 1) / 2,
        "median_regret": 0.05,
        "worst_regret": 0.1,
    }
    assert numbers == pytest.approx(expected)
    assert {number for _, number, *_ in plan.RULES} == set(numbers)


def test_what_is_void_is_shown_and_not_judged() -> None:
    text = plan.tables(records(void="one"))
    assert "void: somebody else was there; measure again" in text
    assert next(line for line in text.splitlines() if line.startswith("models among them")).split()[-2:] == [
        "1",
        "NO",
    ]
    assert len(plan.figures(records(void="one"))) == 1
    assert plan.figures([]) == []


@pytest.mark.parametrize("total", range(1, 40))
def test_the_best_five_run_and_five_others_down_to_the_last(total: int) -> None:
    alone = SimpleNamespace(candidate=SimpleNamespace(replicas=1))
    places = to_run([alone] * total, 5, 5)  # type: ignore[list-item]
    assert places[:5] == list(range(min(total, 5)))
    assert len(places) == len(set(places)) == min(total, 10)
    assert places == sorted(places)
    assert places[-1] == total - 1


def test_traffic_by_hand() -> None:
    """Four layers of equal cost: with K = 2 the cut is after the second, with K = 4 after each."""
    ahead, back, costs = (10, 20, 30, 40), (10, 16, 30, 40), (5, 5, 5, 5)
    assert grid.pipeline_bytes(ahead, back, 2, costs) == 20
    assert grid.pipeline_bytes(ahead, back, 2, (1, 1, 1, 997)) == 30  # the cut is before the last
    assert grid.pipeline_bytes(ahead, back, 4, costs) == 30 + 16  # the third: its output, and a gradient back
    assert [grid.replica_bytes(4000, ranks) for ranks in (2, 4)] == [4000, 6000]


# Sums over replicas leave inside the last backward and run beside it


@pytest.mark.alone
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_reaches_nine_tenths_of_the_replays_speed(schedule: str) -> None:
    """Which it cannot without overlap: all sums behind the backward would take longer than that allows."""
    case = Waits(schedule)
    replayed_s = case.replayed().makespan_s
    assert replayed_s / case.replayed(overlap=False).makespan_s < 0.9
    # The machine is busy with other things, too, which can only make a step slower.
    step_s, timeline = case._replace(num_steps=20, enough_s=replayed_s / 0.9).measure()
    assert replayed_s / step_s >= 0.9, timeline

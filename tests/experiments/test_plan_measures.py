"""How predictions are judged, and the experiment on grids."""

from __future__ import annotations

import pytest
from records import metric, record
from waiting_grid import LAYERS, Waits

from gpipe_bench.experiments.beyond import grid
from gpipe_bench.experiments.beyond.plan import experiment as plan
from gpipe_bench.experiments.beyond.plan import peaks
from gpipe_bench.experiments.beyond.plan.steps import BY_THE_CLOCK, PREDICTED, STEP, to_run
from gpipe_bench.harness.record import Record
from gpipe_bench.pipeline import Kind
from gpipe_bench.planner.collectives import all_reduce_s

SOME = {
    "one": {"a": (1.0, 1.1), "b": (1.2, 1.0), "c": (2.0, 2.5)},
    "two": {"a": (3.0, 3.0), "b": (4.0, 3.2)},
}
"""By model and configuration, milliseconds that were predicted and measured."""


def records(void: str = "") -> list[Record]:
    """Of the models, of which the first has counted peaks, too; the model `void` is."""
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
    counted = tuple(
        metric(value, name=name, key={"configuration": "a", "worker": worker}, unit="bytes")
        for worker, (mine, theirs) in enumerate([(100, 101), (50, 60)])
        for name, value in ((peaks.COUNTED, theirs), (peaks.MODELLED, mine))
    )
    case = {"part": "peaks", "model": "one"}
    return [*found, record(experiment="plan", case=case, metrics=counted, details={"title": "one"})]


def test_regret_is_what_the_first_choice_took_over_the_fastest_that_ran() -> None:
    own = plan.choices(plan.ran(records()))
    assert own.regret.to_dict() == pytest.approx({"one": 0.1, "two": 0.0})
    assert own["rank correlation"].to_dict() == pytest.approx({"one": 0.5, "two": 1.0})


def test_all_configurations_count_once_and_models_by_their_median() -> None:
    numbers = plan.found(plan.ran(records()), plan.counted(records()))
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
    assert {rule.number for rule in plan.RULES} == set(numbers)


def test_what_is_void_is_shown_and_not_judged() -> None:
    text = plan.tables(records(void="one"))
    assert "void: somebody else was there; measure again" in text
    assert next(line for line in text.splitlines() if line.startswith("models among them")).split()[-2:] == [
        "1",
        "NO",
    ]
    assert len(plan.figures(records(void="one"))) == 1
    assert plan.figures(records()[-1:]) == []


@pytest.mark.parametrize("total", range(1, 40))
def test_the_best_five_run_and_five_others_down_to_the_last(total: int) -> None:
    ranking = list(range(total))
    places = [place for place, _ in to_run(ranking, 5, 5)]  # type: ignore[arg-type]
    assert places[:5] == list(range(min(total, 5)))
    assert len(places) == len(set(places)) == min(total, 10)
    assert places == sorted(places)
    assert places[-1] == total - 1


def test_a_link_is_that_of_which_two_sums_took_as_long() -> None:
    link = grid.link_of((1e-3, 9e-3), "made up")
    assert [all_reduce_s(size, 2, link) for size in grid.SUM_BYTES] == pytest.approx([1e-3, 9e-3])


def test_the_replay_of_what_ran_has_the_sums_behind_what_they_cannot_hide_in() -> None:
    """Four forwards of 1 s and backwards of 2 s, the last one of 3 s, since a sum is inside of it; the second
    bucket's sum is behind it. The other replica needs half as long.
    """
    job = grid.Job(2, 1, "smoke", 0)
    half = grid.BUCKET_BYTES
    backwards_s = (3.0, 2.0, 2.0, 2.0)  # GPipe's last one is of the first micro-batch
    actions_s = {(0, "B", m): each for m, each in enumerate(backwards_s)} | {
        (0, "F", m): 1.0 for m in range(4)
    }
    quick_s = {action: seconds / 2 for action, seconds in actions_s.items()}
    slow, quick = (
        grid.Ran([13.0], [each], [[[half], [half]]], 0, (0.0, 0.0)) for each in (actions_s, quick_s)
    )
    link = grid.link_of((grid.SUM_BYTES[0] * 1e-7, grid.SUM_BYTES[1] * 1e-7), "made up")
    sum_s = half * 1e-7
    assert sum_s < 1
    assert grid.laid_out_s(job, [quick, slow], link) == pytest.approx(4 * 3 + 1 + sum_s)


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
    for stage in range(2):
        last = [event for event in timeline.of_stage(stage) if event.action.kind is Kind.B][-1]
        sums = [span for span in timeline.collectives if span.stage == stage]
        assert len(sums) == LAYERS
        # All but the last layer's run while the backward goes on.
        inside = [span for span in sums if last.start_s < span.start_s and span.end_s < last.end_s]
        assert len(inside) >= LAYERS - 2
        assert sums[-1].end_s > last.end_s

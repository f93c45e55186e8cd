"""Schedules, plans and grids: what others published recomputed, and how predictions are judged."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from records import metric, ran, record

from gpipe_bench.experiments.beyond import grid, plan, schedules
from gpipe_bench.experiments.beyond.plan import EXPERIMENT as PLAN
from gpipe_bench.experiments.beyond.plan_steps import to_run
from gpipe_bench.experiments.beyond.schedules import EXPERIMENT
from gpipe_bench.experiments.beyond.trainings import BY_THE_CLOCK, PREDICTED, STEP
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Record

PRINTED = {cell.key: cell for cell in load_paper() if cell.source == "others"}
RATES = [
    row
    for row in schedules.load_rows()
    if row.table == "zero-bubble" and row.num_workers <= 16 and not row.row.endswith("ZB-2p")
]


@pytest.mark.parametrize("row", RATES, ids=lambda each: f"{each.row}, {each.column}")
def test_rates_of_table_5_agree_to_the_last_printed_digit(row) -> None:
    """Whatever is printed of it, but ZB-2p, which a search found that is not ours."""
    (setting,) = row.settings
    assert f"{schedules.value_of(row, *setting):.4f}" == PRINTED[row.table, row.row, row.column].printed


def test_every_published_number_has_a_row_and_an_entry_with_its_unit_and_a_verdict() -> None:
    rows = {(row.table, row.row, row.column) for row in schedules.load_rows()}
    assert rows == {key for key in PRINTED if key[0] in EXPERIMENT.paper_tables}
    records = [
        ran(EXPERIMENT, {"part": "published", "table": table})
        for table in ("schedules-formulas", "schedules-elsewhere")
    ]
    entries = EXPERIMENT.cells(records)
    for entry in entries:
        assert PRINTED[entry.place].unit == entry.metric.unit
    found = {(c.row, c.column): c for c in compare(entries, whole=[])}
    verdicts = {
        ("bubble, stages in a loop", "OLMo-core, K=4, M=8"): "reproduced",
        ("stages' micro-batches alive, worker 3", "OLMo-core, K=4, M=8"): "reproduced",
        ("v-min over 1F1B, memory", "Primus, Llama2-7B, K=8"): "not comparable",
        ("activations of V-Min", "p=8, m=32"): "reproduced",
        ("bubble rate of V-Half", "p=8, m=32"): "reproduced",
    }
    assert {key: found[key].verdict for key in verdicts} == verdicts


# Slots of M = K, 2K and 4K, as the closed forms have them.


def test_graphs_alive_are_counted_from_recomputation_to_the_weights() -> None:
    found = ran(EXPERIMENT, {"part": "equal costs", "num_workers": 4})
    alive = {
        ("gpipe", "never"): 8, ("gpipe", "always"): 1, ("interleaved", "never"): 5.5,
        ("zb-h1", "always"): 4, ("v-min", "never"): 2,
    }  # fmt: skip
    for (name, remat), graphs in alive.items():
        assert found.metric("graphs alive", schedule=name, M=8, remat=remat).value == graphs, name
    text = EXPERIMENT.tables([found])
    assert all(f"\n{name} " in text for name in schedules.NAMES)
    made = [schedules.schedule_of(name, 4, 8, "never") for name in ("generated", "generated, V")]
    assert [(each.num_stages, each.num_workers) for each in made] == [(4, 4), (8, 4)]
    assert EXPERIMENT.tables([]) == ""


def test_every_published_step_says_what_it_was() -> None:
    found = plan.steps()
    assert len({step.name for step in found}) == len(found) >= 8
    for step in found:
        assert step.source
        assert step.differs
        assert step.pp * step.dp * step.fsdp * step.tp == step.accelerators
        assert step.batch_size % (step.dp * step.fsdp * step.num_microbatches) == 0
        assert bool(step.speed) != bool(step.step_s)


@pytest.mark.parametrize(
    ("name", "measured_s", "step_s"),
    [
        ("Llama 3 8B, 8 H100, FSDP", 2.843, 2.98),
        ("Llama 2 13B, 64 A100, FSDP", 3.789, 3.74),
        ("GPT-3 22B, 8 A100, TP", 1.42, 1.47),
    ],
)
def test_a_published_step_is_predicted(name: str, measured_s: float, step_s: float) -> None:
    (step,) = (each for each in plan.steps() if each.name == name)
    middle_s, low_s, high_s = step.predicted()
    assert step.measured_s == pytest.approx(measured_s, rel=1e-3)
    assert middle_s == pytest.approx(step_s, rel=0.02)
    assert low_s < step.measured_s < high_s < 1.6 * low_s


def test_published_steps_are_recorded_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    few = plan.steps()[:2]
    monkeypatch.setattr(plan, "steps", lambda: few)
    ranges = iter([(few[0].measured_s, 2.0, 3.0), (9.0, 8.0, 12.0)])
    monkeypatch.setattr(plan.Step, "predicted", lambda step: next(ranges))
    found = ran(PLAN, {"part": plan.PUBLISHED_STEPS})
    assert [each.value for each in found.metrics] == [few[0].measured_s, 9.0]
    text = plan.tables([found])
    assert "1 of 2 inside, the widest range a factor of 1.50; asked: 75% of them, and at most 1.6: NO" in text
    assert plan.figures([found]) == []


def test_a_sweep_is_judged_by_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the third way there is twice the mini-batch, so that it is the fastest that was measured; the second
    one is predicted to be.
    """
    step = replace(plan.steps()[0], name="a sweep", speed=0.0, memory_gib=0.0)
    ways = tuple(
        replace(step, num_microbatches=number, batch_size=size, step_s=measured_s)
        for number, size, measured_s in ((1, 8, 4.0), (2, 8, 3.0), (4, 16, 5.0))
    )
    monkeypatch.setattr(plan, "sweeps", lambda: {"a sweep": ways})
    assert PLAN.cases(RunOptions(profile="short"))[-1].key == {"part": plan.SWEEPS}
    ranges = iter([(4.0, 3.5, 4.5), (2.0, 1.5, 2.5), (6.0, 4.0, 7.0)])
    monkeypatch.setattr(plan.Step, "predicted", lambda step: next(ranges))
    found = ran(PLAN, {"part": plan.SWEEPS})
    numbered = {str(each.key["name"]).partition(":")[0] for each in found.metrics}
    assert numbered == {"a sweep, 1", "a sweep, 2", "a sweep, 3"}
    line = next(line for line in plan.tables([found]).splitlines() if line.startswith("a sweep"))
    assert line.split()[2:] == ["3", "2", "0.50", "20.0", "%"]


# Predictions and what ran

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
    alone = SimpleNamespace(candidate=SimpleNamespace(grid=SimpleNamespace(replicas=1)))
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

"""The experiment on schedules: published rates to the last digit, the grid, what the records say."""

from __future__ import annotations

import pytest
from records import record

from gpipe_bench.experiments.schedules import figures, grid, published, zero_bubble
from gpipe_bench.experiments.schedules.beside import side_by_side
from gpipe_bench.experiments.schedules.experiment import EXPERIMENT
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.pipeline.plan.validate import validate

PRINTED = {cell.key: cell for cell in load_paper() if cell.source == "others"}
SMALL = [setting for setting in zero_bubble.SETTINGS if setting.num_workers <= 16]


def ran(key, profile="short"):
    found = EXPERIMENT.run(Case(key), RunOptions(profile=profile))
    return record(
        experiment="schedules", profile=profile, case=key, quantities=found.quantities, details=found.details
    )


def digits(setting, name: str) -> str:
    return f"{setting.rate(zero_bubble.COSTS[name](setting)):.4f}"


@pytest.mark.parametrize("setting", SMALL, ids=lambda each: each.column)
def test_rates_of_table_5_agree_to_the_last_printed_digit(setting) -> None:
    """Whatever is printed of it, but ZB-2p, which a search found that is not ours."""
    for name in ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-1p"):
        cell = PRINTED.get((published.RATES, f"bubble rate of {name}", setting.column))
        assert cell is None or digits(setting, name) == cell.printed, name


def test_six_rates_of_interleaving_and_all_others_are_printed() -> None:
    """48 of the 54 numbers that follow from the printed times, and the twelve of ZB-2p."""
    rows = [key[1] for key in PRINTED if key[0] == published.RATES]
    counted = {name: rows.count(f"bubble rate of {name}") for name in zero_bubble.COSTS}
    assert counted == {"1F1B": 12, "1F1B-I": 6, "ZB-H1": 12, "ZB-H2": 12, "ZB-1p": 12, "ZB-2p": 12}


def test_the_cost_of_zb_h2_is_a_span_and_not_the_makespan() -> None:
    """With the makespan the rate would be 0.1003 and not 0.0698."""
    setting = zero_bubble.SETTINGS[3]
    schedule = zero_bubble.named("zb-h2", setting.num_workers, setting.num_microbatches)
    timeline = zero_bubble.replay(schedule, setting.times_ms(), setting.link)
    assert f"{setting.rate(timeline.makespan_s):.4f}" == "0.1003"
    assert f"{setting.rate(zero_bubble.span_ms(timeline)):.4f}" == "0.0698"


def test_a_searched_schedule_is_no_longer_than_the_written_one_and_keeps_to_its_memory() -> None:
    setting = zero_bubble.SETTINGS[0]
    for share, name in ((1, "zb-h1"), (2, "zb-h2")):
        assert zero_bubble.searched_ms(setting, share) <= zero_bubble.cost_ms(name, setting) + 1e-9
    assert zero_bubble.held(zero_bubble.named("zb-h1", 8, 24), setting) == pytest.approx(8, abs=1)
    assert zero_bubble.held(zero_bubble.named("gpipe", 8, 24), setting) == 24


def test_every_published_number_has_an_entry_with_its_unit_and_a_verdict() -> None:
    records = [
        ran({"part": "published", "what": published.RATES, "model": "1.5B"}),
        ran({"part": "published", "what": published.RATES_V}),
        ran({"part": "published", "what": published.ELSEWHERE}),
    ]
    entries = EXPERIMENT.cells(records)
    for entry in entries:
        assert PRINTED[entry.place].unit == entry.quantity.unit
    found = {(c.row, c.column): c for c in compare(entries, whole=[])}
    expected = {key[1:] for key in PRINTED if key[0] in EXPERIMENT.paper_tables}
    assert {key for key in expected if "B, " not in key[1] or key[1].startswith("1.5B, p=8")} <= set(found)
    assert found["bubble, stages in a loop", "OLMo-core, K=4, M=8"].verdict == "reproduced"
    assert found["stages' micro-batches alive, worker 3", "OLMo-core, K=4, M=8"].verdict == "reproduced"
    assert found["v-min over 1F1B, memory", "Primus, Llama2-7B, K=8"].verdict == "not comparable"
    assert found["bubble rate of ZB-2p", "1.5B, p=8, m=24"].verdict == "above"
    text = EXPERIMENT.tables(records, compare(entries, whole=[]))
    assert "bubble rate of ZB-V" in text


# Slots of M = K, 2K and 4K, as the closed forms have them.
SLOTS = {
    ("1f1b", 2): (9, 15, 27), ("1f1b", 4): (21, 33, 57), ("1f1b", 8): (45, 69, 117),
    ("interleaved", 2): (7.5, 13.5, 25.5), ("interleaved", 4): (16.5, 28.5, 52.5),
    ("interleaved", 8): (34.5, 58.5, 106.5),
    ("zb-h1", 2): (7, 13, 25), ("zb-h1", 4): (15, 27, 51), ("zb-h1", 8): (31, 55, 103),
    (grid.GENERATED, 4): (15, 27, 51), (grid.GENERATED_V, 4): (13.5, 25.5, 49.5),
}  # fmt: skip


@pytest.mark.parametrize(("name", "num_workers"), SLOTS)
def test_steps_in_slots(name: str, num_workers: int) -> None:
    found = [grid.laid_out(name, num_workers, times * num_workers, "never").makespan for times in grid.TIMES]
    assert tuple(found) == SLOTS[name, num_workers]


def test_graphs_alive_are_counted_from_recomputation_to_the_weights() -> None:
    assert grid.laid_out("gpipe", 4, 8, "never").alive == 8
    assert grid.laid_out("gpipe", 4, 8, "always").alive == 1
    assert grid.laid_out("interleaved", 4, 8, "never").alive == 5.5
    assert grid.laid_out("zb-h1", 4, 8, "always").alive == 4
    assert grid.laid_out("v-min", 4, 8, "never").alive == 2


def test_the_grid_has_every_schedule_in_words() -> None:
    text = EXPERIMENT.tables([ran({"part": "equal costs", "num_workers": 2})], [])
    for name in grid.NAMES:
        assert f"\n{name} " in text
    assert "6.5, 7.7 %, 2" in text
    assert EXPERIMENT.tables([], []) == ""


def test_smoke_is_a_part_of_short() -> None:
    smoke, short = (EXPERIMENT.cases(RunOptions(profile=profile)) for profile in ("smoke", "short"))
    assert len(smoke) < len(short)
    assert sum(case.estimate_s for case in smoke) < 40


def test_gpipe_with_its_weights_put_off_takes_nine_and_seventeen_slots() -> None:
    """Of 11 and 19, with two graphs alive instead of one."""
    from gpipe_bench.experiments.schedules.beside.side_by_side_work import put_off

    for number, slots in ((2, 9), (4, 17)):
        schedule = put_off(number)
        validate(schedule)
        assert grid.in_slots(schedule).makespan_s == slots
        assert grid.in_slots(named("gpipe", 2, number, remat="always")).makespan_s == slots + 2
        assert grid.alive_by_worker(schedule) == [2, 2]


def side_record(**ratios: float):
    key = {"part": "side by side", "remat": "always", "num_microbatches": 2}
    quantities = [
        from_samples("step", [10.0, 10.1], "ms", key={"arm": arm}) for arm in side_by_side.arms("always")
    ]
    quantities += [
        from_samples(
            "step over", [ratio, ratio], "ratio", key={"arm": "gpipe, W put off", "against": "gpipe"}
        )
        for ratio in (ratios["over"],)
    ]
    control = ratios["control"]
    quantities.append(from_samples("control", [control - 0.01, control, control + 0.01], "ratio"))
    return record(
        experiment="schedules",
        profile="short",
        case=key,
        quantities=tuple(quantities),
        details={"refused": {}},
    )


def test_a_target_is_judged_unless_the_control_voids_it() -> None:
    assert "<= 0.90   yes" in EXPERIMENT.tables([side_record(over=0.85, control=1.0)], [])
    assert "<= 0.90   NO" in EXPERIMENT.tables([side_record(over=0.95, control=1.0)], [])
    text = EXPERIMENT.tables([side_record(over=0.85, control=1.2)], [])
    assert "<= 0.90   void" in text
    assert "measure again" in text


def test_nothing_beats_a_schedule_on_the_frontier() -> None:
    points = [
        figures.Point("a", "never", 1.0, 9.0),
        figures.Point("b", "never", 2.0, 9.0),
        figures.Point("c", "never", 2.0, 4.0),
        figures.Point("d", "never", 3.0, 5.0),
        figures.Point("e", "never", 3.5, 4.0),
    ]
    assert [point.name for point in figures.frontier(points)] == ["a", "c"]


def test_costs_of_stages_come_back_as_steps_and_memory() -> None:
    """A tiny model, measured for real: every schedule has a step, a bubble and a peak."""
    found = ran({"part": "measured costs", "model": "transformer", "num_microbatches": 4}, "smoke")
    for name in grid.NAMES:
        for remat in grid.REMATS:
            key = {"schedule": name, "K": 2, "M": 4, "remat": remat}
            for what in ("step", "bubble", "peak memory"):
                assert found.quantity(what, **key).value > 0
    steps = {
        name: found.quantity("step", schedule=name, K=2, M=4, remat="never").value
        for name in ("1f1b", "zb-h1", grid.GENERATED)
    }
    assert steps[grid.GENERATED] <= min(steps["1f1b"], steps["zb-h1"]) * (1 + 1e-9)
    assert "Transformer-48" in EXPERIMENT.tables([found], [])

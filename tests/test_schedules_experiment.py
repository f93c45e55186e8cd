"""The experiment on schedules: published rates to the last digit, the grid, what the records say."""

from __future__ import annotations

from functools import partial

import pytest
from pandas import DataFrame
from records import quantity, ran, record

from gpipe_bench.experiments.engine_turns import Job, work
from gpipe_bench.experiments.schedules import beside, beyond, laid_out, published
from gpipe_bench.experiments.schedules.experiment import EXPERIMENT, figures, frontier
from gpipe_bench.experiments.side_by_side import side_by_side
from gpipe_bench.experiments.timed.steps import run_processes
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.models import SHAPES
from gpipe_bench.pipeline import named, replay, validate
from gpipe_bench.pipeline.plan.named import seq1f1b
from gpipe_bench.pipeline.plan.simulate import SLOTS as SLOTS_OF

PRINTED = {cell.key: cell for cell in load_paper() if cell.source == "others"}
SMALL = [setting for setting in published.SETTINGS if setting.num_workers <= 16]


@pytest.mark.parametrize("setting", SMALL, ids=lambda each: each.column)
def test_rates_of_table_5_agree_to_the_last_printed_digit(setting) -> None:
    """Whatever is printed of it, but ZB-2p, which a search found that is not ours."""
    for name in ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-1p"):
        cell = PRINTED.get((published.RATES, f"bubble rate of {name}", setting.column))
        rate = setting.rate(published.cost_ms(name, setting))
        assert cell is None or f"{rate:.4f}" == cell.printed, name


def test_the_cost_of_zb_h2_is_a_span_and_not_the_makespan() -> None:
    """With the makespan the rate would be 0.1003 and not 0.0698."""
    setting = published.SETTINGS[3]
    timeline = setting.laid_out(named("zb-h2", setting.num_workers, setting.num_microbatches))
    assert f"{setting.rate(timeline.makespan_s):.4f}" == "0.1003"
    assert f"{setting.rate(laid_out.span(timeline)):.4f}" == "0.0698"


def test_a_searched_schedule_is_no_longer_than_the_written_one_and_keeps_to_its_memory() -> None:
    setting = published.SETTINGS[0]
    for share, name in ((1, "ZB-H1"), (2, "ZB-H2")):
        assert published.searched_ms(setting, share) <= published.cost_ms(name, setting) + 1e-9
    assert published.held(named("zb-h1", 8, 24), setting) == pytest.approx(8, abs=1)
    assert published.held(named("gpipe", 8, 24), setting) == 24


def test_every_published_number_has_an_entry_with_its_unit_and_a_verdict() -> None:
    records = [
        ran(EXPERIMENT, {"part": "published", "what": published.RATES, "model": "1.5B"}),
        ran(EXPERIMENT, {"part": "published", "what": published.RATES_V}),
        ran(EXPERIMENT, {"part": "published", "what": published.ELSEWHERE}),
        ran(EXPERIMENT, {"part": "published", "what": published.FORMULAS}),
    ]
    entries = EXPERIMENT.cells(records)
    for entry in entries:
        assert PRINTED[entry.place].unit == entry.quantity.unit
    found = {(c.row, c.column): c for c in compare(entries, whole=[])}
    expected = {key[1:] for key in PRINTED if key[0] in EXPERIMENT.paper_tables}
    assert {key for key in expected if "B, " not in key[1] or key[1].startswith("1.5B, p=8")} <= set(found)
    verdicts = {
        ("bubble, stages in a loop", "OLMo-core, K=4, M=8"): "reproduced",
        ("stages' micro-batches alive, worker 3", "OLMo-core, K=4, M=8"): "reproduced",
        ("v-min over 1F1B, memory", "Primus, Llama2-7B, K=8"): "not comparable",
        ("bubble rate of ZB-2p", "1.5B, p=8, m=24"): "above",
        ("activations of V-Min", "p=8, m=32"): "reproduced",
        ("bubble rate of V-Half", "p=8, m=32"): "reproduced",
        ("activations of Seq1F1B over 1F1B's", "p=8, m=32, 4 chunks"): "reproduced",
        ("k on an A100", "h=5120, s=4096"): "reproduced",
        ("k on an A100", "h=4096, s=32768"): "above",
        ("seq1f1b over 1F1B, memory", "Seq1F1B, up to 64K tokens"): "not comparable",
        ("throughput lost by 1F1B, all copied", "PipeOffload, h=5120, s=8192"): "above",
    }
    assert {key: found[key].verdict for key in verdicts} == verdicts


# Slots of M = K, 2K and 4K, as the closed forms have them.
SLOTS = {
    ("1f1b", 2): (9, 15, 27), ("1f1b", 4): (21, 33, 57), ("1f1b", 8): (45, 69, 117),
    ("interleaved", 2): (7.5, 13.5, 25.5), ("interleaved", 4): (16.5, 28.5, 52.5),
    ("interleaved", 8): (34.5, 58.5, 106.5),
    ("zb-h1", 2): (7, 13, 25), ("zb-h1", 4): (15, 27, 51), ("zb-h1", 8): (31, 55, 103),
    (laid_out.GENERATED, 4): (15, 27, 51), (laid_out.GENERATED_V, 4): (13.5, 25.5, 49.5),
}  # fmt: skip


@pytest.mark.parametrize(("name", "num_workers"), SLOTS)
def test_steps_in_slots(name: str, num_workers: int) -> None:
    schedules = [
        laid_out.schedule_of(name, num_workers, times * num_workers, "never") for times in laid_out.TIMES
    ]
    assert tuple(laid_out.in_slots(each).makespan_s for each in schedules) == SLOTS[name, num_workers]


def test_graphs_alive_are_counted_from_recomputation_to_the_weights() -> None:
    found = ran(EXPERIMENT, {"part": "equal costs", "num_workers": 4})
    alive = {
        ("gpipe", "never"): 8, ("gpipe", "always"): 1, ("interleaved", "never"): 5.5,
        ("zb-h1", "always"): 4, ("v-min", "never"): 2,
    }  # fmt: skip
    for (name, remat), graphs in alive.items():
        assert found.quantity("graphs alive", schedule=name, M=8, remat=remat).value == graphs, name
    text = EXPERIMENT.tables([found])
    assert all(f"\n{name} " in text for name in laid_out.NAMES)
    assert EXPERIMENT.tables([]) == ""


def test_the_closed_forms_of_chunks_are_what_replays_give() -> None:
    for workers, times, chunks in ((2, 1, 2), (4, 2, 3), (3, 4, 5)):
        one, chunked = named("1f1b", workers, times * workers), seq1f1b(workers, times * workers, chunks)
        faster = chunks * replay(one, SLOTS_OF).makespan_s / replay(chunked, SLOTS_OF).makespan_s
        kept = laid_out.alive_by_worker(chunked)[0] / chunks / laid_out.alive_by_worker(one)[0]
        assert beyond._chunked(workers, times, chunks) == pytest.approx((faster, kept))


def test_two_tables_say_what_is_replayed_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1F1B alone: copies in slots make nothing longer, and all at once at k > 1 do."""
    monkeypatch.setattr(beyond, "COPIED", ("1f1b",))
    small = {"num_layers": 16, "d_model": 32, "ffn_dim": 64, "num_heads": 2, "vocab_size": 11}
    monkeypatch.setitem(SHAPES, beyond.MODEL, ("llama", small))
    monkeypatch.setattr(beyond, "TOKENS", 64)
    found = ran(EXPERIMENT, {"part": beyond.PART})

    def value(name: str, **key: object) -> float:
        return found.quantity(name, schedule="1f1b", **key).value

    plain = {"copied": "nothing"}
    for k in beyond.KS:
        slots, once = ({"copied": f"all, {how}", "k": k} for how in ("in slots", "at once"))
        assert value("step in slots", **slots) == value("step in slots", **plain) == 117
        assert (value("step in slots", **once) > 117) == (k > 1)
        assert value("graphs alive", **once) < value("graphs alive", **plain) == 8
        assert value("peak memory", **once) < value("peak memory", **plain)
    assert found.quantity("graphs alive", schedule="seq1f1b", chunks=4).value == (8 - 1 + 4) / 4
    text = EXPERIMENT.tables([found])
    assert text.count("(replayed at equal costs; not run)") == 2


def test_attention_residuals_send_as_much_by_portals_over_ways_that_are_less_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight blocks of one layer: with a block a stage the sums are counted by hand."""
    small = {"num_layers": 8, "layers_per_block": 1, "d_model": 8, "ffn_dim": 12, "num_heads": 2}
    monkeypatch.setattr(beyond, "OPTIONS", small | {"vocab_size": 11, "seq_len": 4})
    monkeypatch.setattr(beyond, "WORKERS", (2, 4))
    found = ran(EXPERIMENT, {"part": beyond.RESIDUALS})
    one = 4 * 8 * 4 / beyond.MIB  # a sum: tokens, width and bytes of a number
    # Behind layer n there are n + 2 sums, the embedding among them.
    sent = {  # K, stages of a worker: all, busiest; passed on and by portals
        (2, 1): (5, 5, 5, 5), (4, 1): (3 + 5 + 7, 7, 15, 3),
        (2, 2): (3 + 5 + 7, 3 + 7, 3 + 5 + 3, 8),
    }  # fmt: skip
    for (workers, stages), sums in sent.items():
        values = [
            found.quantity(name, K=workers, stages=stages, way=way).value / one
            for way in beyond.WAYS
            for name in ("sent", "busiest")
        ]
        assert values == pytest.approx(sums), (workers, stages)
    for workers in (2, 4):
        peaks = [
            found.quantity("peak memory", K=workers, remat="always", way=way).value for way in beyond.WAYS
        ]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.2)
    assert "Attention residuals, 8 layers in blocks of 1" in EXPERIMENT.tables([found])


def test_smoke_is_a_part_of_short() -> None:
    smoke, short = (EXPERIMENT.cases(RunOptions(profile=profile)) for profile in ("smoke", "short"))
    assert len(smoke) < len(short)
    assert sum(case.estimate_s for case in smoke) < 40


def test_gpipe_with_its_weights_put_off_takes_nine_and_seventeen_slots() -> None:
    """Of 11 and 19, with two graphs alive instead of one."""
    from gpipe_bench.experiments.schedules.engines import put_off

    for number, slots in ((2, 9), (4, 17)):
        schedule = put_off(number)
        validate(schedule)
        assert laid_out.in_slots(schedule).makespan_s == slots
        assert laid_out.in_slots(named("gpipe", 2, number, remat="always")).makespan_s == slots + 2
        assert laid_out.alive_by_worker(schedule) == [2, 2]


def test_schedules_take_turns_as_engines_and_each_does_all_of_its_work() -> None:
    """One stage in each process, two in a loop and in a V, torch's rows, and rows for measured times."""
    names = ("1f1b", "interleaved zero bubble", "zb-v", "zb-v, generated", "torch's zb-v")
    engines = {name: (beside.variants("never")[name], "never") for name in names}
    job = Job("transformer-lm", beside.OPTIONS["smoke"], 1, 2, 2, engines, cut_by_time=True)
    found = side_by_side(
        partial(run_processes, work, 2, job), partial(beside.numbers, job), 1, control="1f1b", again=False
    )
    assert found.details["refused"] == {}
    for checks in found.details["checks"]:
        counts = {name: (each["forwards"], each["backwards"]) for name, each in checks.items()}
        assert counts == dict.fromkeys(names, (2, 2))
        assert max(each["gradient error"] for each in checks.values()) < 1e-5
    (made,) = found.details["made"].values()
    assert set(made["actions_ms"]) == {f"{stage}{kind}" for stage in range(4) for kind in "FIW"}
    assert "0F1" in made["generated"]
    over = [each.key["against"] for each in found.quantities if each.name == "step over"]
    assert over == ["1f1b", "1f1b", "1f1b", "torch's zb-v"]


def test_nothing_beats_a_schedule_on_the_frontier() -> None:
    known = {"a": (1.0, 9.0), "b": (2.0, 9.0), "c": (2.0, 4.0), "d": (3.0, 5.0), "e": (3.5, 4.0)}
    points = DataFrame([(name, *place) for name, place in known.items()], columns=["name", "time", "memory"])
    assert [*frontier(points).name] == ["a", "c"]


def test_one_round_is_drawn_without_an_interval() -> None:
    step, over = (
        quantity(name=name, key=key, value=2.0, unit=unit)
        for name, unit, key in (
            ("step", "ms", {"arm": "1f1b"}),
            ("step over", "ratio", {"arm": "zb-h1", "against": "1f1b"}),
        )
    )
    case = {"part": "side by side", "remat": "never", "num_microbatches": 2}
    (plot,) = figures([record(experiment="schedules", case=case, quantities=(step, over))])
    (axes,) = plot.draw().axes
    assert sorted(axes.get_legend_handles_labels()[1]) == ["ours", "torch's (of medians)"]


def test_costs_of_stages_come_back_as_steps_and_memory() -> None:
    """A tiny model, measured for real: every schedule has a step, a bubble and a peak."""
    found = ran(
        EXPERIMENT, {"part": "measured costs", "model": "transformer", "num_microbatches": 4}, "smoke"
    )
    for name in laid_out.NAMES:
        for remat in laid_out.REMATS:
            key = {"schedule": name, "K": 2, "M": 4, "remat": remat}
            for what in ("step", "bubble", "peak memory"):
                assert found.quantity(what, **key).value > 0
    steps = {
        name: found.quantity("step", schedule=name, K=2, M=4, remat="never").value
        for name in ("1f1b", "zb-h1", laid_out.GENERATED)
    }
    assert steps[laid_out.GENERATED] <= min(steps["1f1b"], steps["zb-h1"]) * (1 + 1e-9)
    assert "Transformer-48" in EXPERIMENT.tables([found])

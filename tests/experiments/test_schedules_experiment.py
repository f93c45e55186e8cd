"""The experiment on schedules: published rates to the last digit, all side by side, what the records say."""

from __future__ import annotations

import pytest
from pandas import DataFrame
from records import ran

from gpipe_bench.experiments.beyond import published, schedules
from gpipe_bench.experiments.beyond.schedules import EXPERIMENT, frontier
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.paper import load_paper

PRINTED = {cell.key: cell for cell in load_paper() if cell.source == "others"}
RATES = [
    row
    for row in published.load_rows()
    if row.table == "zero-bubble" and row.workers <= 16 and not row.row.endswith("ZB-2p")
]


@pytest.mark.parametrize("row", RATES, ids=lambda each: f"{each.row}, {each.column}")
def test_rates_of_table_5_agree_to_the_last_printed_digit(row) -> None:
    """Whatever is printed of it, but ZB-2p, which a search found that is not ours."""
    (setting,) = row.settings
    assert f"{published.value_of(row, *setting):.4f}" == PRINTED[row.table, row.row, row.column].printed


def test_the_cost_of_zb_h2_is_a_span_and_not_the_makespan() -> None:
    """With the makespan the rate would be 0.1003 and not 0.0698."""
    (row,) = (row for row in RATES if (row.row, row.column) == ("bubble rate of ZB-H2", "6.2B, p=8, m=24"))
    timeline = published.laid_out(row.made(24, None), row.times_ms(), row.link())
    whole_ms = 24 * sum(row.times_ms()[kind] for kind in "FB")
    assert f"{1 - whole_ms / timeline.makespan_s:.4f}" == "0.1003"
    assert f"{1 - whole_ms / published.span(timeline):.4f}" == "0.0698"


def test_every_published_number_has_a_row_and_an_entry_with_its_unit_and_a_verdict() -> None:
    rows = {(row.table, row.row, row.column) for row in published.load_rows()}
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
SLOTS = {
    ("1f1b", 2): (9, 15, 27), ("1f1b", 4): (21, 33, 57), ("1f1b", 8): (45, 69, 117),
    ("interleaved", 2): (7.5, 13.5, 25.5), ("interleaved", 4): (16.5, 28.5, 52.5),
    ("interleaved", 8): (34.5, 58.5, 106.5),
    ("zb-h1", 2): (7, 13, 25), ("zb-h1", 4): (15, 27, 51), ("zb-h1", 8): (31, 55, 103),
    (schedules.GENERATED, 4): (15, 27, 51), (schedules.GENERATED_V, 4): (13.5, 25.5, 49.5),
}  # fmt: skip


@pytest.mark.parametrize(("name", "num_workers"), SLOTS)
def test_steps_in_slots(name: str, num_workers: int) -> None:
    made = [
        schedules.schedule_of(name, num_workers, times * num_workers, "never") for times in schedules.TIMES
    ]
    assert tuple(schedules.in_slots(each).makespan_s for each in made) == SLOTS[name, num_workers]


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
    assert EXPERIMENT.tables([]) == ""


def test_smoke_is_a_part_of_short() -> None:
    smoke, short = (EXPERIMENT.cases(RunOptions(profile=profile)) for profile in ("smoke", "short"))
    assert len(smoke) < len(short)
    assert sum(case.estimate_s for case in smoke) < 40


def test_nothing_beats_a_schedule_on_the_frontier() -> None:
    known = {"a": (1.0, 9.0), "b": (2.0, 9.0), "c": (2.0, 4.0), "d": (3.0, 5.0), "e": (3.5, 4.0)}
    points = DataFrame([(name, *place) for name, place in known.items()], columns=["name", "time", "memory"])
    assert [*frontier(points).name] == ["a", "c"]

"""The declared configuration and every verdict on the reference records."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gpipe_bench.experiments.paper.reproduction import Declared, table3, torchgpipe_memory
from gpipe_bench.experiments.readings import select_records, shown_of
from gpipe_bench.experiments.registry import EXPERIMENTS, load
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.compare import admitted, judge
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import of_case
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.reproduction import (
    Cell,
    Published,
    load_reproduction,
    of_quotient,
    predictor_errors,
    summed,
)
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.unknowns import load_unknowns, words
from gpipe_bench.harness.verdict import DIFFERS, JUDGED

RECORDS = REFERENCE / "cpu-2-cores"
TABLES = ("table1-amoebanet", "table1-transformer", "table2-amoebanet", "table2-transformer",
          "table3-amoebanet", "table3-transformer", "figure3-amoebanet", "figure3-resnet101")  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_whatever_the_paper_leaves_open_of_a_table_is_declared(table: str) -> None:
    assert set(load_unknowns().of(table)) <= set(load_reproduction().of(table))
    with pytest.raises(ValueError, match="has no choice of"):
        Declared(table)["colour"]


def test_a_setting_has_one_choice(tmp_path) -> None:
    path = tmp_path / "reproduction.toml"
    text = (REFERENCE.parent / "reproduction.toml").read_text()
    start = text.index("\n[[choice]]")
    first = text[start : text.index("\n\n", start)]
    path.write_text(text.replace(first, f"{first}\n{first}", 1))
    with pytest.raises(ValueError, match="two choices of num_classes"):
        load_reproduction(path)


def test_the_error_counts_models_and_not_their_numbers() -> None:
    numbers = [Published("a", "speeds", math.exp(each), 1.0) for each in (0.3, -0.3, 0.3)]
    found = predictor_errors([*numbers, Published("b", "speeds", math.exp(0.4), 1.0)])["speeds"]
    assert math.log1p(found.error) == pytest.approx(math.sqrt((0.3**2 + 0.4**2) / 2))
    assert found.without == pytest.approx({"a": math.expm1(0.4), "b": math.expm1(0.3)})
    assert math.log1p(of_quotient(found.error)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="not positive"):
        predictor_errors([Published("a", "bytes", 0.0, 1.0)])


@pytest.mark.parametrize(
    ("ours", "error", "why", "answer"),
    [
        (1.0, 0.1, "", "agrees"), (1.15, 0.1, "", "agrees"), (1.16, 0.1, "", "differs"),
        (0.86, 0.1, "", "differs"), (0.87, 0.1, "", "agrees"), (1.0, 0.26, "", "no test"),
        (None, 0.1, "", "no test"), (1.0, 0.1, "nothing fits", "no test"),
    ],
)  # fmt: skip
def test_a_number_agrees_within_its_error_and_the_rounding(ours, error, why, answer) -> None:
    assert Cell("M=1", "K=2", 1.0, 0.05, ours, error, why).answer == answer


def test_a_table_has_four_numbers() -> None:
    """By hand: a 2 x 2 table with one pair along each side the wrong way round, and a corner that is 1."""
    corner = Cell("M=1", "K=2", 1.0, 0, 1.0, 0.1)
    others = [
        Cell("M=1", "K=10", 2.0, 0, 2.2, 0.1),
        Cell("M=4", "K=2", 3.0, 0, 6.0, 0.1),
        Cell("M=4", "K=10", 4.0, 0, 3.0, 0.1),
    ]
    found = summed(others, [corner])
    assert found.counts == {"agrees": 1, "differs": 2, "no test": 0}
    assert found.off == pytest.approx(0.25)
    assert found.rank == pytest.approx(0.5)
    assert (found.directions, found.pairs) == (3, 4)


@pytest.mark.parametrize("name", reproduced.SECONDS)
def test_every_table_is_computed_and_judged_by_the_errors_on_record(name: str) -> None:
    experiment = load(name)
    keys = [case.key for case in experiment.cases(RunOptions())]
    records = of_case(Store(RECORDS).load(name).records, "done", part=reproduced.PART)
    assert {each.case["model"] for each in records} == set(reproduced.SECONDS[name])
    assert all({"part": reproduced.PART, "model": model} in keys for model in reproduced.SECONDS[name])
    for cells, _ in reproduced.cells(records).values():
        for cell in cells:
            known = reproduced.errors()["ratios of speeds" if cell.error < 0.25 else "bytes"].error
            assert cell.error in (known, of_quotient(known))
    assert experiment.reproduction(reproduced.answers(records)).startswith(
        ("table", "figure", "breakdown", "claims")
    )


def test_a_table_computed_now_is_the_one_on_record() -> None:
    (record,) = of_case(Store(RECORDS).load("table3").records, part=reproduced.PART, model="transformer")
    again = table3("transformer")
    for metric in record.metrics:
        key = metric.key
        assert again[key["table"], key["row"], key["column"]] == pytest.approx(metric.value, rel=1e-9)
    known = Store(RECORDS).load("predictions").records
    (memory,) = of_case(known, part="activations", column="pipeline-1")
    assert torchgpipe_memory("pipeline-1") / 2**30 == pytest.approx(memory.metrics[0].value)


PUBLISHED = {(cell.source, *cell.key): cell for cell in load_paper()}


def shown(name):
    experiment = load(name)
    records = select_records(Store(REFERENCE / "cpu-2-cores").load(name).records, experiment, None)
    return shown_of(experiment, records) if records else None


def moved(cell, entry, to):
    """The same as if the paper had printed another number, words that name a limit moved along."""
    by, off = to - cell.target, cell.target_rounding
    said = entry.allowed or (admitted(cell) if cell.row in words() else None)
    if said is not None:
        said = replace(
            said, low=said.low + by, high=said.high + by,
            possible_low=said.possible_low + by, possible_high=said.possible_high + by,
        )  # fmt: skip
    shifted = replace(
        cell, value=to, printed=f"{to!r}", corrected_printed="", exact=not off, error=off or None,
        form="read off" if off else "",
    )  # fmt: skip
    return judge(shifted, replace(entry, allowed=said)).verdict


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_number_just_beyond_what_a_verdict_names_would_have_changed_it(name):
    found = shown(name)
    if found is None:
        pytest.skip(f"{name} has no reference records")
    for comparison in found.comparisons:
        entry = comparison.entry
        if comparison.verdict not in JUDGED or comparison.ours is None:
            continue
        cell = PUBLISHED[entry.source, *entry.place]
        edges = [(comparison.fails_below, -1, "above"), (comparison.fails_above, 1, "below")]
        assert any(edge is not None for edge, _, _ in edges), f"{entry.place} could not have failed"
        for edge, sign, verdict in edges:
            if edge is None:
                continue
            step = 1e-6 * max(abs(edge), abs(cell.target), 1e-6)
            assert moved(cell, entry, edge + sign * step) == verdict, entry.place
            assert moved(cell, entry, edge - sign * step) != verdict, entry.place
        slack = 1e-9 * max(abs(cell.target), 1e-6)
        inside = (comparison.fails_below is None or cell.target >= comparison.fails_below - slack) and (
            comparison.fails_above is None or cell.target <= comparison.fails_above + slack
        )
        assert inside == (comparison.verdict not in DIFFERS), entry.place

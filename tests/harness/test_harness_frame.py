"""Records as a DataFrame: nothing is lost, and whole numbers stay whole."""

from __future__ import annotations

import pytest
from records import metric, record

from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.record import BEFORE, BEHIND, frame
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.store import Store

STEPS = (
    metric(2.0, name="step", key={"M": 4, "remat": "always"}, low=1.5, high=2.5),
    metric(3, name="step", key={"M": 8, "K": 4}),
)
RECORDS = [
    record(1, case={"K": 2, "model": "resnet101"}, metrics=STEPS),
    record(2, case={"K": 8, "model": "unet"}, metrics=(), status="skipped", reason="needs 8 devices"),
]


def test_a_row_for_each_quantity_and_one_for_a_record_without() -> None:
    found = frame(RECORDS)
    assert list(found.columns) == [*BEFORE, "K", "model", "M", "remat", *BEHIND]
    values = zip(found.record, found.K, found.metric.fillna(""), found.value.fillna(0), strict=True)
    assert list(values) == [(0, 2, "step", 2.0), (0, 4, "step", 3.0), (1, 8, "", 0.0)]
    assert [f"M={each}" for each in found.M[:2]] == ["M=4", "M=8"], "although the third has none"
    assert list(found.reason) == ["", "", "needs 8 devices"]
    table = found.query("metric == 'step'").pivot(index="K", columns="M", values="unit").fillna("-")
    grid = Grid(columns=["K", *table.columns], lines=list(table.itertuples()))
    assert [line.split() for line in grid.text().splitlines()[2:]] == [["2", "s", "-"], ["4", "-", "s"]]
    assert frame([]).empty


def test_every_reference_record_fits() -> None:
    for path in (REFERENCE / "cpu-2-cores").glob("*.jsonl"):
        records = Store(path.parent).load(path.stem).records
        found = frame(records)
        assert len(found.dropna(subset=["metric"])) == sum(len(each.metrics) for each in records)


def test_a_key_named_like_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match="metric is a column's name; choose"):
        frame([record(case={"value": 1})])

"""Predictions of numbers that others published."""

from __future__ import annotations

import pytest
from records import record

from gpipe_bench.experiments.predictions.experiment import EXPERIMENT
from gpipe_bench.experiments.published.torchgpipe import MODELS, SETTINGS, predict
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.paper import load_paper

PUBLISHED = {(cell.source, *cell.key): cell for cell in load_paper()}


def ran(key, profile="short"):
    found = EXPERIMENT.run(Case(key), RunOptions(profile=profile))
    return record(
        experiment="predictions",
        profile=profile,
        case=key,
        quantities=found.quantities,
        details=found.details,
    )


def test_the_published_cuts_have_as_many_layers_as_the_zoos_models() -> None:
    for model, settings in SETTINGS.items():
        for setting in settings:
            assert setting.cut[-1].stop == len(MODELS[model].work.layers)
            assert ("torchgpipe", setting.table, setting.row, setting.column) in PUBLISHED


def test_torchgpipes_resnet_is_predicted_over_what_it_does_not_state() -> None:
    walk = predict("resnet101")
    assert [axis.name for axis in walk.axes] == ["share_of_peak", "link_bytes_per_s", "link_latency_s"]
    ratio, speed = ("figure3-resnet101", "normalized throughput", "pipeline-4"), (
        "figure3-resnet101", "throughput", "pipeline-4",
    )  # fmt: skip
    assert walk.spread(ratio).combinations == 27
    base = walk.middle(("figure3-resnet101", "throughput", "naive-1"))
    assert walk.middle(ratio) == pytest.approx(walk.middle(speed) / base)


def test_every_number_stands_in_the_table_with_its_error() -> None:
    records = [
        ran({"part": "torchgpipe", "script": "resnet101"}),
        ran({"part": "count"}),
    ]
    entries = EXPERIMENT.cells(records)
    for entry in entries:
        assert (entry.source, *entry.place) in PUBLISHED, entry.place
        assert entry.quantity.unit == PUBLISHED[entry.source, *entry.place].unit
        assert entry.question == "as published"
    text = EXPERIMENT.tables(records, [])
    for part in ("Ratios:", "Absolute speeds:", "Counts:", "in the median", "155.3M"):
        assert part in text
    assert EXPERIMENT.tables([], []) == ""

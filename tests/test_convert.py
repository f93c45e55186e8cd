"""Records of the first schema: named clearly where they are met, and converted without a number changed."""

from __future__ import annotations

import hashlib
import json

import pytest
from fake_experiment import EXPERIMENT as FAKE
from records import of_first_schema, record

from gpipe_bench.experiments import registry
from gpipe_bench.experiments.commands import cli, exits
from gpipe_bench.experiments.convert import convert_file, convert_line, main
from gpipe_bench.experiments.report.figures import drawn
from gpipe_bench.harness.records.codec import encode
from gpipe_bench.harness.records.record import SCHEMA
from gpipe_bench.harness.records.store import Store

CELLS = {
    "cells": {
        "K=2 M=16": {"num_stages": 2, "num_microbatches": 16},
        "K=2 M=4": {"num_stages": 2, "num_microbatches": 4},
    }
}
SCHEMES = {
    "cells": {
        "naive-1": {"num_stages": 1, "num_microbatches": 1},
        "pipeline-1": {"num_stages": 1, "num_microbatches": 16},
        "pipeline-1 M=4": {"num_stages": 1, "num_microbatches": 4},
    }
}
POINTS = {
    "points": [
        {"name": "without a limit", "multiple": None},
        {"name": "at 0.5 messages per forward", "multiple": 0.5},
    ]
}
BALANCED = "share of the balanced step"

# Experiment, details of its record, name of old, name and key of now.
NAMES = [
    ("table2", CELLS, "step K=2 M=16", "step", {"K": 2, "M": 16}),
    ("table2", CELLS, f"{BALANCED} K=2 M=4", BALANCED, {"K": 2, "M": 4}),
    ("table4", CELLS, "step K=2 M=16", "step", {"K": 2, "M": 16}),
    (
        "table4", CELLS, "load imbalance K=2 M=16", "share of the step",
        {"part": "load imbalance", "K": 2, "M": 16},
    ),
    ("figure3", SCHEMES, "throughput naive-1", "throughput", {"configuration": "naive-1", "M": 1}),
    ("figure3", SCHEMES, "step pipeline-1", "step", {"configuration": "pipeline-1", "M": 16}),
    ("figure3", SCHEMES, "step pipeline-1 M=4", "step", {"configuration": "pipeline-1", "M": 4}),
    ("table3", {}, "normalised throughput over PCIe K=2", "normalised throughput", {"link": "PCIe", "K": 2}),
    (
        "table3", {}, "throughput over PCIe, same share K=8", "throughput",
        {"link": "PCIe, same share", "K": 8},
    ),
    (
        "table3", {}, "normalised throughput at 25% of the peak K=4", "normalised throughput",
        {"link": "PCIe", "share_of_peak": 0.25, "K": 4},
    ),
    ("table3", {}, "hidden from K=4", "hidden from", {"K": 4}),
    ("table3", POINTS, "real step without a limit", "real step", {"messages_per_forward": None}),
    ("table3", POINTS, "step at 0.5 messages per forward", "step", {"messages_per_forward": 0.5}),
    ("figure2", {}, "bubble of gpipe-early at M=32", "bubble", {"schedule": "gpipe-early", "M": 32}),
    ("figure2", {}, "formula at M=4", "formula", {"M": 4}),
    ("figure2", {}, "pipeline, busiest device, K=8", "pipeline, busiest device", {"K": 8}),
    ("figure2", {}, "peak activations / N", "peak activations / N", {}),
    ("table1", {}, "best peak per accelerator", "best peak per accelerator", {}),
    ("engine", {}, "step of ours", "step of ours", {}),
    ("an own one", {"cells": ["K=2"], "points": 3}, "step K=2", "step K=2", {}),
]  # fmt: skip


@pytest.mark.parametrize(("experiment", "details", "before", "name", "key"), NAMES)
def test_names_become_names_and_keys(experiment, details, before, name, key):
    line = of_first_schema(before, experiment=experiment, details=json.loads(json.dumps(details)))
    found = convert_line(line).record
    assert found is not None
    assert found.schema == SCHEMA
    (quantity,) = found.quantities
    assert (quantity.name, quantity.key) == (name, key)
    assert (quantity.value, quantity.samples, quantity.provenance) == (1.5, (1.5,), "replayed")
    assert (found.case, found.started_at, found.duration_s) == ({"step": 1}, "2026-01-01T00:00:00+00:00", 0.5)


def test_a_converted_table_is_read_like_a_new_one():
    """Old numbers stand where new ones would: 2.5 is the second quantity of the line."""
    names = ["normalised throughput K=2 M=1", "normalised throughput K=8 M=4"]
    cells = {
        "K=8 M=4": {"num_stages": 8, "num_microbatches": 4},
        "K=2 M=1": {"num_stages": 2, "num_microbatches": 1},
    }
    line = of_first_schema(
        *names, experiment="table2", case={"model": "transformer", "batch": "fitted"},
        details={"cells": cells, "scale": ""},
    )  # fmt: skip
    found = convert_line(line).record
    entries = registry.load("table2").cells([found])
    assert [(e.column, e.row, e.quantity.value) for e in entries] == [
        ("K=2", "M=1", 1.5),
        ("K=8", "M=4", 2.5),
    ]


def test_a_folder_is_converted_once_and_nothing_in_it_is_lost(tmp_path, capsys):
    old, new = of_first_schema("time", case={"step": 1}), encode(record(2))
    altered = of_first_schema("time", case={"step": 3}).replace(b"0.5", b"0.4")
    twice = of_first_schema("time", "time", case={"step": 4})
    path = tmp_path / "fake.jsonl"
    path.write_bytes(b"\n".join([old, altered, new, twice, b"\xff\xfe", b""]))
    before = path.read_bytes()
    count, problems = convert_file(path)
    assert count == 1
    (problem,) = problems
    assert problem.startswith(f"{path}:4: can't be converted: ")
    assert "'time' is given twice" in problem
    lines = path.read_bytes().split(b"\n")
    assert [lines[1], lines[2], lines[3], lines[4]] == [altered, new, twice, b"\xff\xfe"]
    assert [each.case["step"] for each in Store(tmp_path).load("fake").records] == [1, 2]
    assert (tmp_path / "fake.jsonl.schema1").read_bytes() == before
    assert main([str(tmp_path)]) == 1, "line 4 is still there"
    assert "0 records converted" in capsys.readouterr().out
    assert (tmp_path / "fake.jsonl.schema1").read_bytes() == before


def test_figures_of_the_records_before_show_the_converted_ones(tmp_path):
    lines = [of_first_schema("time", case={"step": step}) for step in (1, 2)]
    (tmp_path / "fake.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "fake.txt").touch()
    shown = hashlib.sha256(b"".join(sorted(hashlib.sha256(line).digest() for line in lines))).hexdigest()
    for digest, kept in (("of other records", False), (shown, True)):
        note = {"records_sha256": digest, "files": ["fake.txt"]}
        (tmp_path / "figures" / "fake.json").write_text(json.dumps(note))
        (tmp_path / "fake.jsonl").write_bytes(b"\n".join(lines))
        convert_file(tmp_path / "fake.jsonl")
        records = Store(tmp_path).load("fake").records
        assert (drawn(FAKE, records, tmp_path / "figures") is not None) is kept


def test_compare_names_old_records_and_the_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(registry.EXPERIMENTS, "fake", "fake_experiment")
    (tmp_path / "fake.jsonl").write_bytes(of_first_schema("parameters") + b"\n")
    assert cli.main(["compare", "fake", "--results", str(tmp_path)]) == exits.BAD_USAGE
    error = capsys.readouterr().err
    assert f"{tmp_path / 'fake.jsonl'}:1: made by an older version: schema 1, while this one reads 2" in error
    assert "python -m gpipe_bench.experiments.convert FOLDER" in error
    assert main([str(tmp_path)]) == 0
    loaded = Store(tmp_path).load("fake")
    assert (len(loaded.records), loaded.problems) == (1, ())

"""Several machines in one table: the same cells side by side, and what the machines differ in."""

from __future__ import annotations

import json

import pytest
from records import metric, record

from gpipe_bench.experiments import registry
from gpipe_bench.experiments.commands import cli
from gpipe_bench.experiments.commands.compare import comparable
from gpipe_bench.experiments.commands.output import BAD_USAGE, DONE
from gpipe_bench.experiments.report.readings import shown_of
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.store import Store


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setitem(registry.EXPERIMENTS, "fake", "fake_experiment")


def put(folder, values, **changes):
    for step, value in values.items():
        number = metric(value, name="parameters", unit="parameters", provenance="modelled")
        Store(folder).append(record(step, metrics=(number,), **changes))
    return folder


@pytest.fixture
def machines(tmp_path):
    laptop = put(tmp_path / "laptop", {1: 82e6, 2: 318e6}, environment={"cpu_model": "A", "python": "3.12"})
    server = put(tmp_path / "server", {1: 41e6, 3: 542e6}, environment={"cpu_model": "B", "python": "3.12"})
    return laptop, server


def test_one_table_with_a_column_for_each(machines, capsys):
    assert cli.main(["compare", "fake", "--machines", *map(str, machines)]) == DONE
    text = capsys.readouterr().out
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("parameters")}
    assert "82M modelled, follows" in lines["naive-1"]
    assert "41M modelled, differs" in lines["naive-1"]
    assert lines["naive-1"].rstrip().endswith("x0.5")
    assert "not run" in lines["pipeline-1"]
    assert lines["pipeline-1"].rstrip().endswith("-"), "no ratio without two numbers"
    assert "542M modelled" in lines["pipeline-2"]
    assert "pipeline-4" not in lines, "a row that no machine has says nothing here"


def test_json_and_markdown(machines, capsys):
    assert cli.main(["compare", "fake", "--json", "--machines", *map(str, machines)]) == DONE
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    first = next(line for line in lines if line["column"] == "naive-1")
    assert {name: cell["ours"] for name, cell in first["machines"].items()} == {
        "laptop": 82e6,
        "server": 41e6,
    }
    assert first["ratio_to_first"] == {"laptop": 1.0, "server": 0.5}
    assert first["differences"] == {"cpu_model": ["A", "B"]}
    assert cli.main(["compare", "fake", "--markdown", "--machines", *map(str, machines)]) == DONE
    assert "| laptop" in capsys.readouterr().out


def test_a_file_may_hold_the_records_of_several_experiments(machines, tmp_path, capsys):
    """Also where a line is no record; those of another experiment are no business of this one."""
    put(tmp_path / "server", {1: 1.0}, experiment="else")
    sent = tmp_path / "sent.jsonl"
    sent.write_bytes(b"".join(p.read_bytes() for p in sorted(machines[1].glob("*.jsonl"))) + b"{\n")
    assert cli.main(["compare", "fake", "--machines", str(machines[0]), str(sent)]) == DONE
    shown = capsys.readouterr()
    assert "sent (profile short)" in shown.out
    assert "41M modelled, differs" in shown.out
    assert shown.err.count("warning") == 1
    assert f"{sent}:4: not a complete line of JSON" in shown.err
    assert cli.main(["compare", "table4", "--machines", "cpu-2-cores", str(sent)]) == BAD_USAGE
    assert "machine 'sent' has no records of table4; it has: else, fake" in capsys.readouterr().err
    folder = ["--results", str(tmp_path / "none"), "--output", str(tmp_path / "page")]
    assert cli.main(["report", "--no-figures", "--with", str(sent), *folder]) == DONE
    assert "sent" in (tmp_path / "page" / "report.md").read_text()
    capsys.readouterr()
    assert cli.main(["report", "--with", str(tmp_path / "nothing.jsonl"), *folder]) == BAD_USAGE
    assert "there is no such file" in capsys.readouterr().err


def test_an_experiment_without_cells_of_the_paper_compares_its_metrics():
    experiment = Experiment(
        name="speed", title="", source="", describe="", profiles={}, cases=lambda options: [],
        run=lambda case, options: pytest.fail("never run"), cells=lambda records: [],
    )  # fmt: skip
    (cell,) = comparable(shown_of(experiment, [record(1, experiment="speed")]))
    assert (cell.row, cell.column, cell.ours, cell.unit) == ("time", "step=1", 1.5, "s")

"""Engines side by side: what is run, computed and said. No test depends on how fast anything was."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import call

from gpipe_bench.experiments.engines.setup import ENGINES
from gpipe_bench.experiments.report.build import build
from gpipe_bench.experiments.side_by_side.peers import (
    ALWAYS,
    EXPERIMENT,
    MODELS,
    ROUNDS,
    engines_of,
    outcome,
    own_engines,
)
from gpipe_bench.experiments.side_by_side.peers_text import TARGETS, tables
from gpipe_bench.experiments.side_by_side.peers_work import PeersJob, PeersResult
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.places import REFERENCE
from gpipe_bench.harness.record import SCHEMA, Record
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.harness.store import Store

ROOT = Path(__file__).parents[1]
USERS = "mine:Engine@01234567"


def test_every_case_has_a_target_and_known_engines() -> None:
    assert set(TARGETS) == set(ROUNDS)
    for where, remat, _ in ROUNDS:
        arms = engines_of(where, remat, None)
        assert {engine for engine, _ in arms.values()} <= set(ENGINES)
        assert arms["ours"] == ("ours", remat)
        assert engines_of(where, remat, "all") == arms
    assert TARGETS["processes", "except_last", 4] == 1.12
    assert TARGETS["processes", "except_last", 16] == 1.04


def test_the_users_engine_joins_every_case() -> None:
    for where, remat, _ in ROUNDS:
        arms = engines_of(where, remat, USERS)
        assert arms.pop("mine:Engine") == (USERS, remat)
        assert arms == engines_of(where, remat, "all")


def test_recomputing_as_much_as_the_peers_is_a_row_of_its_own() -> None:
    assert engines_of("processes", "except_last", None)[ALWAYS] == ("ours", "always")
    assert ALWAYS not in engines_of("processes", "never", None)


def test_the_profiles_take_the_time_they_should() -> None:
    seconds = {
        profile: sum(case.estimate_s for case in EXPERIMENT.cases(RunOptions(profile=profile)))
        for profile in EXPERIMENT.profiles
    }
    assert seconds["smoke"] <= 40
    assert seconds["short"] <= 270
    assert seconds["full"] > seconds["short"]
    for profile in ("short", "full"):
        keys = [case.key for case in EXPERIMENT.cases(RunOptions(profile=profile))]
        assert len(keys) == len(MODELS) * len(ROUNDS)
    smoke = [case.key for case in EXPERIMENT.cases(RunOptions(profile="smoke"))]
    assert {key["where"] for key in smoke} == {"processes", "one process"}
    assert {key["model"] for key in smoke} == set(MODELS)


# Numbers and the table


def job(where: str = "processes", extra: str | None = None) -> PeersJob:
    engines = engines_of(where, "except_last", extra)
    return PeersJob("transformer-lm", {}, 2, 2, 4, engines, where == "one process", 2, 0)


def result(times: dict[str, list[float]], refused: dict[str, str] | None = None) -> PeersResult:
    checks = {name: {"forwards": 7} for name in times}
    return PeersResult(
        checks, refused or {}, (range(0, 3), range(3, 8)), {"0F": 0.008, "1B": 0.006},
        {"pinned_cores": "0", "threads": "1"}, times, Usage(1.0, 3.0, 2.0, 2),
        dict.fromkeys(times, 3 * 2**20),
    )  # fmt: skip


TIMES = {
    "ours": [0.2] * 12,
    "torch-gpipe": [0.3] * 12,
    "torch-1f1b": [0.21] * 12,
    ALWAYS: [0.22] * 12,
}


def record(found: Any, case: dict[str, Any], **more: Any) -> Record:
    return Record(
        schema=SCHEMA, experiment="peers", profile="short", case=case, environment={}, command="",
        started_at="", duration_s=0.0,
        **{
            "status": found.status, "reason": found.reason, "quantities": found.quantities,
            "details": found.details, **more,
        },
    )  # fmt: skip


CASE = {"model": "transformer", "where": "processes", "remat": "except_last", "num_microbatches": 4}


def test_speeds_are_ratios_of_the_same_round_over_the_slowest_process() -> None:
    fast = {name: [0.1] * 12 for name in TIMES}
    found = outcome(job(), [result(fast), result(TIMES)])
    numbers = {quantity.name: quantity for quantity in found.quantities}
    assert numbers["step of torch-gpipe"].samples == (300.0,) * 12
    assert numbers["ours against torch-gpipe"].samples == pytest.approx((1.5,) * 6)
    assert numbers["ours against torch-1f1b"].value == pytest.approx(1.05)
    assert numbers["shortest action"].value == pytest.approx(6.0)
    assert {quantity.provenance for quantity in numbers.values()} == {"measured"}
    assert found.details["partition"] == [[0, 3], [3, 8]]
    assert found.details["engines"][ALWAYS] == {"engine": "ours", "remat": "always"}
    assert [set(checks) for checks in found.details["checks"]] == [set(TIMES)] * 2


def test_an_engine_is_set_against_ours_with_the_same_schedule() -> None:
    engines = engines_of("processes", "never", None)
    times = {
        "ours": [0.2] * 12,
        "torch-gpipe": [0.3] * 12,
        "torch-1f1b": [0.15] * 12,
        "ours-1f1b": [0.1] * 12,
    }
    assert set(engines) == set(times)
    found = outcome(job()._replace(engines=engines, num_microbatches=8), [result(times)])
    numbers = {quantity.name: quantity.value for quantity in found.quantities}
    assert numbers["ours against torch-1f1b"] == pytest.approx(0.75)
    assert numbers["ours-1f1b against torch-1f1b"] == pytest.approx(1.5)
    lines = lines_of(tables([record(found, {**CASE, "remat": "never", "num_microbatches": 8})], []))
    assert lines["torch-1f1b"].endswith("1.500 [1.500, 1.500]      >= 1.00   yes")
    assert lines["ours-1f1b"].rstrip().endswith("0.500 [0.500, 0.500]")


def lines_of(text: str) -> dict[str, str]:
    """By what they begin with; of several the first, which the table of the case has."""
    return {line.split("  ")[0]: line for line in reversed(text.splitlines())}


def test_the_table_shows_what_holds_and_what_does_not() -> None:
    text = tables([record(outcome(job(), [result(TIMES), result(TIMES)]), CASE)], [])
    lines = lines_of(text)
    assert "transformer, one process per stage, re-materialized (except_last), M = 4" in lines
    assert lines["torch-gpipe"].endswith("1.500 [1.500, 1.500]      >= 1.12   yes")
    assert lines["torch-1f1b"].endswith(">= 1.12   NO")
    assert ">=" not in lines[ALWAYS]
    assert MODELS["transformer"][3] in text
    assert MODELS["amoebanet"][3] not in text


def test_an_engine_that_cannot_run_a_case_is_there_with_its_reason() -> None:
    refused = {"mine:Engine": "needs a process group", "torchgpipe": "torchgpipe is not installed"}
    found = outcome(job("one process", USERS), [result({"ours": [0.2] * 12}, refused)])
    text = tables([record(found, {**CASE, "where": "one process"})], [])
    lines = lines_of(text)
    assert lines["mine:Engine"].endswith("skipped: needs a process group")
    assert lines["torchgpipe"].endswith("skipped: torchgpipe is not installed")


def test_torchgpipe_that_is_missing_is_a_reason_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    case = next(c for c in EXPERIMENT.cases(RunOptions()) if c.key["where"] == "one process")
    found = EXPERIMENT.run(case, RunOptions(engine="all"))
    assert (found.status, found.quantities) == ("skipped", ())
    text = tables([record(found, dict(case.key))], [])
    assert "skipped: torchgpipe is not installed: pip install -e .[peers]" in text
    assert tables([], []) == "Engines side by side: nothing on record"
    assert EXPERIMENT.cells([]) == []


# For real, as little as possible


@pytest.mark.usefixtures("undrawn")
def test_smoke_sets_the_documented_engine_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One case over processes; the others run the same code."""
    tiny = {"num_layers": 6, "vocab_size": 8, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "seq_len": 8}
    monkeypatch.setitem(MODELS, "transformer", (MODELS["transformer"][0], tiny, 2, "a tiny Transformer"))
    monkeypatch.chdir(ROOT / "docs")
    command = ["run", "peers", "--profile", "smoke", "--engine", "own_engine_example:FillDrain"]
    command += ["--only", "where=processes", "--only", "model=transformer", "--results", tmp_path]
    monkeypatch.setattr(sys, "path", sys.path.copy())  # the command adds the folder it runs in
    status, out, err = call(*command)
    assert status == 0, err
    (found,) = [json.loads(line) for line in (tmp_path / "peers.jsonl").read_text().splitlines()]
    names = ["ours", "torch-gpipe", "torch-1f1b", ALWAYS, "own_engine_example:FillDrain"]
    assert list(found["details"]["engines"]) == names
    assert found["options"]["engine"].startswith("own_engine_example:FillDrain@")
    numbers = {quantity["name"]: quantity for quantity in found["quantities"]}
    assert len(numbers["ours against own_engine_example:FillDrain"]["samples"]) == found["details"]["rounds"]
    for checks in found["details"]["checks"]:
        assert [checks[name]["forwards"] for name in names] == [7, 8, 8, 8, 7]
        assert {checks[name]["backwards"] for name in names} == {4}
        assert {checks[name]["examples"] for name in names} == {2}
    assert "own_engine_example:FillDrain" in lines_of(out)


def test_each_engine_is_set_against_every_other_one_with_its_interval_and_its_memory_in_every_process() -> (
    None
):
    slow = {name: [1.1 * each for each in samples] for name, samples in TIMES.items()}
    found = outcome(job(), [result(TIMES), result(slow)])
    rows = [line.split("  ") for line in tables([record(found, CASE)], []).splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    pairs = {(row[0], row[1]): row[2:] for row in cells if len(row) == 4 and row[1] in TIMES}
    assert set(pairs) == set(itertools.combinations(TIMES, 2))
    assert pairs["torch-gpipe", "torch-1f1b"] == ["0.700 [0.700, 0.700]", "slower"]
    assert pairs["ours", "torch-1f1b"] == ["1.050 [1.050, 1.050]", "faster"]
    peaks = {row[0]: row[1] for row in cells if len(row) == 2 and "MiB, " in row[1]}
    assert peaks == dict.fromkeys(TIMES, "3 MiB, 3 MiB")


@pytest.mark.parametrize(
    ("ours", "said"),
    [([0.2, 0.22, 0.22, 0.2] * 3, "within the noise"), ([0.2, 0.1] * 6, "void")],
)
def test_no_engine_is_called_faster_that_the_control_does_not_let(ours: list[float], said: str) -> None:
    found = outcome(job(), [result({**TIMES, "ours": ours})])
    rows = [line.split() for line in tables([record(found, CASE)], []).splitlines()]
    (row,) = [row for row in rows if row[:2] == ["ours", "torch-1f1b"]]
    assert " ".join(row[5:]) == said


@pytest.mark.parametrize(("rounds", "is_judged"), [(2, False), (4, False), (5, True)])
def test_nothing_is_judged_from_so_few_rounds_that_their_interval_is_none(
    rounds: int, is_judged: bool
) -> None:
    times = {name: samples[: 2 * rounds] for name, samples in TIMES.items()}
    text = tables([record(outcome(job(), [result(times)]), CASE)], [])
    said = {line.rpartition("  ")[2].strip() for line in text.splitlines()}
    assert ("too few rounds" in said) != is_judged
    assert bool(said & {"yes", "NO", "faster", "slower"}) == is_judged


def kept(folder: Path, *engines: str) -> Path:
    """A results folder with a run of `peers` for each choice of engines."""
    store = Store(folder)
    for engine in engines:
        times = {**TIMES, **{name.partition("@")[0]: [0.25] * 12 for name in own_engines(engine)}}
        found = outcome(job(extra=engine), [result(times)])
        options = {"engine": engine}
        store.append(record(found, CASE, options=options, revision=EXPERIMENT.revision))
    return folder


def test_compare_and_report_show_the_runs_in_which_an_engine_took_part(tmp_path: Path) -> None:
    results = kept(tmp_path, "all", USERS, "yours:Engine@76543210")
    for name, there in (("mine:Engine", 5), ("yours:Engine", 5), ("torch-1f1b", 5)):
        status, out, err = call("compare", "peers", "--results", results, "--engine", name)
        assert status == 0, err
        assert sum(line.startswith(f"{name} ") or f"  {name} " in line for line in out.splitlines()) >= there
    status, out, err = call("compare", "peers", "--results", results, "--engine", "mine:Engin")
    assert (status, out) == (2, "")
    assert "no record has it (did you mean 'mine:Engine'?); there are: all, ours, torch-gpipe" in err
    status, _, err = call("compare", "peers", "--machines", results, "--engine", "mine:Engine")
    assert (status, "leave it out" in err) == (2, True)
    status, _, err = call("compare", "table1", "--results", REFERENCE / "cpu-2-cores", "--engine", "ours")
    assert (status, err) == (2, "error: --engine ours: table1 runs no engine; leave the option out\n")

    (view,) = [each for each in build(results, figures=False).experiments if each.name == "peers"]
    assert all(f"--engine {name}\n" in view.text for name in ("all", USERS, "yours:Engine@76543210"))
    page = build(results, figures=False, engine="mine:Engine")
    (view,) = [each for each in page.experiments if each.name == "peers"]
    assert view.text.startswith(f"--engine {USERS}\n")
    with pytest.raises(ValueError, match="no record has it"):
        build(results, figures=False, engine="nobody:Engine")


def test_other_programs_get_every_number_though_the_paper_has_none() -> None:
    records = Store(REFERENCE / "cpu-2-cores").load("peers").records
    status, out, _ = call("compare", "peers", "--results", REFERENCE / "cpu-2-cores", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert len(lines) == sum(len(record.quantities) for record in records)
    (ours,) = (line for line in lines if line["name"] == "step of ours" and line["case"] == records[0].case)
    quantity = records[0].quantity("step of ours")
    assert quantity is not None
    assert (ours["value"], ours["low"], ours["high"]) == (quantity.value, quantity.low, quantity.high)
    assert (ours["unit"], ours["provenance"]) == ("ms", "measured")
    _, out, _ = call("compare", "peers", "--results", REFERENCE / "cpu-2-cores", "--markdown")
    assert out.startswith("```text\nEngines side by side")
    assert out.endswith("```\n")

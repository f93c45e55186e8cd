"""Engines side by side: what is run, computed and said. No test depends on how fast anything was."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import call
from records import record
from refused import refused

from gpipe_bench.experiments.peers import (
    ALWAYS,
    EXPERIMENT,
    MODELS,
    PLANS,
    engines_of,
    job_of,
    numbers,
    own_engines,
    tables,
)
from gpipe_bench.experiments.registry import ENGINES
from gpipe_bench.experiments.report.build import build
from gpipe_bench.experiments.side_by_side import Found, side_by_side
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.harness.store import Store

USERS = "mine:Engine@01234567"
CASE = {"model": "transformer", "where": "processes", "remat": "except_last", "num_microbatches": 4}
TIMES = {
    "ours": [0.2] * 12,
    "torch-gpipe": [0.3] * 12,
    "torch-1f1b": [0.21] * 12,
    ALWAYS: [0.22] * 12,
}


def test_every_case_has_known_engines_and_the_users_beside_them() -> None:
    for where, remat, _ in PLANS:
        known = engines_of(where, remat, None)
        assert {engine for engine, _ in known.values()} <= set(ENGINES)
        assert known["ours"] == ("ours", remat)
        assert (ALWAYS in known) == (where == "processes" and remat != "never")
        assert engines_of(where, remat, "all") == known
        assert engines_of(where, remat, USERS) == {**known, "mine:Engine": (USERS, remat)}


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
        assert len(keys) == len(MODELS) * len(PLANS)
    smoke = [case.key for case in EXPERIMENT.cases(RunOptions(profile="smoke"))]
    assert {key["where"] for key in smoke} == {"processes", "one process"}
    assert {key["model"] for key in smoke} == set(MODELS)


# Numbers and the table


def measured(
    *of_processes: dict[str, list[float]],
    extra: str | None = None,
    refused: dict[str, str] | None = None,
    **changes: Any,
) -> Outcome:
    """What a case makes of the seconds that its processes found."""
    details = {"refused": refused or {}, "partition": (range(3), range(3, 8)),
               "actions_s": {"0F": 0.008, "1B": 0.006}}  # fmt: skip
    found = []
    for times in of_processes:
        more = {"checks": {name: {} for name in times}, "peak_bytes": dict.fromkeys(times, 3 * 2**20)}
        pinned = {"pinned_cores": "0", "threads": "1"}
        found.append(Found(times, Usage(1.0, 3.0, 2.0, 2), pinned, {**details, **more}))
    job = job_of({**CASE, **changes}, extra)
    return side_by_side(lambda rounds: found, partial(numbers, job, {}), 6, again=False)


def kept(found: Outcome, **changes: Any) -> Record:
    more = {"case": CASE} | changes
    return record(
        experiment="peers", status=found.status, reason=found.reason, quantities=found.quantities,
        details=found.details, **more,
    )  # fmt: skip


def test_speeds_are_ratios_of_the_same_round_over_the_slowest_process() -> None:
    fast = {name: [0.1] * 12 for name in TIMES}
    found = measured(fast, TIMES)
    values = {quantity.name: quantity for quantity in found.quantities}
    assert values["step of torch-gpipe"].samples == (300.0,) * 12
    assert values["ours against torch-gpipe"].samples == pytest.approx((1.5,) * 6)
    assert values["ours against torch-1f1b"].value == pytest.approx(1.05)
    assert values["shortest action"].value == pytest.approx(6.0)
    assert {quantity.provenance for quantity in values.values()} == {"measured"}
    assert found.details["partition"] == [[0, 3], [3, 8]]
    assert found.details["engines"][ALWAYS] == {"engine": "ours", "remat": "always"}
    assert [set(checks) for checks in found.details["checks"]] == [set(TIMES)] * 2


def test_an_engine_is_set_against_ours_with_the_same_schedule() -> None:
    engines = engines_of("processes", "never", None)
    seconds = {"ours": 0.2, "torch-gpipe": 0.3, "torch-1f1b": 0.15, "ours-1f1b": 0.1}
    times = {name: [each] * 12 for name, each in seconds.items()}
    assert set(engines) == set(times)
    found = measured(times, remat="never", num_microbatches=8)
    values = {quantity.name: quantity.value for quantity in found.quantities}
    assert values["ours against torch-1f1b"] == pytest.approx(0.75)
    assert values["ours-1f1b against torch-1f1b"] == pytest.approx(1.5)
    lines = lines_of(tables([kept(found, case={**CASE, "remat": "never", "num_microbatches": 8})]))
    assert lines["torch-1f1b"].endswith("1.500 [1.500, 1.500]      >= 1.00   yes")
    assert lines["ours-1f1b"].rstrip().endswith("0.500 [0.500, 0.500]")


def lines_of(text: str) -> dict[str, str]:
    """By what they begin with; of several the first, which the table of the case has."""
    return {line.split("  ")[0]: line for line in reversed(text.splitlines())}


def test_torchgpipe_that_is_missing_is_a_reason_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    case = next(c for c in EXPERIMENT.cases(RunOptions()) if c.key["where"] == "one process")
    found = EXPERIMENT.run(case, RunOptions(engine="all"))
    assert (found.status, found.quantities) == ("skipped", ())
    text = tables([kept(found, case=dict(case.key))])
    assert "skipped: torchgpipe is not installed: pip install -e .[peers]" in text
    assert tables([]) == "Engines side by side: nothing on record"
    assert EXPERIMENT.cells([]) == []


@pytest.mark.parametrize(
    ("ours", "said"),
    [([0.2, 0.22, 0.22, 0.2] * 3, "within the noise"), ([0.2, 0.1] * 6, "void")],
)
def test_no_engine_is_called_faster_that_the_control_does_not_let(ours: list[float], said: str) -> None:
    found = measured({**TIMES, "ours": ours})
    rows = [line.split() for line in tables([kept(found)]).splitlines()]
    (row,) = [row for row in rows if row[:2] == ["ours", "torch-1f1b"]]
    assert " ".join(row[5:]) == said


@pytest.mark.parametrize(("rounds", "is_judged"), [(2, False), (4, False), (5, True)])
def test_nothing_is_judged_from_so_few_rounds_that_their_interval_is_none(
    rounds: int, is_judged: bool
) -> None:
    times = {name: samples[: 2 * rounds] for name, samples in TIMES.items()}
    text = tables([kept(measured(times))])
    said = {line.rpartition("  ")[2].strip() for line in text.splitlines()}
    assert ("too few rounds" in said) != is_judged
    assert bool(said & {"yes", "NO", "faster", "slower"}) == is_judged


def results_of(folder: Path, *engines: str) -> Path:
    """A results folder with a run of `peers` for each choice of engines."""
    store = Store(folder)
    for engine in engines:
        times = {**TIMES, **{name.partition("@")[0]: [0.25] * 12 for name in own_engines(engine)}}
        found = measured(times, extra=engine)
        store.append(kept(found, options={"engine": engine}, revision=EXPERIMENT.revision))
    return folder


def test_compare_and_report_show_the_runs_in_which_an_engine_took_part(tmp_path: Path) -> None:
    results = results_of(tmp_path, "all", USERS, "yours:Engine@76543210")
    for name, there in (("mine:Engine", 5), ("yours:Engine", 5), ("torch-1f1b", 5)):
        status, out, err = call("compare", "peers", "--results", results, "--engine", name)
        assert status == 0, err
        assert sum(line.startswith(f"{name} ") or f"  {name} " in line for line in out.splitlines()) >= there
    status, out, err = call("compare", "peers", "--results", results, "--engine", "mine:Engin")
    assert (status, out) == (2, "")
    assert "no record has it (did you mean 'mine:Engine'?); there are: all, ours, torch-gpipe" in err
    status, _, err = call("compare", "peers", "--machines", results, "cpu-2-cores", "--engine", "mine:Engine")
    assert (status, "leave it out" in err) == (2, True)
    status, _, err = call("compare", "table1", "--results", REFERENCE / "cpu-2-cores", "--engine", "ours")
    assert (status, err) == (2, "error: --engine ours: table1 runs no engine; leave the option out\n")

    (view,) = [each for each in build(results, figures=False).experiments if each.name == "peers"]
    assert all(f"--engine {name}\n" in view.text for name in ("all", USERS, "yours:Engine@76543210"))
    page = build(results, figures=False, engine="mine:Engine")
    (view,) = [each for each in page.experiments if each.name == "peers"]
    assert view.text.startswith(f"--engine {USERS}\n")
    with refused(ValueError):
        build(results, figures=False, engine="nobody:Engine")

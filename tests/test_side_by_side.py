"""Variants in turns: where identical code differs from itself, nothing else is judged."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers_trials
import pytest
from records import record
from trials import Series, load, timed

from gpipe_bench.experiments.registry import load as experiment
from gpipe_bench.experiments.side_by_side import (
    Found,
    is_faster,
    measured,
    side_by_side,
    state_of,
    steps_of,
    verdict,
    void_by,
)
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity, decode, encode, from_samples
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.harness.store import Store

DRIFTING = [0.24, 0.2, 0.23, 0.2] * 3
"""Two samples of each round: the first is always the slower one."""
STILL = [0.21, 0.2, 0.2, 0.21] * 3
EXCLUDED = "the control is 1.175 [1.150, 1.200], not 1"


def quantity(value: float, low: float | None, high: float | None, name: str = "x") -> Quantity:
    return Quantity(name=name, value=value, unit="ratio", provenance="measured", low=low, high=high)


def found(ours: list[float], **details: Any) -> Found:
    times = {"ours": ours, "theirs": [0.3] * len(ours)}
    return Found(times, Usage(1.0, 3.0, 2.0, 2), {"pinned_cores": "0", "threads": "1"}, details)


def case(*of_takes: list[float], again: bool = True, status: str = "done") -> tuple[Outcome, list[int]]:
    """A case whose processes find these samples of ours, one after another, and the rounds asked for."""
    asked: list[int] = []

    def take(rounds: int) -> list[Found]:
        asked.append(rounds)
        return [found(of_takes[len(asked) - 1])] * 2

    def numbers(times: Any, processes: Any) -> Outcome:
        return Outcome(tuple(steps_of(times)), {"mine": 1}, status, "")  # type: ignore[arg-type]

    return side_by_side(take, numbers, 12, again=again), asked


@pytest.mark.parametrize(
    ("takes", "rounds", "word", "why"),
    [
        ([STILL], [12], "", ""),
        ([DRIFTING, STILL], [12, 24], "", f"with 2 times the rounds, because at first {EXCLUDED}"),
        ([DRIFTING, DRIFTING], [12, 24], "contaminated", f"and before, in half the rounds: {EXCLUDED}"),
    ],
)
def test_a_void_case_is_measured_once_more_with_more_rounds(
    takes: list[list[float]], rounds: list[int], word: str, why: str
) -> None:
    outcome, asked = case(*takes)
    kept = decode(encode(record(quantities=outcome.quantities, details=outcome.details)))
    assert asked == rounds
    assert (kept.details["rounds"], kept.details["mine"]) == (rounds[-1], 1)
    assert kept.details["threads"] == ["1", "1"]
    assert kept.details.get("void", "").startswith(EXCLUDED if word else "")
    assert state_of(kept)[0] == word
    assert state_of(kept)[1].endswith(why)
    assert [each.name for each in kept.quantities] == [
        "step of ours", "step of theirs", "control", "used by others",
    ]  # fmt: skip
    assert kept.quantity("used by others").value == pytest.approx((3.0 - 2.0) / 4.0)  # type: ignore[union-attr]


def test_a_failed_case_and_one_of_the_smoke_profile_are_not_measured_again() -> None:
    assert case(DRIFTING, status="failed")[1] == [12]
    outcome, asked = case(DRIFTING, again=False)
    assert (asked, outcome.details["void"]) == ([12], EXCLUDED)
    # Records know it from their control alone, too.
    assert state_of(record(quantities=outcome.quantities))[0] == "void"


@pytest.mark.parametrize(
    ("control", "void"),
    [
        (quantity(1.173, 1.053, 1.293), True),
        (quantity(0.95, 0.92, 0.99), True),
        (quantity(1.02, 0.99, 1.05), False),
        (quantity(1.1, 1.0, 1.2), False),
        (quantity(1.5, None, None), False),  # one round has no interval, and no verdict is sure of it
        (None, False),
    ],
)
def test_a_control_voids_when_its_interval_excludes_one(control: Quantity | None, void: bool) -> None:
    assert bool(void_by(control)) == void


@pytest.mark.parametrize(
    ("samples", "sign", "bound", "said"),
    [
        ([0.97, 0.98, 0.99], ">=", 0.95, "yes"),
        ([0.94, 0.98, 0.99], ">=", 0.95, "yes, within the noise"),
        ([0.90, 0.94, 0.99], ">=", 0.95, "NO, within the noise"),
        ([0.90, 0.91, 0.92], ">=", 0.95, "NO"),
        ([30.0, 40.0, 50.0], "<=", 60.0, "yes"),
        ([70.0, 80.0, 90.0], "<=", 60.0, "NO"),
        ([0.97], ">=", 0.95, "yes, within the noise"),  # one sample has no interval
    ],
)
def test_a_target_is_judged_by_median_and_interval(
    samples: list[float], sign: Any, bound: float, said: str
) -> None:
    assert verdict(from_samples("x", samples, "ratio"), sign, bound, None) == said


@pytest.mark.parametrize(
    ("value", "reach", "said", "faster"),
    [
        (1.10, (0.98, 1.03), "NO", True),
        (1.10, (0.89, 1.05), "NO, within the noise", None),  # identical code was further from 1
        (0.90, (0.98, 1.03), "yes", False),
        (0.90, (0.95, 1.15), "yes, within the noise", None),
    ],
)
def test_nothing_is_certain_within_the_noise_floor(
    value: float, reach: tuple[float, float], said: str, faster: bool | None
) -> None:
    ratio, control = quantity(value, value - 0.01, value + 0.01), quantity(1.0, *reach)
    assert verdict(ratio, "<=", 1.0, control) == said
    assert is_faster(ratio, control) is faster
    assert measured(ratio) == f"{value:.3f} [{value - 0.01:.3f}, {value + 0.01:.3f}]"


@pytest.mark.parametrize("name", ["peers", "engine", "schedules"])
def test_no_experiment_judges_anything_under_a_control_that_is_not_one(name: str) -> None:
    """The committed records, as if their controls had been others."""
    tables = experiment(name).tables
    assert tables is not None

    def judged(samples: list[float]) -> list[str]:
        control = from_samples("control", samples, "ratio")
        records = [
            replace(
                each,
                quantities=tuple(control if own.name == "control" else own for own in each.quantities),
                details={key: value for key, value in each.details.items() if key not in ("void", "before")},
            )
            for each in Store(REFERENCE / "cpu-2-cores").load(name).records
        ]
        return re.findall(r"  (yes|NO|void|faster|slower)\b", tables(records))

    assert set(judged([0.99, 1.0, 1.0, 1.0, 1.01])) >= {"yes", "NO"}
    assert set(judged([1.15, 1.175, 1.175, 1.175, 1.2])) == {"void"}


# One engine under three names, and a series of trials that was stopped


def trial_record(said: str = "within the noise", void: str = "", **more: object) -> dict[str, object]:
    return {
        "void": void, "before": "", "said": {"one against another": said}, "duration_s": 20.0, "cores": 2,
        "ratios": {"control": [1.0, 0.95, 1.04], "one against another": [1.02, 1.01, 1.03]},
        "load_after": 1.0, **more,
    }  # fmt: skip


def test_a_trial_is_wrong_that_calls_one_engine_two() -> None:
    ratio = quantity(1.02, 1.01, 1.03, "one against another")
    for reach, said in (((0.99, 1.01), "differ"), ((0.95, 1.04), "within the noise")):
        control = quantity(1.0, *reach, "control")
        assert peers_trials.judged([ratio, control]) == ("", {"one against another": said})
    assert peers_trials.outcome(trial_record("differ", void=EXCLUDED)) == "contaminated"
    text = peers_trials.summary([trial_record(), trial_record("differ"), trial_record(before="x")])
    assert "wrong verdicts: 1 of 3" in text
    assert "2 judged, 1 judged after a second measurement" in text
    assert "intervals that exclude 1 before the rules: 3" in text
    assert peers_trials.summary([]) == "0 of 20 trials, 0 ratios of one engine to itself"


def test_the_page_says_what_the_trials_of_one_engine_say() -> None:
    series = peers_trials.SERIES
    text = series.docs.read_text(encoding="utf-8")
    assert series.rewritten(text, load(series.records)) == text, "stale: --write-docs"


def series_in(folder: Path, stop_before: int | None = None) -> tuple[Series[int], list[int]]:
    """Three trials, and the list of those that ran; the machine is switched off in one of them."""
    ran: list[int] = []

    def run(number: int) -> dict[str, Any]:
        if number == stop_before:
            raise KeyboardInterrupt
        ran.append(number)
        return timed(lambda: {"number": number})

    return Series(
        program="a.program", about="What it is for.",
        records=folder / "results" / "trials.jsonl", docs=folder / "page.md",
        plan=lambda: range(3), which=lambda record: int(record["number"]), ready=lambda: nullcontext(run),
        said=lambda record: f"{record['number']}: right", summary=lambda records: f"{len(records)} trials",
    ), ran  # fmt: skip


def test_a_series_that_was_stopped_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, first = series_in(tmp_path, stop_before=1)
    with pytest.raises(KeyboardInterrupt):
        broken.main([])
    with broken.records.open("a") as file:
        file.write('{"number": 1, "cut o')
    whole, then = series_in(tmp_path)
    assert whole.main(["--seconds", "-1"]) == 0  # begins no further trial
    assert (first, then, capsys.readouterr().out.splitlines()[-1]) == ([0], [], "1 trials")
    assert whole.main([]) == 0
    assert then == [1, 2]
    *_, last, said = capsys.readouterr().out.splitlines()
    assert last.startswith("2: right (")
    assert said == "3 trials"
    assert [each["number"] for each in load(whole.records)] == [0, 1, 2]
    assert {"number", "started_at", "duration_s", "load_after", "cores"} < set(load(whole.records)[0])

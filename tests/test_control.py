"""What identical code makes of the machine: where it differs from itself, nothing else is judged."""

from __future__ import annotations

import pytest
from test_peers import ALWAYS, CASE, TIMES, job, lines_of, record, result

from gpipe_bench.experiments.side_by_side import control as control_rule
from gpipe_bench.experiments.side_by_side import engine as engine_bench
from gpipe_bench.experiments.side_by_side import engine_text as engine_bench_text
from gpipe_bench.experiments.side_by_side import peers_text, trials
from gpipe_bench.experiments.side_by_side.engine_work import EngineJob, EngineResult
from gpipe_bench.experiments.side_by_side.peers import outcome
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity, decode, encode
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.harness.trials import load

DRIFTING = [0.24, 0.2, 0.23, 0.2] * 3
"""Our two samples of each round: the first is always the slower one."""


def control(value: float, low: float | None, high: float | None) -> Quantity:
    return Quantity(name="control", value=value, unit="ratio", provenance="measured", low=low, high=high)


def peers_with(ours: list[float]):
    found = outcome(job(), [result({**TIMES, "ours": ours})])
    return record(found, CASE)


def engine_with(ours: list[float]):
    times = {"ours": ours, "bare layers": [0.19] * 12}
    found = engine_bench.outcome(
        EngineJob("overlap", 8, 32, "never", 2),
        [
            EngineResult(
                {}, {"0F": 0.01}, {"pinned_cores": "0", "threads": "1"}, times, Usage(1.0, 3.0, 2.0, 2)
            )
        ],
    )
    return record(found, {"part": "overlap", "num_stages": 8, "num_microbatches": 32, "remat": "never"})


def test_peers_judge_nothing_under_a_control_that_is_not_one() -> None:
    shown = peers_text.tables([peers_with(DRIFTING)], [])
    rows = lines_of(shown)
    for arm in ("torch-gpipe", "torch-1f1b"):
        assert rows[arm].endswith(">= 1.12   void")
        assert "[" in rows[arm]  # the numbers stay
    assert "void: the control is 1.175 [1.150, 1.200], not 1: the machine changed while it measured" in shown
    assert ALWAYS in rows
    assert "yes" not in shown
    assert "NO" not in shown


def test_the_engines_targets_are_not_judged_either() -> None:
    shown = engine_bench_text.tables([engine_with(DRIFTING)], [])
    rows = [line for line in shown.splitlines() if "waiting stages, K=8" in line]
    assert len(rows) == 2
    for row in rows:
        assert row.endswith("void: the control is 1.175 [1.150, 1.200], not 1")
    assert "yes" not in shown
    assert "NO" not in shown


@pytest.mark.parametrize("made", [peers_with, engine_with])
def test_the_record_says_it_too(made) -> None:
    """So that a reader of the JSON lines knows."""
    bad = decode(encode(made(DRIFTING)))
    assert bad.details["void"].startswith("the control is 1.175 [1.150, 1.200], not 1")
    assert "void" not in made([0.2] * 12).details
    assert "void" not in made(STILL).details


def test_records_from_before_are_judged_by_their_control() -> None:
    old = peers_with(DRIFTING)
    del old.details["void"]
    assert ">= 1.12   void" in peers_text.tables([old], [])


@pytest.mark.parametrize(
    ("quantity", "void"),
    [
        (control(1.173, 1.053, 1.293), True),
        (control(0.95, 0.92, 0.99), True),
        (control(1.02, 0.99, 1.05), False),
        (control(1.0, 1.0, 1.0), False),
        (control(1.1, 1.0, 1.2), False),
        (control(1.5, None, None), False),  # one round has no interval, and no verdict is sure of it
        (None, False),
    ],
)
def test_a_control_voids_when_its_interval_excludes_one(quantity: Quantity | None, void: bool) -> None:
    assert bool(control_rule.void_by(quantity)) == void


# Measured again


def taken(controls: list[list[float]]):
    """What each call of a case's measurement finds, and how many rounds it was asked for."""
    asked: list[int] = []

    def take(rounds: int):
        asked.append(rounds)
        return outcome(job(), [result({**TIMES, "ours": controls[len(asked) - 1]})])

    return take, asked


STILL = [0.21, 0.2, 0.2, 0.21] * 3


@pytest.mark.parametrize(
    ("controls", "rounds", "word"),
    [
        ([STILL], [12], ""),
        ([DRIFTING, STILL], [12, 24], ""),
        ([DRIFTING, DRIFTING], [12, 24], "contaminated"),
    ],
)
def test_a_void_case_is_measured_once_more_with_more_rounds(controls, rounds, word) -> None:
    take, asked = taken(controls)
    found = record(control_rule.held_still(take, 12), CASE)
    assert asked == rounds
    shown = peers_text.tables([found], [])
    rows = lines_of(shown)
    said = rows["torch-1f1b"].rpartition("  ")[2]
    assert (said == word) if word else said.startswith(("yes", "NO"))
    assert ("measured again with 2 times the rounds" in shown) == (len(rounds) == 2 and not word)
    assert ("and before, in half the rounds: the control is 1.175" in shown) == bool(word)


def test_a_failed_case_is_not_measured_again() -> None:
    calls = []

    def take(rounds: int) -> Outcome:
        calls.append(rounds)
        return Outcome(status="failed", reason="broke", details={"void": "the control is 2, not 1"})

    assert control_rule.held_still(take, 3).status == "failed"
    assert calls == [3]


@pytest.mark.parametrize(
    ("value", "reach", "said"),
    [
        (1.10, (0.98, 1.03), "NO"),
        (1.10, (0.89, 1.05), "NO, within the noise"),  # identical code was further from 1
        (0.90, (0.98, 1.03), "yes"),
        (0.90, (0.95, 1.15), "yes, within the noise"),
    ],
)
def test_nothing_is_certain_within_the_noise_floor(
    value: float, reach: tuple[float, float], said: str
) -> None:
    ratio = Quantity(
        name="x", value=value, unit="ratio", provenance="measured", low=value - 0.01, high=value + 0.01
    )
    target = control_rule.Target("", {}, "x", at_least=False, bound=1.0)
    assert control_rule.verdict(target, ratio, control(1.0, *reach)) == said


# One engine under three names


def trial_record(said: str = "within the noise", void: str = "", **more: object) -> dict[str, object]:
    return {
        "void": void, "before": "", "said": {"one against another": said}, "duration_s": 20.0, "cores": 2,
        "ratios": {"control": [1.0, 0.95, 1.04], "one against another": [1.02, 1.01, 1.03]},
        "load_after": 1.0, **more,
    }  # fmt: skip


def test_a_trial_is_wrong_that_calls_one_engine_two() -> None:
    assert not trials.is_wrong(trial_record())
    assert trials.is_wrong(trial_record("differ"))
    assert not trials.is_wrong(trial_record("differ", void="the control is 2, not 1"))
    text = trials.summary([trial_record(), trial_record("differ"), trial_record(before="x")])
    assert "wrong verdicts: 1 of 3" in text
    assert "2 judged, 1 judged after a second measurement" in text
    assert "intervals that exclude 1 before the rules: 3" in text
    assert trials.summary([]) == "0 of 20 trials, 0 ratios of one engine to itself"


def test_the_page_says_what_the_trials_of_one_engine_say() -> None:
    text = trials.SERIES.docs.read_text(encoding="utf-8")
    assert trials.SERIES.rewritten(text, load(trials.SERIES.records)) == text, "stale: --write-docs"

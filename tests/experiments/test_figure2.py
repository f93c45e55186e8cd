"""Tests Figure 2's formulas and counts, and verdicts on timed variants."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import all_ran, record

from gpipe_bench.experiments.beyond.engine_turns import Found, side_by_side
from gpipe_bench.experiments.paper.figure2 import EXPERIMENT, VARIANTS
from gpipe_bench.experiments.registry import load as experiment
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Metric, decode, encode, from_samples
from gpipe_bench.harness.rounds import Usage, is_faster, measured, state_of
from gpipe_bench.harness.store import Store


@given(st.sampled_from(sorted(VARIANTS)), st.integers(1, 7), st.integers(1, 12))
def test_the_replay_equals_the_closed_form(name: str, num_stages: int, num_microbatches: int) -> None:
    variant = VARIANTS[name]
    assert variant.bubble(num_stages, num_microbatches) == variant.closed_form(num_stages, num_microbatches)


def test_every_formula_of_the_paper_is_met() -> None:
    records = [*all_ran(EXPERIMENT, part="bubble"), *all_ran(EXPERIMENT, part="formula")]
    comparisons = compare(EXPERIMENT.cells(records), whole=("formulas",))
    verdicts = {(c.row, c.column): c.verdict for c in comparisons}
    assert len(verdicts) == 15, "and early recomputation leaves less of the bubble"
    assert set(verdicts.values()) == {"identity"}
    assert {metric.provenance for each in records for metric in each.metrics} == {"modelled"}, "nothing ran"
    for each in records[:4]:
        assert all(pair["replay"] == pair["closed form"] for pair in each.details["fractions"].values())


DRIFTING = [0.24, 0.2, 0.23, 0.2] * 3
"""Two samples of each round: the first is always the slower one."""
STILL = [0.21, 0.2, 0.2, 0.21] * 3
EXCLUDED = "the control is 1.175 [1.150, 1.200], not 1"


def metric(value: float, low: float | None, high: float | None, name: str = "x") -> Metric:
    return Metric(name=name, value=value, unit="ratio", provenance="measured", low=low, high=high)


def found(ours: list[float], **details: Any) -> Found:
    times = {"ours": ours, "theirs": [0.3] * len(ours)}
    return Found(times, Usage(1.0, 3.0, 2.0, 2), {"pinned_cores": "0", "threads": "1"}, details)


def case(*of_takes: list[float], again: bool = True, status: str = "done") -> tuple[Outcome, list[int]]:
    """The outcome of a case whose n-th take gives the n-th samples, and each take's rounds."""
    asked: list[int] = []

    def take(rounds: int) -> list[Found]:
        asked.append(rounds)
        return [found(of_takes[len(asked) - 1])] * 2

    def numbers(times: Any, processes: Any) -> Outcome:
        steps = [
            from_samples(f"step of {name}", [1e3 * sample for sample in samples], "ms")
            for name, samples in times.items()
        ]
        return Outcome(tuple(steps), {"mine": 1}, status, "")  # type: ignore[arg-type]

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
    kept = decode(encode(record(metrics=outcome.metrics, details=outcome.details)))
    assert asked == rounds
    assert (kept.details["rounds"], kept.details["mine"]) == (rounds[-1], 1)
    assert kept.details["threads"] == ["1", "1"]
    assert kept.details.get("void", "").startswith(EXCLUDED if word else "")
    assert state_of(kept)[0] == word
    assert state_of(kept)[1].endswith(why)
    assert [each.name for each in kept.metrics] == [
        "step of ours", "step of theirs", "control", "used by others",
    ]  # fmt: skip
    assert kept.metric("used by others").value == pytest.approx((3.0 - 2.0) / 4.0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "reach", "faster"),
    [
        (1.10, (0.98, 1.03), True),
        (1.10, (0.89, 1.05), None),  # the control is as far from 1
        (0.90, (0.98, 1.03), False),
        (0.90, (0.95, 1.15), None),
        (1.005, (0.999, 1.001), None),  # its own interval holds 1
    ],
)
def test_nothing_is_certain_within_the_noise_floor(
    value: float, reach: tuple[float, float], faster: bool | None
) -> None:
    ratio, control = metric(value, value - 0.01, value + 0.01), metric(1.0, *reach)
    assert is_faster(ratio, control) is faster
    assert measured(ratio) == f"{value:.3f} [{value - 0.01:.3f}, {value + 0.01:.3f}]"


@pytest.mark.parametrize("name", ["engines"])
def test_no_experiment_judges_anything_under_a_control_that_is_not_one(name: str) -> None:
    """The committed records, as if their controls had been others."""
    tables = experiment(name).tables
    assert tables is not None

    def judged(samples: list[float]) -> list[str]:
        control = from_samples("control", samples, "ratio")
        records = [
            replace(
                each,
                metrics=tuple(control if own.name == "control" else own for own in each.metrics),
                details={key: value for key, value in each.details.items() if key not in ("void", "before")},
            )
            for each in Store(REFERENCE / "cpu-2-cores").load(name).records
        ]
        return re.findall(r"  (void|faster|slower)\b", tables(records))

    assert set(judged([0.99, 1.0, 1.0, 1.0, 1.01])) == {"faster", "slower"}
    assert set(judged([1.15, 1.175, 1.175, 1.175, 1.2])) == {"void"}

"""What the guard must not say: that noise is an improvement, and that what it could not see has passed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_guard_run import SAME, SLOWER, fake, finding, with_base  # noqa: F401  # fake is a fixture

from gpipe_bench.experiments.commands import cli, exits
from gpipe_bench.experiments.guard.text import conclusion
from gpipe_bench.harness.guard.judge import Change, Round, Sample, judge, verdict_of

IMPROVED = replace(SAME, verdict="improved", head=Change(-0.1, -0.12, -0.08))
UNSURE = replace(SAME, verdict="inconclusive", head=Change(0.0, -0.2, 0.2))
VOID = replace(SAME, verdict="contaminated", control=Change(0.1, 0.08, 0.12))


@pytest.mark.parametrize(
    ("low", "high", "floor", "verdict"),
    [
        (-0.14, -0.08, 0.173, "inconclusive"),
        (-0.14, -0.08, 0.08, "improved"),
        (-0.30, -0.20, 0.173, "improved"),
        (-0.30, -0.14, 0.173, "inconclusive"),
        (-0.14, -0.08, 0.01, "improved"),
        (0.08, 0.14, 0.173, "regression"),  # fresh processes have to confirm that
        (-0.01, 0.01, 0.02, "same"),
    ],
)
def test_no_improvement_within_the_noise_floor(low: float, high: float, floor: float, verdict: str) -> None:
    assert verdict_of(Change((low + high) / 2, low, high), floor) == verdict


def test_identical_code_on_a_restless_machine_has_not_improved() -> None:
    """The head happens to be a tenth faster in every round, while the base differs as much from itself."""

    def pair(seconds: float) -> tuple[Sample, Sample]:
        return (Sample(seconds, seconds), Sample(seconds, seconds))

    swings = [0.85, 1.17, 0.9, 1.15, 1.0, 0.86]
    rounds = [Round(pair(1.0), pair(0.88), pair(swing)) for swing in swings * 2]
    judged = judge(rounds, 0.975)
    assert judged.noise_floor > 0.12
    assert not judged.control.excludes_zero
    assert judged.verdict == "inconclusive"


def test_the_noise_floor_is_named_where_it_decides() -> None:
    run = replace(UNSURE, head=Change(-0.112, -0.14, -0.08), control=Change(0.02, -0.1, 0.173))
    assert (
        conclusion(finding("a", run))
        == "a: can't tell, -11.2% [-14.0, -8.0] is within the noise floor of 17.3%"
    )


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([[SAME], [IMPROVED]], "guard: passed"),
        ([[SAME], [UNSURE]], "guard: passed, but nothing can be told of transformer"),
        ([[SLOWER, SAME], [VOID, VOID]], "guard: passed, but nothing can be told of transformer"),
        ([[UNSURE], [UNSURE]], "guard: inconclusive: nothing was measured well enough to tell"),
        ([[UNSURE], [VOID, VOID]], "guard: inconclusive: nothing was measured well enough to tell"),
        ([[SLOWER], [UNSURE]], "guard: inconclusive: nothing was measured well enough to tell"),
        ([[SLOWER, SLOWER], [UNSURE]], "guard: FAILED"),
    ],
)
def test_what_could_not_be_told_has_not_passed(
    fake: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    runs: list,
    said: str,
) -> None:
    findings = [finding("tiny-layers", *runs[0]), finding("transformer", *runs[1])]
    with_base(monkeypatch, tmp_path / "base", findings)
    status = cli.main(["guard", "--base", "main"])
    assert status == (exits.VERDICT_FAILED if "FAILED" in said else exits.DONE)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == said


def test_counters_that_differ_fail_whatever_was_timed(
    fake: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    fake.write_text(fake.read_text().replace("8", "10"))
    with_base(monkeypatch, tmp_path / "base", [finding("tiny-layers", UNSURE)])
    assert cli.main(["guard", "--base", "main"]) == exits.VERDICT_FAILED
    assert capsys.readouterr().out.splitlines()[-1] == "guard: FAILED"

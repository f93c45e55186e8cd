"""What a guard run prints: one line per run of a benchmark, and in words what it amounts to."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.guard.run import Finding
from gpipe_bench.harness.guard.judge import THRESHOLD, Change, Judgement, verdict_of
from gpipe_bench.harness.report.grid import Grid, fill

HEADERS = (
    "benchmark", "verdict", "base", "head", "head against base", "base against itself", "processor time",
    "rounds", "noise floor", "detects",
)  # fmt: skip

LEGEND = f"""\
Changes of the time per step with their intervals; + is slower. A regression lies above +{THRESHOLD:.0%} with
its whole interval, and fails only if fresh processes confirm it. `base against itself` is the control: if its
interval excludes 0, the run proves nothing (contaminated). Noise floor: how far that interval reaches; what
looks like an improvement within it is none. Detects: the slow-down that a run this noisy finds four times in
five. Processor time can't see waiting and decides nothing."""


def table(findings: Sequence[Finding]) -> str:
    """All runs, in columns."""
    return f"{_grid(findings).text()}\n\n{fill(LEGEND)}"


def markdown(findings: Sequence[Finding], last: str) -> str:
    """The same as a piece of a markdown page, the last line first: a job's summary."""
    told = "".join(f"- {conclusion(finding)}\n" for finding in findings)
    return f"### {last}\n\n{told}\n{_grid(findings).markdown()}\n\n{LEGEND}\n"


def _grid(findings: Sequence[Finding]) -> Grid:
    rows = [_row(finding.benchmark, run) for finding in findings for run in finding.runs]
    return Grid(columns=HEADERS, lines=rows)


def _row(benchmark: str, run: Judgement) -> list[str]:
    return [
        benchmark,
        run.verdict + (" (out of time)" if run.out_of_time else ""),
        f"{1e3 * run.base_s:.2f} ms",
        f"{1e3 * run.head_s:.2f} ms",
        show(run.head),
        show(run.control),
        show(run.cpu),
        str(run.rounds),
        f"{run.noise_floor:.1%}",
        f"{run.smallest_detectable:.1%}",
    ]


def show(change: Change) -> str:
    """`+1.2% [-0.3, +2.9]`"""
    return f"{change.value:+.1%} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"


def conclusion(finding: Finding) -> str:
    """One benchmark's outcome in a sentence."""
    if finding.refused:
        return f"{finding.benchmark}: not timed: {finding.refused}"
    last = finding.runs[-1]
    what = f"{finding.benchmark}: "
    if finding.confirmed:
        what += f"slower by {show(last.head)}, in two runs one after the other"
    elif last.verdict == "regression":
        what += f"slower by {show(last.head)}, not confirmed"
    elif "regression" in finding.verdicts:
        what += f"a regression was not confirmed; then {last.verdict}, {show(last.head)}"
    elif last.verdict == "contaminated":
        what += f"nothing proven: the base differs from itself by {show(last.control)}"
    elif last.verdict == "inconclusive" and verdict_of(last.head) == "improved" and not last.out_of_time:
        what += f"can't tell, {show(last.head)} is within the noise floor of {last.noise_floor:.1%}"
    elif last.verdict == "inconclusive":
        what += (
            f"can't tell, {show(last.head)}; this machine now shows {last.smallest_detectable:.0%} or more"
        )
    else:
        what += f"{last.verdict}, {show(last.head)}"
    notes = list(finding.notes)
    if last.out_of_time:
        notes.append("out of time: --budget-s gives more")
    return "; ".join([what, *notes])


def ending(failed: bool, findings: Sequence[Finding]) -> str:
    """The last line. What could not be told has not passed."""
    if failed:
        return "guard: FAILED"
    names = untold(findings)
    if not names:
        return "guard: passed"
    if len(names) == len(findings):
        return "guard: inconclusive: nothing was measured well enough to tell"
    return f"guard: passed, but nothing can be told of {', '.join(names)}"


def untold(findings: Sequence[Finding]) -> list[str]:
    """The benchmarks of which this run says nothing, neither good nor bad."""
    told = ("same", "improved")
    return [each.benchmark for each in findings if each.refused or each.verdicts[-1] not in told]

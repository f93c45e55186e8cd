"""One run of the guard, which compares the speed of two revisions. It measures every benchmark, and again in
fresh processes where a result has to be confirmed: two processes of the same code may differ for as long as
they live, by their memory's layout. It prints a table with a line for each run, and a sentence per benchmark.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.rounds import (
    ARMS,
    CPU_MARGIN,
    LOOKS,
    MARGIN,
    SAMPLE_S,
    THRESHOLD,
    Change,
    Judgement,
    Verdict,
    by_processor_time,
    confirmed,
    differs_from_itself,
    needs_another_run,
    repeats_for,
    run_rounds,
    twice,
    verdict_of,
)

from .arms import Arm, Built, Command, CommandArm, Subject, WorkerError, arms_of, check_numbers

BUDGET_S = 150.0  # seconds for all timing, so that a run takes at most three minutes
FIRST_SHARE = 0.6  # of the budget, for first runs; the rest is for confirming runs
AGAIN_S = 20.0  # seconds that a further run needs; half of them start processes
CALIBRATION_SAMPLES = 4

HEADERS = (
    "benchmark", "verdict", "base", "head", "head against base", "base against itself", "processor time",
    "rounds", "noise floor", "detects",
)  # fmt: skip

LEGEND = f"""\
Changes of the time per step, or of a command's number, with their intervals; + is worse. A regression lies
above +{THRESHOLD:.0%} with its whole interval, and fails only if fresh processes confirm it and it exceeds
{MARGIN:g} times the base's largest difference from itself. `base against itself` is the control: if
its interval excludes 0, the run proves nothing (contaminated). Noise floor: how far that interval reaches;
what looks like an improvement within it is none. Detects: the slow-down that a run this noisy finds four
times in five. Processor time can't see waiting; it decides only where wall time is contaminated and two runs
agree: that the head is slower, by {CPU_MARGIN:g} times what the base differs from itself, or, where exact
counters are equal, the same."""


@dataclass
class Finding:
    """Results of all runs of one benchmark, in order."""

    benchmark: str
    runs: list[Judgement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    command: Command | None = None  # the command whose number is measured; None: steps are timed
    is_counted: bool = False  # exact counters are equal for both revisions
    lacking: str = ""  # what the base lacks: the benchmark is new and not timed
    failed: str = ""  # why a revision could not run it

    @property
    def verdicts(self) -> list[Verdict]:
        return [run.verdict for run in self.runs]

    @property
    def confirmed(self) -> bool:
        """A regression in two consecutive runs and beyond the noise, which fails the guard."""
        return confirmed(self.runs) or self.by_processor_time == "regression"

    @property
    def by_processor_time(self) -> str:
        """The verdict by CPU time, if wall time is inconclusive."""
        return by_processor_time(self.runs, is_counted=self.is_counted)

    @property
    def is_told(self) -> bool:
        """Whether it passes: it is new, or the last run, or processor time, says that it is not slower."""
        if self.lacking or self.by_processor_time == "same":
            return not self.failed
        return bool(self.runs) and not self.failed and self.verdicts[-1] in ("same", "improved")

    def level(self, value: float) -> str:
        """A run's `base_s` or `head_s` as text: in ms, or the command's number, which is kept there too."""
        if self.command is None:
            return f"{1e3 * value:.2f} ms"
        return f"{1 / value if self.command.higher_is_better else value:.6g}"

    def conclusion(self) -> str:
        """The result in a sentence."""
        if self.failed:
            return f"{self.benchmark}: failed: {self.failed}"
        if self.lacking:
            return f"{self.benchmark}: new, not timed: {self.lacking}"
        last = self.runs[-1]
        head, slower = show(last.head), "worse" if self.command else "slower"
        if self.by_processor_time == "regression":
            what = f"slower by {show(last.cpu)} in processor time, in two runs whose wall time tells nothing"
        elif self.by_processor_time:
            what = f"same, {show(last.cpu)} in processor time in two runs, and the exact counters are equal"
        elif self.confirmed:
            what = f"{slower} by {head}, in two runs one after the other"
        elif twice(self.verdicts):
            itself = differs_from_itself(self.runs)
            what = f"can't tell, {slower} by {head}: the base differs from itself by {itself:.1%}"
        elif last.verdict == "regression":
            what = f"{slower} by {head}, not confirmed"
        elif "regression" in self.verdicts:
            what = f"a regression was not confirmed; then {last.verdict}, {head}"
        elif last.verdict == "contaminated":
            what = f"nothing proven: the base differs from itself by {show(last.control)}"
        elif last.verdict == "inconclusive" and verdict_of(last.head) == "improved" and not last.out_of_time:
            what = f"can't tell, {head} is within the noise floor of {last.noise_floor:.1%}"
        elif last.rounds < LOOKS[0]:
            what = f"{head} after {last.rounds} rounds; no verdict before {LOOKS[0]} rounds"
        elif last.verdict == "inconclusive":
            what = f"can't tell, {head}; only changes of {last.smallest_detectable:.0%} or more would show"
        else:
            what = f"{last.verdict}, {head}"
        late = ["out of time: --budget-s gives more"] if last.out_of_time else []
        return "; ".join([f"{self.benchmark}: {what}", *self.notes, *late])

    def as_data(self) -> dict[str, Any]:
        """The result as plain data."""
        runs = [
            {**asdict(run), "noise_floor": run.noise_floor, "smallest_detectable": run.smallest_detectable}
            for run in self.runs
        ]
        for run in runs if self.command else ():
            run |= {f"{arm}_number": float(self.level(run.pop(f"{arm}_s"))) for arm in ("base", "head")}
        return {
            "benchmark": self.benchmark, "confirmed": self.confirmed, "new": bool(self.lacking),
            "failed": self.failed, "notes": self.notes, "runs": runs,
        }  # fmt: skip


def guard(
    subject: Subject,
    base: Path,
    seed: int,
    *,
    control: Path | None = None,
    is_counted: bool = False,
    budget_s: float = BUDGET_S,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Finding]:
    """Compares the work tree in `subject` with the checkout `base`; a command needs a second one, `control`.
    `is_counted` says that exact counters are equal. A benchmark that can't run has failed, or is new if only
    the base lacks it.
    """
    begun_s = time.monotonic()
    deadline_s, first_deadline_s = begun_s + budget_s, begun_s + FIRST_SHARE * budget_s
    findings = [Finding(name, command=subject.command, is_counted=is_counted) for name in subject.benchmarks]
    while pending := [
        each for each in findings if not (each.lacking or each.failed) and needs_another_run(each.verdicts)
    ]:
        if pending[0].runs and time.monotonic() + AGAIN_S > deadline_s:
            for finding in pending:
                finding.notes.append("no time left to measure again")
            break
        with arms_of(subject, base, control) as arms:  # head, base and control
            for index, finding in enumerate(pending):
                # Benchmarks share the remaining time evenly, so that all get some on a busy machine.
                now_s, until_s = time.monotonic(), deadline_s if finding.runs else first_deadline_s
                end_s = now_s + (until_s - now_s) / (len(pending) - index)
                run_seed = f"{seed} {finding.benchmark} {len(finding.runs)}"
                try:
                    if subject.command:
                        judgement = measure_command(arms, finding, run_seed, deadline_s=end_s)
                    else:
                        judgement = measure(arms, finding, run_seed, subject, deadline_s=end_s)
                except WorkerError as error:
                    finding.lacking = str(error).splitlines()[0] if error.lacks else ""
                    finding.failed = "" if error.lacks else str(error)
                    tell(finding.conclusion())
                    break  # its processes may have ended: new ones run the others
                finding.runs.append(judgement)
                tell(f"{finding.benchmark}, run {len(finding.runs)}: {judgement.verdict}")
    return findings


def measure(
    arms: Mapping[str, Arm],
    finding: Finding,
    seed: str,
    subject: Subject,
    *,
    looks: Sequence[int] = LOOKS,
    sample_s: float = SAMPLE_S,
    deadline_s: float = math.inf,
) -> Judgement:
    """Measures a benchmark once. A sample has as many steps as the base runs in `sample_s`.

    Raises WorkerError if a revision can't run the benchmark (`lacks`: the base does not have it), and
    ValueError if a compiled module that `--build` has not built would be timed.
    """
    name = finding.benchmark
    built: dict[str, Built] = {}
    for arm in ("head", "base", "control"):
        try:
            built[arm] = arms[arm].build(name)
        except WorkerError as error:
            error.lacks = error.lacks and arm != "head"
            raise
        if built[arm].compiled and not subject.build:
            raise ValueError(
                f"{name} runs {built[arm].compiled[0]}, which is compiled; --build COMMAND builds it in the "
                "base's checkout and in the working tree, or a stale one would be timed"
            )
    before, now = built["base"].result, built["head"].result
    differ = before is not None and now is not None and not math.isclose(before, now, rel_tol=1e-4)
    if differ and not finding.notes:
        finding.notes.append(f"computes something else: what it returns was {before:.6g} and is {now:.6g}")
    steps_s = [arms["base"].sample(name, 1).wall_s for _ in range(CALIBRATION_SAMPLES)]
    repeats = repeats_for(steps_s, sample_s)
    sample = lambda arm: arms[arm].sample(name, repeats)  # noqa: E731
    return run_rounds(sample, seed, looks=looks, deadline_s=deadline_s)[0]


def measure_command(
    arms: Mapping[str, CommandArm], finding: Finding, seed: str, *, deadline_s: float = math.inf
) -> Judgement:
    """Measures a command once. A sample is one run of the command. Raises ValueError if its number can't be
    used.
    """
    first = {name: [arm.sample().wall_s] for name, arm in arms.items()}  # fills caches, is not counted
    check_numbers(first, arms["base"].command)
    judgement, rounds = run_rounds(lambda arm: arms[arm].sample(), seed, deadline_s=deadline_s)
    numbers = {arm: [sample.wall_s for taken in rounds for sample in taken[arm]] for arm in ARMS}
    check_numbers(numbers, arms["base"].command)
    return judgement


def table(findings: Sequence[Finding]) -> Grid:
    """A line for each run."""
    lines = [
        [
            finding.benchmark, run.verdict + (" (out of time)" if run.out_of_time else ""),
            finding.level(run.base_s), finding.level(run.head_s),
            *map(show, (run.head, run.control, run.cpu)), str(run.rounds), f"{run.noise_floor:.1%}",
            f"{run.smallest_detectable:.1%}",
        ]
        for finding in findings
        for run in finding.runs
    ]  # fmt: skip
    return Grid(columns=HEADERS, lines=lines)


def show(change: Change) -> str:
    """The change in percent with its interval: `+1.2% [-0.3, +2.9]`"""
    return f"{change.value:+.1%} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"


def ending(failed: bool, findings: Sequence[Finding]) -> str:
    """The last line: failed, passed, or which benchmarks could not be measured well enough to tell."""
    if failed:
        return "guard: FAILED"
    names = [finding.benchmark for finding in findings if not finding.is_told]
    if not names:
        return "guard: passed"
    if len(names) == len(findings):
        return "guard: inconclusive: nothing was measured well enough to tell"
    return f"guard: passed, but inconclusive for {', '.join(names)}"

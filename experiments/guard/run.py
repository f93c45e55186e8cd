"""One guard run: every benchmark is measured, and once more in fresh processes where its result asks for it.

Fresh, because two processes of the same code may differ for as long as they live, by where their memory
happened to lie; a regression that is one finds itself confirmed by other processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpipe_bench.experiments.guard.arms import Arm, Built, Program, Timed, arms_of, calibrate
from gpipe_bench.experiments.guard.benchmarks import BENCHMARKS
from gpipe_bench.harness.guard.judge import LOOKS, Judgement, Look, confirmed, needs_another_run
from gpipe_bench.harness.guard.process import WorkerError
from gpipe_bench.harness.guard.rounds import run_rounds
from gpipe_bench.harness.rounds import SAMPLE_S

BUDGET_S = 150.0
"""Seconds for all that is timed, so that a whole run stays within three minutes on a busy machine too."""

FIRST_SHARE = 0.6
"""Of the time, for the first runs of all benchmarks: what nobody has time to confirm fails nothing."""

AGAIN_S = 20.0  # a second run is not begun with less than this, which starting processes takes half of


@dataclass
class Finding:
    """What the runs of one benchmark have shown, in order."""

    benchmark: str
    runs: list[Judgement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples_s: list[float] = field(default_factory=list)  # the head's, in the last run
    refused: str = ""  # why there is nothing to time: neither revision can run it, or only the head can

    @property
    def verdicts(self) -> list[str]:
        return [run.verdict for run in self.runs]

    @property
    def confirmed(self) -> bool:
        """A regression, twice in a row: what fails a run of the guard."""
        return confirmed([run.verdict for run in self.runs])

    @property
    def needs_another_run(self) -> bool:
        return not self.refused and needs_another_run([run.verdict for run in self.runs])


def guard(
    base: Path,
    head: Path,
    names: Sequence[str],
    seed: int,
    *,
    budget_s: float = BUDGET_S,
    sample_s: float = SAMPLE_S,
    looks: Sequence[Look] = LOOKS,
    slow_down: float = 0.0,
    benchmarks: Mapping[str, Timed] = BENCHMARKS,
    program: Program | None = None,
    tell: Callable[[str], None] = lambda line: None,
    clock_s: Callable[[], float] = time.monotonic,
) -> list[Finding]:
    """Compares the trees `base` and `head` by `benchmarks`, in processes of `program` (the default is the one
    for this project). Raises WorkerError where a benchmark can't be run.
    """
    begun_s = clock_s()
    deadline_s, first_deadline_s = begun_s + budget_s, begun_s + FIRST_SHARE * budget_s
    chosen = {name: benchmarks[name] for name in names}
    findings = [Finding(name) for name in chosen]
    while pending := [finding for finding in findings if finding.needs_another_run]:
        if pending[0].runs and clock_s() + AGAIN_S > deadline_s:
            for finding in pending:
                finding.notes.append("no time left to measure again")
            break
        needed = {finding.benchmark: chosen[finding.benchmark] for finding in pending}
        with arms_of(base, head, needed, slow_down=slow_down, program=program) as arms:
            for index, finding in enumerate(pending):
                now_s = clock_s()  # of what is left each gets its share, so that a busy machine starves none
                until_s = deadline_s if finding.runs else first_deadline_s
                share_s = (until_s - now_s) / (len(pending) - index)
                run_seed = f"{seed} {finding.benchmark} {len(finding.runs)}"
                judgement = measure(
                    arms, finding, run_seed, looks=looks, sample_s=sample_s, deadline_s=now_s + share_s
                )
                if judgement is None:
                    tell(f"{finding.benchmark}: not timed: {finding.refused}")
                    continue
                finding.runs.append(judgement)
                tell(f"{finding.benchmark}, run {len(finding.runs)}: {judgement.verdict}")
    return findings


def measure(
    arms: Mapping[str, Arm],
    finding: Finding,
    seed: str,
    *,
    looks: Sequence[Look] = LOOKS,
    sample_s: float = SAMPLE_S,
    deadline_s: float = math.inf,
) -> Judgement | None:
    """One run of one benchmark; None where it is refused, which the finding then says."""
    name = finding.benchmark
    built = {arm: each.build(name) for arm, each in arms.items()}
    finding.refused = _refused(name, built["base"], built["head"])
    if finding.refused:
        return None
    before, now = built["base"].loss, built["head"].loss
    if before is not None and now is not None and _differ(before, now) and not finding.notes:
        finding.notes.append(f"computes something else: the first loss was {before:.6g} and is {now:.6g}")
    repeats = calibrate(arms["base"], name, sample_s)
    judgement, rounds = run_rounds(
        lambda arm: arms[arm].sample(name, repeats), seed, looks=looks, deadline_s=deadline_s
    )
    finding.samples_s = [sample.wall_s for each in rounds for sample in each.head]
    return judgement


def _differ(before: float, now: float) -> bool:
    """By more than rounding."""
    return not math.isclose(before, now, rel_tol=1e-4)


def _refused(name: str, base: Built, head: Built) -> str:
    """Why there is nothing to compare. Raises WorkerError where the head has unlearnt it."""
    if head.refused and not base.refused:
        raise WorkerError(f"{name}: the base runs it, the head refuses: {head.refused}")
    if base.refused and not head.refused:
        return f"the base refuses, the head runs it: {base.refused}"
    return head.refused

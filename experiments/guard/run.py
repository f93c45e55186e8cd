"""One run of the guard, which compares the speed of two revisions. Every trial starts fresh processes in
another order: two processes of the same code differ for as long as they live, by their memory's layout, and
also by which started first. A run prints a table with a line, and a sentence, for each benchmark.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.rounds import (
    ARMS,
    LOOKS,
    SAMPLE_S,
    THRESHOLD,
    UNTOLD,
    Change,
    Judgement,
    Round,
    Sample,
    Trial,
    Verdict,
    judge,
    repeats_for,
)

from .arms import Arm, Built, Command, CommandArm, Subject, WorkerError, arms_of, check_numbers

BUDGET_S = 300.0  # seconds for all timing; what is decided before ends before
ROUNDS = 4  # of a trial, whose processes differ by more than its rounds
LONG_S = 0.2  # seconds of a step so long that one round is enough
CALIBRATION_SAMPLES = 4

HEADERS = (
    "benchmark", "verdict", "base", "head", "head against base", "base against itself", "processor time",
    "trials", "detects",
)  # fmt: skip

LEGEND = f"""\
Changes of the time per step, or of a command's number (of a rate: of its inverse), with their intervals over
trials; + is worse. Every trial has fresh processes. A regression lies above +{THRESHOLD:.0%} with its whole
interval. `base against itself` is the control: if its interval excludes 0, the trials prove nothing
(contaminated). Detects: the slow-down that trials this noisy find four times in five. Processor time can't
see waiting; it decides only where wall time tells nothing: that the head is slower, or, where exact counters
are equal, the same."""


@dataclass
class Finding:
    """Results of all trials of one benchmark, in order."""

    benchmark: str
    trials: list[Trial] = field(default_factory=list)
    judgement: Judgement | None = None
    notes: list[str] = field(default_factory=list)
    command: Command | None = None  # the command whose number is measured; None: steps are timed
    is_counted: bool = False  # exact counters are equal for both revisions
    lacking: str = ""  # what the base lacks: the benchmark is new and not timed
    failed: str = ""  # why a revision could not run it
    repeats: int = 0  # steps of a sample
    num_rounds: int = ROUNDS
    last_s: float = 0.0  # seconds of the last trial
    used_s: float = 0.0  # and of all

    @property
    def is_open(self) -> bool:
        """Whether more trials can tell more."""
        if self.lacking or self.failed:
            return False
        return self.judgement is None or not (self.is_told or self.is_slower or self.at_last_look)

    @property
    def at_last_look(self) -> bool:
        return len(self.trials) >= LOOKS[-1]

    @property
    def verdict(self) -> Verdict | None:
        return self.judgement.verdict if self.judgement else None

    @property
    def is_slower(self) -> bool:
        """A regression, which fails the guard."""
        return self.verdict == "regression"

    @property
    def is_told(self) -> bool:
        """Whether it passes: it is new, or not slower."""
        return not self.failed and (bool(self.lacking) or self.verdict in ("same", "improved"))

    def judge(self, *, out_of_time: bool = False) -> None:
        """Looks at the trials so far. Raises ValueError if a command's numbers can't be used."""
        if self.command:
            taken = {arm: [each.wall_s for (pair,) in self.trials for each in pair[arm]] for arm in ARMS}
            check_numbers(taken, self.command)
        is_last = out_of_time or self.at_last_look
        found = judge(self.trials, is_last=is_last, is_counted=self.is_counted)
        self.judgement = replace(found, out_of_time=out_of_time and found.verdict in UNTOLD)

    def level(self, value: float) -> str:
        """`base_s` or `head_s` as text: in ms, or the command's number, which is kept there too."""
        if self.command is None:
            return f"{1e3 * value:.2f} ms"
        return f"{1 / value if self.command.higher_is_better else value:.6g}"

    def conclusion(self) -> str:
        """The result in a sentence."""
        if self.failed:
            return f"{self.benchmark}: failed: {self.failed}"
        if self.lacking:
            return f"{self.benchmark}: new, not timed: {self.lacking}"
        if self.judgement is None:
            return f"{self.benchmark}: not timed"
        found, slower = self.judgement, "worse" if self.command else "slower"
        head, over = show(found.head), f"over {found.trials} trial{'s'[: found.trials > 1]}"
        if found.by_cpu and found.cpu:
            what = f"{slower} by" if self.is_slower else "same, as exact counters are,"
            what += f" {show(found.cpu)} by processor time {over}"
        elif found.verdict == "regression":
            what = f"{slower} by {head} {over}"
        elif (least := found.smallest_detectable) is None:
            what = f"{head} {over}; no verdict before {LOOKS[0]} trials"
        elif found.verdict == "contaminated":
            what = f"nothing proven {over}: the base differs from itself by {show(found.control)}"
        elif found.verdict == "inconclusive":
            what = f"can't tell, {head} {over}; only changes of {least:.0%} or more would show"
        else:
            what = f"{found.verdict}, {head} {over}"
        late = ["out of time: --budget-s gives more"] if found.out_of_time else []
        return "; ".join([f"{self.benchmark}: {what}", *self.notes, *late])

    def as_data(self) -> dict[str, Any]:
        """The result as plain data."""
        found: dict[str, Any] = {}
        if self.judgement is not None:
            found = {**asdict(self.judgement), "smallest_detectable": self.judgement.smallest_detectable}
            for arm in ("base", "head") if self.command else ():
                found[f"{arm}_number"] = float(self.level(found.pop(f"{arm}_s")))
        return {
            "benchmark": self.benchmark, "new": bool(self.lacking), "failed": self.failed,
            "notes": self.notes, **found,
        }  # fmt: skip


def guard(
    subject: Subject,
    base: Path,
    *,
    control: Path | None = None,
    is_counted: bool = False,
    budget_s: float = BUDGET_S,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Finding]:
    """Compares the work tree in `subject` with the checkout `base`; a command needs a second one, `control`.
    `is_counted` says that exact counters are equal. A benchmark that can't run has failed, or is new if only
    the base lacks it.

    A trial begins if it seems to end within `budget_s`; the first of each benchmark always does. Raises
    ValueError if the first trial can't be measured, or a command's numbers can't be used.
    """
    begun_s, starting_s = time.monotonic(), 0.0
    findings = [Finding(name, command=subject.command, is_counted=is_counted) for name in subject.benchmarks]
    for index in itertools.count():
        now_s = time.monotonic()
        left_s = begun_s + budget_s - now_s - starting_s
        pending = [finding for finding in findings if finding.is_open]
        fitting = [each for each in pending if not each.trials or each.last_s <= left_s]
        # By the time that they have used, so that a slow benchmark leaves the others theirs.
        chosen = [each for each in fitting if each.used_s * len(pending) <= now_s - begun_s] or fitting
        while len(chosen) > 1 and sum(each.last_s for each in chosen) > left_s:
            chosen.remove(max(chosen, key=lambda each: each.last_s))
        if not chosen:
            break
        begun = chosen
        try:
            with arms_of(subject, base, control, order_of("start", index)) as arms:  # head, base and control
                starting_s = time.monotonic() - now_s
                for finding in chosen:
                    begun = [finding]
                    add_trial(finding, arms, subject)
        except (WorkerError, ValueError) as error:  # its processes may have ended: new ones run the others
            if isinstance(error, ValueError) and not begun[0].trials:
                raise
            for finding in begun:
                is_new = isinstance(error, WorkerError) and error.lacks and not finding.trials
                finding.lacking = str(error).splitlines()[0] if is_new else ""
                finding.failed = "" if is_new else str(error)
                tell(finding.conclusion())
        for finding in chosen:
            if len(finding.trials) in LOOKS and not finding.failed:
                finding.judge()
                tell(f"{finding.benchmark}, {len(finding.trials)} trials: {finding.verdict}")
    for finding in pending:
        if finding.trials:
            finding.judge(out_of_time=True)
    return findings


def order_of(what: str, count: int) -> tuple[str, ...]:
    """A random order of the arms; each six have all orders, so that none comes first much more often."""
    every = list(itertools.permutations(ARMS))
    return random.Random(f"{what} {count // len(every)}").sample(every, len(every))[count % len(every)]


def add_trial(finding: Finding, arms: Mapping[str, Any], subject: Subject) -> None:
    """Measures one trial. Raises as `measure` and `measure_command`."""
    begun_s = time.monotonic()
    if subject.command:
        measure_command(arms, finding)
    else:
        measure(arms, finding, subject)
    finding.last_s = time.monotonic() - begun_s
    finding.used_s += finding.last_s


def measure(
    arms: Mapping[str, Arm], finding: Finding, subject: Subject, *, sample_s: float = SAMPLE_S
) -> None:
    """Measures a trial of a benchmark. A sample has as many steps as the base runs in `sample_s`.

    Raises WorkerError if a revision can't run the benchmark (`lacks`: the base does not have it), and
    ValueError if a compiled module that `--build` has not built would be timed.
    """
    name, trial = finding.benchmark, len(finding.trials)
    built, lacking = dict[str, Built](), None
    for arm in order_of(f"build {name}", trial):
        try:
            built[arm] = arms[arm].build(name)
        except WorkerError as error:
            error.lacks = error.lacks and arm != "head"
            if not error.lacks:
                raise
            lacking = error  # but is new only if the head can run it
            continue
        if built[arm].compiled and not subject.build:
            raise ValueError(
                f"{name} runs {built[arm].compiled[0]}, which is compiled; --build COMMAND builds it in the "
                "base's checkout and in the working tree, or a stale one would be timed"
            )
    if lacking:
        raise lacking
    before, now = built["base"].result, built["head"].result
    differ = before is not None and now is not None and not math.isclose(before, now, rel_tol=1e-4)
    if differ and not finding.notes:
        finding.notes.append(f"computes something else: what it returns was {before:.6g} and is {now:.6g}")
    if not finding.repeats:
        steps_s = [arms["base"].sample(name, 1).wall_s for _ in range(CALIBRATION_SAMPLES)]
        finding.repeats = repeats_for(steps_s, sample_s)
        finding.num_rounds = ROUNDS if min(steps_s) < LONG_S else 1
    sample = lambda arm: arms[arm].sample(name, finding.repeats)  # noqa: E731
    counts = range(trial * finding.num_rounds, (trial + 1) * finding.num_rounds)
    finding.trials.append([taken(sample, order_of(name, count)) for count in counts])


def measure_command(arms: Mapping[str, CommandArm], finding: Finding) -> None:
    """Measures a trial of a command: a round, in which every sample is a run of it. Raises ValueError if it
    fails, or its number can't be used.
    """
    if not finding.trials:  # fills caches, is not counted
        check_numbers({arm: [arms[arm].sample().wall_s] for arm in ARMS}, arms["base"].command)
    order = order_of(finding.benchmark, len(finding.trials))
    finding.trials.append([taken(lambda arm: arms[arm].sample(), order)])


def taken(sample: Callable[[str], Sample], order: Sequence[str]) -> Round:
    """A round in this order, there and back."""
    found: dict[str, list[Sample]] = {arm: [] for arm in ARMS}
    for arm in (*order, *reversed(order)):
        found[arm].append(sample(arm))
    return found


def table(findings: Sequence[Finding]) -> Grid:
    """A line for each benchmark that was timed."""
    lines = [
        [
            finding.benchmark, found.verdict + (" (out of time)" if found.out_of_time else ""),
            finding.level(found.base_s), finding.level(found.head_s), show(found.head), show(found.control),
            show(found.cpu) if found.cpu else "", str(found.trials),
            f"{found.smallest_detectable:.1%}" if found.smallest_detectable else "",
        ]
        for finding in findings
        if (found := finding.judgement) is not None
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

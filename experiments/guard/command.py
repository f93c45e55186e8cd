"""A benchmark that is any shell command printing a number: in any language, in any repository.

A sample is one run of the command in the folder of its revision, and its value what the command says of
itself: seconds, instructions, or a rate (`higher_is_better`). So start-up counts only where the command
counts it. Ratios are compared, so a number must be above 0.

Other than the processes of `worker.py`, a command has the threads and devices that it takes, as its user
would run it. Only PYTHONPATH is set, so that a Python program finds the modules of its own revision before
those that are installed.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpipe_bench.harness.guard import ARMS, LOOKS, Sample
from gpipe_bench.harness.processes import run

TIMEOUT_S = 60.0
NEEDED_RUNS = 2 * len(ARMS) * LOOKS[0]
"""Runs of the command before the guard first looks at the result."""
TAIL = 5  # lines of what a command said, in the message about its failure
UNIT_DIGITS = 0.5  # a factor of 3 to either side of a power of 1000
SHOWN = 40  # characters of a command in a table

_NUMBER = re.compile(r"(?<![\w.,])[-+]?(?:\d[\d.,]*|\.\d+)(?:[eE][-+]?\d+)?")
"""`12`, `1,234.5`, `15,16` and `3e-4`, also before a unit as in `12ms`; not the digits of `cpu0`."""
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""Colours and the like, whose digits are no numbers."""


@dataclass(frozen=True)
class Command:
    """A command line, and which part of its standard output is the number.

    Args:
        line: for the shell.
        pattern: a regular expression whose group, or whole match, is the number; any number if "". The
            last match counts.
        higher_is_better: whether the number is a rate.
        timeout_s: a run that takes longer counts as hung.

    Raises:
        ValueError: nothing to run, an expression that is none or has several groups, no time.
    """

    line: str
    pattern: str = ""
    higher_is_better: bool = False
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if not self.line.strip():
            raise ValueError('--command is empty; give what prints a number, such as "python bench.py"')
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"--timeout-s is {self.timeout_s:g}; give the seconds that one run may take")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"--number {self.pattern!r} is no regular expression: {error}") from error
        if groups > 1:
            raise ValueError(
                f"--number {self.pattern!r} has {groups} groups; put one around the number, and (?:...) "
                "elsewhere"
            )

    @property
    def name(self) -> str:
        """Name of the benchmark: the command line, shortened if it is long."""
        return self.line if len(self.line) <= SHOWN else f"{self.line[: SHOWN - 3]}..."

    def number(self, said: str) -> float:
        """The number of an output that counts. Raises ValueError where there is none, or none above 0."""
        said = _ESCAPES.sub("", said)
        found = re.findall(self.pattern, said, re.MULTILINE) if self.pattern else _NUMBER.findall(said)
        if not found:
            what = f"nothing that --number {self.pattern!r} matches" if self.pattern else "no number"
            raise ValueError(f"printed {what} on standard output, but {_tail(said) or 'nothing at all'}")
        try:
            number = _value(found[-1])
        except ValueError as error:
            raise ValueError(f"printed {found[-1]!r}, which is no number; --number REGEX names it") from error
        if not 0 < number < math.inf:
            raise ValueError(f"printed {number:g}; ratios are compared, so print numbers above 0")
        return number


class CommandArm:
    """One revision, measured by a command that is run in its folder."""

    def __init__(self, name: str, tree: Path, command: Command, modules: str) -> None:
        self._where, self._tree, self.command = f"{name} ({tree})", tree, command
        self._environment = {**os.environ, "PYTHONPATH": modules}
        self.taken_s = 0.0
        """Seconds that the latest run took."""

    def sample(self) -> Sample:
        """Sample of one run; its `wall_s` is the number that is compared, larger if worse.

        Raises ValueError, with the revision, for a run that fails, hangs, or prints no number.
        """
        command, begin_s, before_s = self.command, time.monotonic(), _children_s()
        what = f"--command {command.line!r} of {self._where}"
        try:
            done = run(command.line, command.timeout_s, cwd=self._tree, env=self._environment)
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"{what} has not ended for {command.timeout_s:g} s; --timeout-s gives it more"
            ) from None
        self.taken_s = time.monotonic() - begin_s
        if done.returncode:
            raise ValueError(
                f"{what} failed with status {done.returncode}: {_tail(done.stderr or done.stdout)}; what the "
                "base has not yet can lie outside of the repository, and --build builds what must be built"
            )
        try:
            number = command.number(done.stdout)
        except ValueError as error:
            raise ValueError(f"{what} {error}") from error
        cpu_s = max(_children_s() - before_s, 1e-6)
        return Sample(1 / number if command.higher_is_better else number, cpu_s)


def check_time(arms: Mapping[str, CommandArm], left_s: float) -> None:
    """Raises ValueError where the time that is left is not enough for a first look at arms that ran once."""
    run_s = min(arm.taken_s for arm in arms.values())
    if run_s * NEEDED_RUNS > left_s:
        raise ValueError(
            f"a run of the command takes {run_s:.2g} s, and the first look needs {NEEDED_RUNS} of them in "
            f"{left_s:.0f} s; give --budget-s {math.ceil(4 * run_s * NEEDED_RUNS)}, or a shorter command"
        )


def check_numbers(numbers: Mapping[str, Sequence[float]], command: Command) -> None:
    """Raises ValueError where no arm's number, larger if worse, ever changes and nobody has named it, and
    where one is about a power of 1000 times the base's: its unit has changed, as timeit's does.
    """
    base = statistics.median(numbers["base"])
    if not command.pattern and all(len(numbers[arm]) > 1 and len({*numbers[arm]}) == 1 for arm in numbers):
        told = 1 / base if command.higher_is_better else base
        raise ValueError(
            f"--command {command.line!r} printed {told:g} last in every run of the base, and no revision's "
            "number ever changed, as no time does; --number REGEX names the number, also an exact one"
        )
    for arm, levels in numbers.items():
        for level in levels:
            digits = math.log10(level / base)
            power = round(digits / 3)
            if power and abs(digits - 3 * power) < UNIT_DIGITS:
                raise ValueError(
                    f"the command's number is {level:g} of the {arm} and {base:g} of the base, about a power "
                    "of 1000 apart: its unit changes; print one unit, as `python -m timeit -u msec` does"
                )


def _value(text: str) -> float:
    """`1,234.5` and `15,16` as they are meant. Raises ValueError where that is unclear."""
    text = text.rstrip(".,") if not text.endswith("e") else text
    if _THOUSANDS.fullmatch(text):
        return float(text.replace(",", ""))
    return float(text.replace(",", ".") if "." not in text else text)


def _children_s() -> float:
    """Processor time of all that ran in this process's children and has ended."""
    import resource  # not on Windows

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tail(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-TAIL:])

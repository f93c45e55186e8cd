"""How far a run is and how long it still takes: a bar on a terminal, plain lines everywhere else.

Always on standard error, so that standard output holds results alone.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from gpipe_bench.harness.experiment import Case
from gpipe_bench.harness.record import Record

_BAR_COLUMNS = 70
_DOUBT = 0.1
"""Share of all estimates for which the machine is taken to be as fast as they say."""


class Remaining:
    """Time left: the estimates of what is left, scaled by how right they were so far.

    What was run counts for as much as it is of the whole: the first case is often a short one that loads what
    all need, and by itself it would say that the others take a hundred times as long as they do.

    `jobs` cases are at work at the same time.
    """

    def __init__(self, cases: list[Case], jobs: int = 1) -> None:
        self._jobs = jobs
        self._left_s = sum(case.estimate_s for case in cases)
        self._doubt_s = _DOUBT * self._left_s
        self._estimated_s = 0.0
        self._spent_s = 0.0

    def finished(self, case: Case, duration_s: float, *, reused: bool) -> None:
        """Takes one case off; a re-used one says nothing about the speed of this machine."""
        self._left_s = max(0.0, self._left_s - case.estimate_s)
        if not reused:
            self._estimated_s += case.estimate_s
            self._spent_s += duration_s

    @property
    def left_s(self) -> float:
        """Seconds left."""
        if not self._estimated_s or not self._spent_s:
            return self._left_s / self._jobs
        trust = self._estimated_s / (self._estimated_s + self._doubt_s)
        return self._left_s * math.pow(self._spent_s / self._estimated_s, trust) / self._jobs


def words(seconds: float) -> str:
    """`3 s`, `4 min 10 s`, `2 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Reporter:
    """Told by the runner what happens; writes a line per finished case, and the `title` before the first."""

    title = ""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._done = self._total = self._reused = 0
        self._remaining = Remaining([])

    @property
    def left(self) -> str:
        """Time left, in words."""
        return words(self._remaining.left_s)

    def begin(self, cases: list[Case], jobs: int) -> None:
        self._total, self._remaining = len(cases), Remaining(cases, jobs)
        if self.title:
            self.say(self.title)
        self.show_begin()

    def started(self, case: Case) -> None:
        """Says nothing: a line per case is enough for a log."""

    def finished(self, case: Case, record: Record, *, reused: bool) -> None:
        self._done += 1
        self._reused += reused
        self._remaining.finished(case, record.duration_s, reused=reused)
        self.show_finished(case, record, reused=reused)

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}")

    def end(self) -> None:
        if self._reused:
            self.say(f"{self._reused} of {self._total} cases were on record already")

    def show_begin(self) -> None:
        self.say(f"{self._total} cases, about {self.left}")

    def show_finished(self, case: Case, record: Record, *, reused: bool) -> None:
        if not reused:
            self.say(f"[{self._done}/{self._total}] {describe(case, record)}, {self.left} left")

    def say(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:  # whoever watched has left, as with `| head`
            raise
        except OSError:  # a log on a disk that is full: the results matter more than the progress
            pass


class BarReporter(Reporter):
    """A bar with the case at work and the time left; what went wrong stays above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__(stream)
        self._console = Console(file=stream, highlight=False)
        self._progress = Progress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left"),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # results in a pipe or file stay on standard output
        )
        self._task = self._progress.add_task("", total=None, left="")

    def show_begin(self) -> None:
        self._progress.update(self._task, total=self._total, left=self.left)
        self._progress.start()

    def started(self, case: Case) -> None:
        self._progress.update(self._task, description=case.label)

    def show_finished(self, case: Case, record: Record, *, reused: bool) -> None:
        self._progress.update(self._task, advance=1, left=self.left)
        if record.status != "done":
            self.say(describe(case, record))

    def end(self) -> None:
        self._progress.stop()
        super().end()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False)


def describe(case: Case, record: Record) -> str:
    """`K=2 M=4: done in 1.2 s`, or what happened instead."""
    if record.status == "done":
        return f"{case.label}: done in {record.duration_s:.1f} s"
    return f"{case.label}: {record.status.replace('_', ' ')}: {record.reason}"


def reporter(stream: TextIO | None = None, variables: Mapping[str, str] = os.environ) -> Reporter:
    """A bar where a person watches; lines for logs, CI, NO_COLOR and terminals that are dumb or narrow."""
    stream = sys.stderr if stream is None else stream
    plain = bool(variables.get("CI") or variables.get("NO_COLOR") or variables.get("TERM") == "dumb")
    if plain or not stream.isatty() or not _room_for_bar(stream):
        return Reporter(stream)
    return BarReporter(stream)


def _room_for_bar(stream: TextIO) -> bool:
    """Whether a bar with its numbers fits and can be drawn; cut off it would say nothing."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        columns = 0
    wide = columns == 0 or columns >= _BAR_COLUMNS  # 0: the terminal doesn't say
    return wide and "utf" in (stream.encoding or "").lower()

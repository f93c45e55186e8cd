"""Runs the cases of an experiment and stores each result at once.

Cases on record do not run again; a failure becomes a record and the run goes on. Of two runs of an experiment
in the same folder the second waits. Cases run in parallel only where nothing is timed:

                  thread 1 --case--> process 1
    run ---pool-<                                    each answers with the finished record
                  thread 2 --case--> process 2

A case that ends its process (a crash, a kill for lack of memory) affects no other case. Progress goes to
standard error; standard output has only results.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from .environment import environment, usable_cores
from .experiment import Case, Experiment, Outcome, RunOptions, select
from .paper import UNITS
from .processes import SETTLE_S, check, held, number_of, started, starting
from .record import FINAL, SCHEMA, Record, decode, encode, printable
from .store import Store, StoreError, latest, lines_of

if TYPE_CHECKING:
    from rich.progress import Progress

MOST_JOBS = 8  # default limit: each takes half a GiB for torch alone


def sensible_jobs() -> int:
    """The default number of parallel cases: one per core, at most `MOST_JOBS`."""
    return min(usable_cores(), MOST_JOBS)


@dataclass
class RunResult:
    """Result of a run. `records` are those of the wanted cases in order, `unsaved` those not on disk."""

    records: list[Record] = field(default_factory=list)
    ran: int = 0
    reused: int = 0
    failed: list[Record] = field(default_factory=list)
    unsaved: list[Record] = field(default_factory=list)
    signal: int | None = None
    """Number of the signal that ended the run before all cases were done."""


def run_experiment(
    experiment: Experiment,
    options: RunOptions,
    store: Store,
    *,
    reporter: Reporter,
    jobs: int = 1,
    command: str = "",
    on_record: Callable[[Record, bool], None] = lambda record, saved: None,
) -> RunResult:
    """Runs cases that are not on record, or all with `options.fresh`; each result is passed to
    `on_record(record, saved)`.

    With several `jobs` each is a process. An interrupt ends the run; finished cases are kept, the interrupted
    one has no result. Raises ValueError, before anything runs, for options that the experiment does not have.
    """
    if jobs < 1:
        raise ValueError(f"--jobs {jobs}: give the number of cases to run at the same time, 1 or more")
    if jobs > 1 and not experiment.untimed:
        raise ValueError(
            f"--jobs {jobs}: {experiment.name} times its cases, which must not disturb one another; "
            "leave the option out"
        )
    cases = select(experiment.cases(options), options.only)
    by_identity: dict[str, Case] = {}
    for case in cases:
        if by_identity.setdefault(experiment.identity(case, options), case) is not case:
            raise ValueError(f"{experiment.name} has two cases {case.label}; keys must tell cases apart")
    jobs = min(jobs, len(cases))
    processes = _Processes(experiment, options, command)
    alone = lambda case: execute(experiment, case, options, command)  # noqa: E731
    run = _Run(options, store, reporter, alone if jobs <= 1 else processes.execute, on_record, [*by_identity])
    try:
        with store.held(experiment.name, lambda: reporter.warn("another run is at work on it; waiting")):
            loaded = store.load(experiment.name)
            run.known = latest(loaded.records)
            for line in lines_of(loaded.problems):
                reporter.warn(line)
            reporter.begin(cases, jobs)
            try:
                if jobs > 1:
                    run.beside_each_other(by_identity, jobs, processes.stop)
                else:
                    run.in_turn(by_identity)
            finally:
                reporter.end()
    except KeyboardInterrupt as error:
        run.result.signal = number_of(error)
    run.result.records = [run.final[identity] for identity in by_identity if identity in run.final]
    return run.result


@dataclass
class _Run:
    options: RunOptions
    store: Store
    reporter: Reporter
    execute: Callable[[Case], Record]
    on_record: Callable[[Record, bool], None]
    untold: list[str]  # identities of cases to report, in order
    ended: dict[str, Callable[[], None]] = field(default_factory=dict)
    result: RunResult = field(default_factory=RunResult)
    final: dict[str, Record] = field(default_factory=dict)
    known: dict[str, Record] = field(default_factory=dict)
    alone: threading.Lock = field(default_factory=threading.Lock)
    """Held by everything but the cases themselves."""

    def beside_each_other(self, cases: Mapping[str, Case], jobs: int, stop: Callable[[], None]) -> None:
        """Runs groups in parallel, longest first, so that no process waits long for another; cases of a group
        run in turn.
        """
        groups: dict[str, dict[str, Case]] = {}
        for identity, case in cases.items():
            groups.setdefault(case.group or identity, {})[identity] = case
        seconds = lambda group: sum(case.estimate_s for case in group.values())  # noqa: E731
        longest_first = sorted(groups.values(), key=seconds, reverse=True)
        pool = ThreadPoolExecutor(jobs)
        try:
            for future in as_completed([pool.submit(self.in_turn, each) for each in longest_first]):
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            stop()  # ends the processes that threads wait for
            pool.shutdown()
            self.untold = [identity for identity in self.untold if identity in self.ended]
            self._tell()

    def in_turn(self, cases: Mapping[str, Case]) -> None:
        """Finds or makes the cases' records."""
        for identity, case in cases.items():
            record = None if self.options.fresh else self.known.get(identity)
            if record is None or record.status not in FINAL:
                self._execute(case, identity)
                continue
            with self.alone:
                self.final[identity] = record
                self.result.reused += 1
                self.ended[identity] = partial(self._say, case, record, reused=True)
                self._tell()

    def _execute(self, case: Case, identity: str) -> None:
        check()
        with self.alone:
            self.reporter.started(case)
        record = self.execute(case)
        if record.status == "failed":
            check(SETTLE_S)  # a case that a signal interrupted has not failed
        with self.alone, held():
            self.final[identity] = record
            self.result.ran += 1
            saved = True
            try:
                self.store.append(record)
            except StoreError as error:
                saved = False
                self.result.unsaved.append(record)
                self.reporter.warn(f"{error}; the result of {record.label} is printed on standard output")
                self.on_record(record, False)
            self.ended[identity] = partial(self._say, case, record, saved=saved)
            self._tell()

    def _tell(self) -> None:
        """Reports ended cases in order: one that has ended waits for those before it."""
        while self.untold and self.untold[0] in self.ended:
            self.ended[self.untold.pop(0)]()

    def _say(self, case: Case, record: Record, *, reused: bool = False, saved: bool = True) -> None:
        if record.status == "failed":
            self.result.failed.append(record)
        self.reporter.finished(case, record, reused=reused)
        if saved:
            self.on_record(record, True)


# A case in a process of its own


class _StoppedError(Exception):
    """The run is over; the case has no result."""


class _Processes:
    """Runs each case in the calling thread's own process, started at the first case."""

    def __init__(self, experiment: Experiment, options: RunOptions, command: str) -> None:
        self._experiment, self._options, self._command = experiment, options, command
        self._mine = threading.local()
        self._pools: list[ProcessPoolExecutor] = []
        self._others = multiprocessing.active_children()
        self._stopped = False

    def execute(self, case: Case) -> Record:
        """The record, with status "failed" if its process dies. Raises _StoppedError after `stop`."""
        if not hasattr(self._mine, "pool"):
            self._mine.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare)
            self._pools.append(self._mine.pool)
        pool: ProcessPoolExecutor = self._mine.pool
        try:
            with starting():
                line = pool.submit(_encoded, self._experiment, case, self._options, self._command)
            if self._stopped:  # before there was a process to be ended
                self.stop()
            return decode(line.result())
        except RuntimeError:  # the process has ended, or `stop` ended all
            del self._mine.pool
        if self._stopped:
            raise _StoppedError
        pool.shutdown()
        return execute(replace(self._experiment, run=_lost), case, self._options, self._command)

    def stop(self) -> None:
        """Ends all processes; threads that wait for one get a _StoppedError."""
        self._stopped = True
        for process in multiprocessing.active_children():
            if process not in self._others:
                process.kill()
        for pool in self._pools:
            pool.shutdown(wait=False)


def _lost(case: Case, options: RunOptions) -> NoReturn:
    """Takes the place of a case whose process has ended."""
    raise RuntimeError("the process that ran it was ended; if memory was short, use --jobs 1")


def _prepare() -> None:
    """Prepares a process before its first case."""
    started(signal.SIG_IGN)  # Ctrl-C goes to the run, which ends this process
    if hasattr(os, "setsid"):
        os.setsid()  # keeps Ctrl-C from a case's children, too
    os.dup2(2, 1)  # standard output has only results
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _encoded(experiment: Experiment, case: Case, options: RunOptions, command: str) -> bytes:
    record = execute(experiment, case, options, command)
    sys.stdout.flush()
    return encode(record)


def _end_with_the_run() -> None:
    """Ends this process and its children when the run is gone: a killed run can't end them itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


_NO_MEMORY = (
    "DefaultCPUAllocator", "OutOfMemoryError: ", "CUDA out of memory", "CUDA error: out of memory",
    "_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""Parts of messages of out-of-memory errors."""


def execute(experiment: Experiment, case: Case, options: RunOptions, command: str) -> Record:
    """Runs a case and returns its record as it will be read back; raises only keyboard interrupts."""
    before = environment()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    start_s = time.perf_counter()
    outcome = _outcome(experiment, case, options)
    duration_s = time.perf_counter() - start_s
    after = environment()  # after the experiment has loaded torch, if it does
    surroundings = {**after, "load": before["load"], "load_after": after["load"]}

    def record(outcome: Outcome) -> Record:
        return Record(
            schema=SCHEMA, experiment=experiment.name, profile=options.profile, case=case.key,
            status=outcome.status, reason=outcome.reason, metrics=tuple(outcome.metrics),
            details=outcome.details, environment=surroundings, command=command, started_at=started_at,
            duration_s=duration_s, revision=experiment.revision, options=experiment.relevant(options),
        )  # fmt: skip

    try:
        return decode(encode(record(outcome)))
    except ValueError as error:  # the experiment's outcome does not fit a record
        return decode(encode(record(_failed(error))))


def _outcome(experiment: Experiment, case: Case, options: RunOptions) -> Outcome:
    """Runs one case; whatever it raises becomes an outcome."""
    try:
        outcome = experiment.run(case, options)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{experiment.name} returned {type(outcome).__name__}, not an Outcome")
        for metric in outcome.metrics:
            if metric.unit not in UNITS:
                raise ValueError(
                    f"metric {metric.name!r}: unknown unit {metric.unit!r}; known are {', '.join(UNITS)}; a "
                    "new one is a line of harness/paper.py"
                )
        return outcome
    except (Exception, SystemExit) as error:
        memory = memory_error(error)
        if memory is None:
            return _failed(error)
        outcome = replace(_failed(error), status="out_of_memory", reason=_first_line(memory))
    gc.collect()  # frees memory that frames held
    torch = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(RuntimeError):  # a lost device has no memory to free
            torch.cuda.empty_cache()
    return outcome


def _failed(error: BaseException) -> Outcome:
    text = "".join(traceback.format_exception(error))
    return Outcome(status="failed", reason=_first_line(error), details={"traceback": printable(text)})


def _first_line(error: BaseException) -> str:
    lines = printable(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def memory_error(error: BaseException) -> BaseException | None:
    """The out-of-memory error, by type or text, that `error` is or was raised from; else None."""
    seen: BaseException | None = error
    while seen is not None:
        names = {each.__name__ for each in type(seen).__mro__}
        told = isinstance(seen, RuntimeError) and any(word in str(seen) for word in _NO_MEMORY)
        if names & {"MemoryError", "OutOfMemoryError"} or told:
            return seen
        seen = seen.__cause__
    return None


# Progress


def words(seconds: float) -> str:
    """`3 s`, `4 min 10 s`, `2 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Reporter:
    """Prints the `title` and a line per finished case; if it `draws`, above a progress bar."""

    title = ""

    def __init__(self, stream: TextIO, *, draws: bool = False) -> None:
        self._stream, self._bar = stream, _bar(stream) if draws else None
        self._done = self._total = self._reused = 0
        self._left_s = self._estimated_s = self._spent_s = 0.0
        self._jobs = 1

    @property
    def left(self) -> str:
        """The time left, in words: estimates of the cases left, scaled by actual durations so far."""
        scale = self._spent_s / self._estimated_s if self._spent_s and self._estimated_s else 1.0
        return words(self._left_s * scale / self._jobs)

    def begin(self, cases: list[Case], jobs: int) -> None:
        self._total, self._jobs = len(cases), jobs
        self._left_s = sum(case.estimate_s for case in cases)
        if self.title:
            self.say(self.title)
        self.say(f"{self._total} cases, about {self.left}")
        self._draw(total=self._total)
        if self._bar is not None:
            self._bar.start()

    def started(self, case: Case) -> None:
        self._draw(description=case.label)

    def finished(self, case: Case, record: Record, *, reused: bool) -> None:
        self._done += 1
        self._left_s -= case.estimate_s
        if reused:  # takes no time
            self._reused += 1
        else:
            self._estimated_s += case.estimate_s
            self._spent_s += record.duration_s
            self.say(f"[{self._done}/{self._total}] {describe(case, record)}, {self.left} left")
        self._draw(advance=1)

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._reused:
            self.say(f"{self._reused} of {self._total} cases were on record already")

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False)
            return
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:  # the reader has ended, as in `| head`
            raise
        except OSError:  # a full disk must not stop the run
            pass

    def _draw(self, **changes: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], left=self.left, **changes)


def _bar(stream: TextIO) -> Progress:
    """A progress bar: cases done, time left, current case."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[left]} left"), TextColumn("{task.description}", markup=False),
        console=Console(file=stream, highlight=False), transient=True,
        redirect_stdout=sys.stdout.isatty(),  # results in a pipe or file stay on standard output
    )  # fmt: skip
    bar.add_task("", total=None, left="")
    return bar


def describe(case: Case, record: Record) -> str:
    """`K=2 M=4: done in 1.2 s`, or its status and reason."""
    if record.status == "done":
        return f"{case.label}: done in {record.duration_s:.1f} s"
    return f"{case.label}: {record.status.replace('_', ' ')}: {record.reason}"


def reporter(stream: TextIO | None = None, variables: Mapping[str, str] = os.environ) -> Reporter:
    """A reporter with a bar on a terminal, else with lines: for logs, CI, NO_COLOR and dumb terminals."""
    stream = sys.stderr if stream is None else stream
    plain = bool(variables.get("CI") or variables.get("NO_COLOR") or variables.get("TERM") == "dumb")
    draws = stream.isatty() and not plain and "utf" in (stream.encoding or "").lower()
    return Reporter(stream, draws=draws)

"""Runs one case and makes it a record: in this process, or in others, for experiments that time nothing.

                  thread 1 --case--> process 1
    run ---pool-<                                    each answers with the finished record
                  thread 2 --case--> process 2

A thread of the run has a ProcessPoolExecutor of one process, so whatever a case does to its process (a crash,
a kill for want of memory) is that case's result and nobody else's.
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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.connection import wait
from typing import NoReturn

from gpipe_bench.harness.environment import environment, usable_cores
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.processes import started, starting
from gpipe_bench.harness.record import SCHEMA, Record, decode, encode, printable
from gpipe_bench.harness.units import UNITS

MOST_JOBS = 8  # unless asked for more: each takes half a GiB for torch alone


def sensible_jobs() -> int:
    """The default number of cases that run at once: one per core, at most `MOST_JOBS`."""
    return min(usable_cores(), MOST_JOBS)


class StoppedError(Exception):
    """The run is over; the case has no result."""


class Here:
    """Runs cases in this process."""

    def __init__(self, experiment: Experiment, options: RunOptions, command: str) -> None:
        self._experiment, self._options, self._command = experiment, options, command

    def execute(self, case: Case) -> Record:
        return execute(self._experiment, case, self._options, self._command)

    def stop(self) -> None:
        """Does nothing, since no process is left running."""


class Workers(Here):
    """Runs each case in a process of the calling thread's own, which is started when first needed."""

    def __init__(self, experiment: Experiment, options: RunOptions, command: str) -> None:
        super().__init__(experiment, options, command)
        self._mine = threading.local()
        self._pools: dict[int, ProcessPoolExecutor] = {}  # by the number of its process
        self._stopped = False

    def execute(self, case: Case) -> Record:
        """The record, failed if its process dies. Raises StoppedError after `stop`."""
        if not hasattr(self._mine, "pool"):
            self._mine.pool = self._start()
        pool: ProcessPoolExecutor = self._mine.pool
        try:
            return decode(
                pool.submit(_encoded, self._experiment, case, self._options, self._command).result()
            )
        except RuntimeError:  # the process has ended, or `stop` ended all
            del self._mine.pool
        if self._stopped:
            raise StoppedError
        pool.shutdown()
        return execute(replace(self._experiment, run=_lost), case, self._options, self._command)

    def stop(self) -> None:
        """Ends all processes; whoever waits for one gets a StoppedError."""
        self._stopped = True
        for process in multiprocessing.active_children():
            if process.pid in self._pools:
                process.kill()
        for pool in list(self._pools.values()):
            pool.shutdown()

    def _start(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare)
        with starting():
            number = pool.submit(os.getpid)
        self._pools[number.result()] = pool
        if self._stopped:
            self.stop()
            raise StoppedError
        return pool


def _lost(case: Case, options: RunOptions) -> NoReturn:
    """Raises the error of a case whose process has ended."""
    raise RuntimeError("the process that ran it was ended; if memory was short, use --jobs 1")


def _prepare() -> None:
    """Prepares a process before its first case."""
    started(signal.SIG_IGN)  # Ctrl-C is meant for the run, which ends this process
    if hasattr(os, "setsid"):
        os.setsid()  # nor does Ctrl-C reach a case's children
    os.dup2(2, 1)  # standard output is for the run's results
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _encoded(experiment: Experiment, case: Case, options: RunOptions, command: str) -> bytes:
    """The line of the case's record."""
    record = execute(experiment, case, options, command)
    sys.stdout.flush()
    return encode(record)


def _end_with_the_run() -> None:
    """A run that was killed could not end its processes; none shall train on for days."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


_NO_MEMORY = (
    "DefaultCPUAllocator", "OutOfMemoryError: ", "CUDA out of memory", "CUDA error: out of memory",
    "_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""Parts of error messages that report a lack of memory."""


def execute(experiment: Experiment, case: Case, options: RunOptions, command: str) -> Record:
    """The case's record, exactly as it will be read back; only an interrupt from the keyboard is raised."""
    before = environment()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    start_s = time.perf_counter()
    outcome = _outcome(experiment, case, options)
    duration_s = time.perf_counter() - start_s
    after = environment()  # by now the experiment has loaded torch, if it does
    surroundings = {**after, "load": before["load"], "load_after": after["load"]}

    def record(outcome: Outcome) -> Record:
        return Record(
            schema=SCHEMA,
            experiment=experiment.name,
            profile=options.profile,
            case=case.key,
            status=outcome.status,
            reason=outcome.reason,
            metrics=tuple(outcome.metrics),
            details=outcome.details,
            environment=surroundings,
            command=command,
            started_at=started_at,
            duration_s=duration_s,
            revision=experiment.revision,
            options=experiment.relevant(options),
        )

    try:
        return decode(encode(record(outcome)))
    except ValueError as error:  # an outcome that no record can hold is a fault of the experiment
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
                    "new one is a line of harness/units.py"
                )
        return outcome
    except (Exception, SystemExit) as error:
        memory = memory_error(error)
        if memory is None:
            return _failed(error)
        reason = _first_line(memory)
        details = {"traceback": printable(traceback.format_exc())}
    gc.collect()  # the frames that held memory are gone now
    torch = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(RuntimeError):  # a device that is lost has nothing to give back
            torch.cuda.empty_cache()
    return Outcome(status="out_of_memory", reason=reason, details=details)


def _failed(error: BaseException) -> Outcome:
    text = "".join(traceback.format_exception(error))
    return Outcome(status="failed", reason=_first_line(error), details={"traceback": printable(text)})


def _first_line(error: BaseException) -> str:
    lines = printable(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def memory_error(error: BaseException) -> BaseException | None:
    """The out-of-memory error that `error` is, was raised from or reports. Torch's is found by name, without
    an import. Those of other processes and of libraries are found by their text (`_NO_MEMORY`).
    """
    seen: BaseException | None = error
    while seen is not None:
        names = {each.__name__ for each in type(seen).__mro__}
        told = isinstance(seen, RuntimeError) and any(word in str(seen) for word in _NO_MEMORY)
        if names & {"MemoryError", "OutOfMemoryError"} or told:
            return seen
        seen = seen.__cause__
    return None

"""Runs one case and makes it a record: in this process, or in others, for experiments that time nothing.

                  thread 1 --case--> process 1
    run ---pool-<                                    each answers with the finished record
                  thread 2 --case--> process 2

A thread of the run owns a process and waits for it, so whatever a case does to its process (a crash, a kill
for want of memory) is that case's result and nobody else's. Where an experiment says which modules its cases
import, one more process imports them and the others are forked from it: torch alone takes a second or two.
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
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from gpipe_bench.harness.environment import environment, usable_cores
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import SCHEMA, Record, decode, encode, printable
from gpipe_bench.harness.signals import started, starting

STOP_S = 0.8  # until processes that were asked to end are killed; a run that was told to end has two seconds
MOST_JOBS = 8  # unless asked for more: each takes half a GiB for torch alone


def sensible_jobs() -> int:
    """Cases at the same time that a machine takes without being asked: one per core, not too many."""
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
        """Nothing is left running."""


class Workers(Here):
    """Runs each case in the process of the calling thread, which is started when first needed."""

    def __init__(self, experiment: Experiment, options: RunOptions, command: str) -> None:
        super().__init__(experiment, options, command)
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._all: list[BaseProcess] = []
        self._stopped = False
        self._ways = ["spawn"]
        # A process that has seen a GPU cannot be forked.
        forks = options.device != "cuda" and "forkserver" in multiprocessing.get_all_start_methods()
        if experiment.preload and forks:
            multiprocessing.set_forkserver_preload([*experiment.preload])
            self._ways.insert(0, "forkserver")

    def execute(self, case: Case) -> Record:
        """The record; a process that ends meanwhile makes it a failed one. Raises StoppedError."""
        process, connection = self._process()
        try:
            connection.send(case)
            return decode(connection.recv_bytes())
        except (EOFError, OSError):
            del self._mine.process
            process.join()
        with self._lock:
            if self._stopped:
                raise StoppedError
        return execute(_failing(self._experiment, process.exitcode), case, self._options, self._command)

    def stop(self) -> None:
        """Ends all processes; whoever waits for one gets a StoppedError."""
        with self._lock:
            self._stopped = True
        for process in self._all:
            process.terminate()
        end_s = time.monotonic() + STOP_S
        for process in self._all:
            process.join(max(0.0, end_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _process(self) -> tuple[BaseProcess, Connection]:
        found: tuple[BaseProcess, Connection] | None = getattr(self._mine, "process", None)
        if found is None:
            with self._lock:
                if self._stopped:
                    raise StoppedError
                found = self._mine.process = self._start()
                self._all.append(found[0])
        return found

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = multiprocessing.Pipe()
        # The process that others are forked from may be older than a variable.
        arguments = (theirs, self._experiment, self._options, self._command, dict(os.environ))
        for way in self._ways:
            context: Any = multiprocessing.get_context(way)
            process: BaseProcess = context.Process(target=_serve, args=arguments)
            try:
                with starting():
                    process.start()
                break
            except (EOFError, OSError):
                # A module that takes the fork server down takes a case down too, and says so.
                if way == self._ways[-1]:
                    raise
        theirs.close()
        return process, ours


def _failing(experiment: Experiment, exitcode: int | None) -> Experiment:
    """The experiment in which every case ends as that process did."""
    how = f"exit status {exitcode}"
    if exitcode is not None and exitcode < 0:
        with contextlib.suppress(ValueError):
            how = f"signal {signal.Signals(-exitcode).name}"

    def run(case: Case, options: RunOptions) -> NoReturn:
        raise RuntimeError(f"the process that ran it ended with {how}; if memory was short, use --jobs 1")

    return replace(experiment, run=run)


def _serve(
    connection: Connection,
    experiment: Experiment,
    options: RunOptions,
    command: str,
    variables: dict[str, str],
) -> None:
    """What a process does: cases in, records out, until the other end is closed."""
    started(signal.SIG_IGN)  # at the keyboard it is meant for the run, which ends us
    if hasattr(os, "setsid"):
        os.setsid()  # and so it is for whatever a case starts
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(2, 1)  # standard output is for the run's results
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    gc.freeze()  # what is imported by now is never garbage, and collections need not walk over it
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            record = execute(experiment, connection.recv(), options, command)
            sys.stdout.flush()
            connection.send_bytes(encode(record))


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
"""What errors say that tell of memory."""


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
        return outcome
    except (Exception, SystemExit) as error:
        memory = memory_error(error)
        if memory is None:
            return _failed(error)
        reason = _first_line(memory)
        details = {"traceback": printable(traceback.format_exc())}
    gc.collect()  # only here are the frames gone that held it
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
    """The out-of-memory error that this is, was raised from or tells of; torch's by name, without importing
    it.

    That of another process arrives as text, and a library that finds no room for its own workspace has words
    of its own.
    """
    seen: BaseException | None = error
    while seen is not None:
        names = {each.__name__ for each in type(seen).__mro__}
        told = isinstance(seen, RuntimeError) and any(word in str(seen) for word in _NO_MEMORY)
        if names & {"MemoryError", "OutOfMemoryError"} or told:
            return seen
        seen = seen.__cause__
    return None

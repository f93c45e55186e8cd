"""Runs one case and makes it a record: what came out, or what went wrong, and where and when it ran."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from datetime import UTC, datetime

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.records.codec import decode, encode, printable
from gpipe_bench.harness.records.environment import environment
from gpipe_bench.harness.records.record import SCHEMA, Record
from gpipe_bench.harness.running.progress import clock_s

_NO_MEMORY = (
    "DefaultCPUAllocator", "OutOfMemoryError: ", "CUDA out of memory", "CUDA error: out of memory",
    "_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""What errors say that tell of memory."""


def execute(experiment: Experiment, case: Case, options: RunOptions, command: str) -> Record:
    """The case's record, exactly as it will be read back; only an interrupt from the keyboard is raised."""
    before = environment()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    start_s = clock_s()
    outcome = _outcome(experiment, case, options)
    duration_s = clock_s() - start_s
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
            quantities=tuple(outcome.quantities),
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
    _give_memory_back()  # only here are the frames gone that held it
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


def _give_memory_back() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(RuntimeError):  # a device that is lost has nothing to give back
            torch.cuda.empty_cache()

"""Runs the cases of an experiment and keeps each result the moment it is there.

What is on record is not run again; what fails becomes a record and the run goes on; what can't be written
is handed to the caller, so it can be shown. Two runs on the same folder share the cases between them.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from harness.codec import decode, encode, printable
from harness.environment import environment
from harness.experiment import Case, Experiment, Outcome, RunOptions, select
from harness.lock import Claims
from harness.progress import Reporter, clock_s
from harness.record import FINAL, SCHEMA, Record
from harness.store import Problem, Store, StoreError, latest, lines_of


@dataclass
class RunResult:
    """What a run left. `records` are the wanted cases' in their order, `unsaved` those not on disk."""

    records: list[Record] = field(default_factory=list)
    ran: int = 0
    reused: int = 0
    failed: list[Record] = field(default_factory=list)
    unsaved: list[Record] = field(default_factory=list)
    problems: tuple[Problem, ...] = ()
    interrupted: bool = False


def run_experiment(
    experiment: Experiment,
    options: RunOptions,
    store: Store,
    *,
    reporter: Reporter,
    fresh: bool = False,
    command: str = "",
    on_record: Callable[[Record, bool], None] = lambda record, saved: None,
) -> RunResult:
    """Runs what is not on record, or all with `fresh`; `on_record(record, saved)` sees each result.

    Raises ValueError, before anything is run, where options name what the experiment doesn't have. An
    interrupt from the keyboard ends the run; what was finished is kept.
    """
    if options.profile not in experiment.profiles:
        raise ValueError(
            f"{experiment.name} has no profile {options.profile!r}; allowed: {', '.join(experiment.profiles)}"
        )
    cases = select(experiment.cases(options), options.only)
    return _Run(experiment, options, store, reporter, fresh, command, on_record).over(cases)


@dataclass
class _Run:
    experiment: Experiment
    options: RunOptions
    store: Store
    reporter: Reporter
    fresh: bool
    command: str
    on_record: Callable[[Record, bool], None]
    result: RunResult = field(default_factory=RunResult)

    def over(self, cases: list[Case]) -> RunResult:
        identities = [self.experiment.identity(case, self.options) for case in cases]
        if len(set(identities)) != len(cases):
            twice = next(
                case for case, one in zip(cases, identities, strict=True) if identities.count(one) > 1
            )
            raise ValueError(
                f"{self.experiment.name} has two cases {twice.label}; keys must tell cases apart"
            )
        self.stamp: tuple[int, int] | None = None
        self.known: dict[str, Record] = {}
        self._refresh()
        for line in lines_of(self.result.problems):
            self.reporter.warn(line)
        final: dict[str, Record] = {}
        claims = self.store.claims(self.experiment.name)
        self.reporter.begin(cases)
        try:
            waiting = list(zip(cases, identities, strict=True))
            for wait in (False, True):  # first what nobody else is running, then what others left unfinished
                taken: list[tuple[Case, str]] = []
                for case, identity in waiting:
                    record = self._one(case, identity, claims, wait)
                    if record is None:
                        taken.append((case, identity))
                    else:
                        final[identity] = record
                waiting = taken
        except KeyboardInterrupt:
            self.result.interrupted = True
        finally:
            claims.close()
            self.reporter.end()
        self.result.records = [final[identity] for identity in identities if identity in final]
        return self.result

    def _one(self, case: Case, identity: str, claims: Claims, wait: bool) -> Record | None:
        """The case's record, re-used or new; None if another process is running it."""
        if self.fresh:
            return self._execute(case)
        known = self._on_record(identity)
        if known is None:
            if wait:
                self.reporter.warn(f"another run is at work on {case.label}; waiting for it")
            with claims.claim(identity, wait=wait) as ours:
                if not ours:
                    return None
                known = self._on_record(identity)  # another process may have finished it in between
                if known is None:
                    return self._execute(case)
        self.result.reused += 1
        self.reporter.finished(case, known, reused=True)
        self.on_record(known, True)
        return known

    def _on_record(self, identity: str) -> Record | None:
        if self.store.stamp(self.experiment.name) != self.stamp:
            self._refresh()
        record = self.known.get(identity)
        return record if record is not None and record.status in FINAL else None

    def _refresh(self) -> None:
        self.stamp = self.store.stamp(self.experiment.name)
        loaded = self.store.load(self.experiment.name)
        self.known = latest(loaded.records)
        self.result.problems = loaded.problems

    def _execute(self, case: Case) -> Record:
        self.reporter.started(case)
        before = environment()
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        start_s = clock_s()
        outcome = _outcome(self.experiment, case, self.options)
        duration_s = clock_s() - start_s
        after = environment()  # by now the experiment has loaded torch, if it does
        surroundings = {**after, "load": before["load"], "load_after": after["load"]}

        def record(outcome: Outcome) -> Record:
            return Record(
                schema=SCHEMA,
                experiment=self.experiment.name,
                profile=self.options.profile,
                case=case.key,
                status=outcome.status,
                reason=outcome.reason,
                quantities=tuple(outcome.quantities),
                details=outcome.details,
                environment=surroundings,
                command=self.command,
                started_at=started_at,
                duration_s=duration_s,
                revision=self.experiment.revision,
                options=self.experiment.relevant(self.options),
            )

        try:
            made = decode(encode(record(outcome)))  # from here on exactly what will be read back
        except ValueError as error:  # an outcome that no record can hold is a fault of the experiment
            made = decode(encode(record(_failed(error))))
        self._keep(case, made)
        return made

    def _keep(self, case: Case, record: Record) -> None:
        self.result.ran += 1
        if record.status == "failed":
            self.result.failed.append(record)
        saved = True
        try:
            self.store.append(record)
        except StoreError as error:
            saved = False
            self.result.unsaved.append(record)
            self.reporter.warn(f"{error}; the result of {record.label} is printed on standard output")
        self.reporter.finished(case, record, reused=False)
        self.on_record(record, saved)


def _outcome(experiment: Experiment, case: Case, options: RunOptions) -> Outcome:
    """Runs one case; whatever it raises becomes an outcome."""
    try:
        outcome = experiment.run(case, options)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{experiment.name} returned {type(outcome).__name__}, not an Outcome")
        return outcome
    except (Exception, SystemExit) as error:
        memory = _memory_error(error)
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


def _memory_error(error: BaseException) -> BaseException | None:
    """The out-of-memory error that this is or was raised from; torch's by name, without importing it."""
    seen: BaseException | None = error
    while seen is not None:
        names = {each.__name__ for each in type(seen).__mro__}
        on_cpu = isinstance(seen, RuntimeError) and "DefaultCPUAllocator" in str(seen)
        if names & {"MemoryError", "OutOfMemoryError"} or on_cpu:
            return seen
        seen = seen.__cause__
    return None


def _give_memory_back() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(RuntimeError):  # a device that is lost has nothing to give back
            torch.cuda.empty_cache()

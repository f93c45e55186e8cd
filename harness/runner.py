"""Runs the cases of an experiment and keeps each result the moment it is there.

What is on record is not run again; what fails becomes a record and the run goes on; what can't be written
is handed to the caller, so it can be shown. Two runs on the same folder share the cases between them. One
run has several cases at work only where the experiment times nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from gpipe_bench.harness.experiment import Case, Experiment, RunOptions, select
from gpipe_bench.harness.progress import Reporter
from gpipe_bench.harness.record import FINAL, Record
from gpipe_bench.harness.signals import SETTLE_S, check, held, number_of
from gpipe_bench.harness.store import Claims, Problem, Store, StoreError, latest, lines_of
from gpipe_bench.harness.workers import Here, Workers


@dataclass
class RunResult:
    """What a run left. `records` are the wanted cases' in their order, `unsaved` those not on disk."""

    records: list[Record] = field(default_factory=list)
    ran: int = 0
    reused: int = 0
    failed: list[Record] = field(default_factory=list)
    unsaved: list[Record] = field(default_factory=list)
    problems: tuple[Problem, ...] = ()
    signal: int | None = None
    """That ended the run before all cases were done."""

    @property
    def interrupted(self) -> bool:
        return self.signal is not None


def run_experiment(
    experiment: Experiment,
    options: RunOptions,
    store: Store,
    *,
    reporter: Reporter,
    fresh: bool = False,
    jobs: int = 1,
    command: str = "",
    on_record: Callable[[Record, bool], None] = lambda record, saved: None,
) -> RunResult:
    """Runs what is not on record, or all with `fresh`; `on_record(record, saved)` sees each result.

    `jobs` cases are at work at the same time, each in a process of its own if there are several. Raises
    ValueError, before anything is run, where options name what the experiment doesn't have or `jobs` is more
    than one although the experiment times its cases. An interrupt (see `stopping`) ends the run; what was
    finished is kept, and what the signal broke off is no result.
    """
    if jobs < 1:
        raise ValueError(f"--jobs {jobs}: give the number of cases to run at the same time, 1 or more")
    if jobs > 1 and not experiment.untimed:
        raise ValueError(
            f"--jobs {jobs}: {experiment.name} times its cases, which must not disturb one another; "
            "leave the option out"
        )
    if options.profile not in experiment.profiles:
        raise ValueError(
            f"{experiment.name} has no profile {options.profile!r}; allowed: {', '.join(experiment.profiles)}"
        )
    cases = select(experiment.cases(options), options.only)
    jobs = min(jobs, len(cases))
    executor = (Here if jobs <= 1 else Workers)(experiment, options, command)
    try:
        return _Run(experiment, options, store, reporter, fresh, jobs, executor, on_record).over(cases)
    finally:
        executor.stop()


@dataclass
class _Run:
    experiment: Experiment
    options: RunOptions
    store: Store
    reporter: Reporter
    fresh: bool
    jobs: int
    executor: Here
    on_record: Callable[[Record, bool], None]
    result: RunResult = field(default_factory=RunResult)
    final: dict[str, Record] = field(default_factory=dict)
    known: dict[str, Record] = field(default_factory=dict)
    stamp: tuple[int, int] | None = None
    alone: threading.Lock = field(default_factory=threading.Lock)
    """Around everything but the cases themselves."""

    def over(self, cases: list[Case]) -> RunResult:
        waiting: dict[str, Case] = {}
        for case in cases:
            if waiting.setdefault(self.experiment.identity(case, self.options), case) is not case:
                raise ValueError(
                    f"{self.experiment.name} has two cases {case.label}; keys must tell cases apart"
                )
        self._refresh()
        for line in lines_of(self.result.problems):
            self.reporter.warn(line)
        claims = self.store.claims(self.experiment.name)
        self.reporter.begin(cases, self.jobs)
        try:
            # First what nobody else is running, then what others left unfinished.
            if self.jobs > 1:
                self._beside_each_other(waiting, claims)
            else:
                self._in_turn(waiting, claims)
            left = {identity: case for identity, case in waiting.items() if identity not in self.final}
            self._in_turn(left, claims, wait=True)
        except KeyboardInterrupt as error:
            self.result.signal = number_of(error)
        finally:
            claims.close()
            self.reporter.end()
        self.result.records = [self.final[identity] for identity in waiting if identity in self.final]
        return self.result

    def _beside_each_other(self, waiting: dict[str, Case], claims: Claims) -> None:
        """Cases of one group in turn; the longest groups first, so that the last ones to run are short and no
        process waits long for another.
        """
        groups: dict[str, dict[str, Case]] = {}
        for identity, case in waiting.items():
            groups.setdefault(case.group or identity, {})[identity] = case
        longest_first = sorted(
            groups.values(), key=lambda group: -sum(case.estimate_s for case in group.values())
        )
        pool = ThreadPoolExecutor(self.jobs)
        try:
            for future in as_completed([pool.submit(self._in_turn, each, claims) for each in longest_first]):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            self.executor.stop()  # or the threads would wait for their processes
            raise
        finally:
            pool.shutdown()

    def _in_turn(self, waiting: dict[str, Case], claims: Claims, *, wait: bool = False) -> None:
        """Finds or makes the cases' records; leaves those that another run is at work on, unless `wait`."""
        for identity, case in waiting.items():
            if self.fresh:
                self._execute(case, identity)
                continue
            if self._take_known(case, identity):
                continue
            if wait:
                self.reporter.warn(f"another run is at work on {case.label}; waiting for it")
            with claims.claim(identity, wait=wait) as ours:
                # Another run may have finished it in between.
                if ours and not self._take_known(case, identity):
                    self._execute(case, identity)

    def _take_known(self, case: Case, identity: str) -> bool:
        """Whether the case is on record, and need not be run."""
        with self.alone:
            if self.store.stamp(self.experiment.name) != self.stamp:
                self._refresh()
            record = self.known.get(identity)
            if record is None or record.status not in FINAL:
                return False
            self.final[identity] = record
            self.result.reused += 1
            self.reporter.finished(case, record, reused=True)
            self.on_record(record, True)
            return True

    def _refresh(self) -> None:
        self.stamp = self.store.stamp(self.experiment.name)
        loaded = self.store.load(self.experiment.name)
        self.known, self.result.problems = latest(loaded.records), loaded.problems

    def _execute(self, case: Case, identity: str) -> None:
        check()
        with self.alone:
            self.reporter.started(case)
        record = self.executor.execute(case)
        if record.status == "failed":
            check(SETTLE_S)  # what the signal has broken off is no failure
        with self.alone, held():
            self.final[identity] = record
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

"""Mistakes in what other people hand in: engines and files of records."""

from __future__ import annotations

from planted.mutant import Mutant

EXCHANGED = (
    Mutant(
        name="an altered file of records",
        file="harness/bundle.py",
        old="if _digest(contents) != digest:",
        new="if False:",
        why="records that do not suit could be left out on the way",
        tests=("tests/test_travel.py::test_an_altered_file_is_refused_with_what_is_wrong",),
    ),
    Mutant(
        name="a name that leads out",
        file="harness/bundle.py",
        old="if name is None or name[1] in contents:",
        new="if False:",
        why="a file could name a place outside of the folder that it is unpacked into",
        tests=("tests/test_travel.py::test_no_name_leads_out_and_nothing_is_written",),
    ),
    Mutant(
        name="a control that is not looked at",
        file="experiments/report/plausible.py",
        old="off = not control.low <= 1 <= control.high",
        new="off = False",
        why="a case that the machine's noise has decided would be taken in as a result",
        tests=("tests/test_travel.py::test_what_cannot_be_true_is_refused",),
    ),
    Mutant(
        name="a process that died",
        file="experiments/engines/isolated.py",
        old='kind, content = "fault", Fault(f"{who[rank]} {_end_of(processes[rank])}")',
        new='kind, content = "done", None',
        why="an engine that takes its process with it would pass for one that is done",
        tests=("tests/test_faulty_engines.py::test_what_becomes_of_a_bad_one_is_one_line",),
    ),
    Mutant(
        name="a step that took longer than its case",
        file="experiments/report/plausible.py",
        old="and longest_s > duration_s * (1 + _SLACK):",
        new="and False:",
        why="seconds that nobody can have measured would be taken in as a result",
        tests=("tests/test_travel.py::test_what_cannot_be_true_is_refused",),
    ),
    Mutant(
        name="two rounds are judged",
        file="experiments/peers.py",
        old="if control is not None and len(control.samples) < LEAST_ROUNDS:",
        new="if False:",
        why="an interval of two rounds holds the truth every second time: one engine would be two",
        tests=("tests/test_peers.py::test_nothing_is_judged_from_so_few_rounds_that_their_interval_is_none",),
    ),
    Mutant(
        name="an interrupt reaches a process that is starting",
        file="harness/signals.py",
        old="before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})",
        new="before = signal.pthread_sigmask(signal.SIG_BLOCK, set())",
        why="Ctrl-C would show a traceback out of the middle of an import for every process",
        tests=("tests/test_signals.py::test_an_interrupt_waits_for_a_process_that_is_starting",),
    ),
    Mutant(
        name="rounds are thrown away where time ends",
        file="harness/guard.py",
        old="        if len(rounds) < looks[0]:\n",
        new="        if len(rounds) < look:\n",
        why="a slow-down that was measured would not be found on a busy machine",
        tests=("tests/test_guard.py::test_where_time_ends_between_two_looks_the_next_one_is_taken_there",),
    ),
    Mutant(
        name="first runs leave no time to confirm them",
        file="experiments/guard/run.py",
        old="deadline_s if finding.runs else first_deadline_s",
        new="deadline_s",
        why="a regression that nobody confirms fails nothing",
        tests=("tests/test_guard_run.py::test_first_runs_leave_time_for_second_ones",),
    ),
    Mutant(
        name="a layer is refused by its own rank alone",
        file="pipeline/api.py",
        old="        refuse_unsupported(part for layer in modules for part in layer.modules())\n",
        new="",
        why="the other ranks would wait for it until their time is over",
        tests=("tests/test_distributed.py::test_case[arguments_that_do_not_fit]",),
    ),
)

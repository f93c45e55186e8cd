"""SIGINT and SIGTERM end a run and all that it has started; what was finished stays, nothing else is kept."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest
from command_line import START, Gate, lines, start, surroundings

from gpipe_bench.harness.signals import number_of, stopping

RANKS = START.replace('"fake_experiment"', '"fake_ranks"')
# Cases beside each other, in processes of their own.
ENDINGS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.fixture
def arrived(tmp_path):
    """Reads what a process says once, whenever that is."""
    path = tmp_path / "arrived"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)

    def read():
        ready, _, _ = select.select([pipe], [], [], 120)
        assert ready, "the process did not begin within two minutes"
        return os.read(pipe, 100).decode()

    read.path = path
    yield read
    os.close(pipe)


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


def command(*arguments, code, **variables):
    """A command that leads a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=surroundings(**variables),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


@pytest.fixture
def descendants():
    """All that a process has started so far; gone when the test is done, whatever it finds."""
    found = []

    def of(process):
        found.extend(psutil.Process(process.pid).children(recursive=True))
        return found

    yield of
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()


def nobody_is_left(processes):
    _, alive = psutil.wait_procs(processes, timeout=300)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def ending_of(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out.decode(), err.decode()


def kept(results):
    return [(each["case"]["step"], each["status"]) for each in lines((results / "fake.jsonl").read_text())]


@pytest.mark.parametrize(
    ("to", "number", "status"), [("the run", signal.SIGTERM, 143), ("the whole group", signal.SIGINT, 130)]
)
def test_a_run_ends_with_all_that_it_launched(tmp_path, arrived, descendants, to, number, status):
    """A keyboard's interrupt reaches every process of the group at once; a kill only the run itself, for
    which both signals are one: test_the_way_out_is_taken_in_good_order.
    """
    results = tmp_path / "results"
    process = command(
        "run", "fake", "--device", "cpu", "--results", results, code=RANKS, FAKE_ARRIVED=str(arrived.path)
    )
    arrived()
    family = descendants(process)
    assert len(family) >= 2
    if to == "the run":
        process.send_signal(number)
    else:
        os.killpg(process.pid, number)
    found, out, err = ending_of(process)
    assert found == status, err
    assert "1 finished cases are kept, the same command goes on from there" in err
    assert "the comparison" not in out
    assert kept(results) == [(1, "done")]
    assert nobody_is_left(family)


@pytest.mark.alone
def test_it_takes_no_longer_than_two_seconds(tmp_path, arrived, descendants):
    """As docs/commands.md promises, of a machine with a core to spare."""
    process = command(
        "run", "fake", "--device", "cpu", "--results", tmp_path, code=RANKS, FAKE_ARRIVED=str(arrived.path)
    )
    arrived()
    family, start_s = descendants(process), time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    ending_of(process)
    assert nobody_is_left(family)
    is_loaded = os.getloadavg()[0] >= (os.cpu_count() or 1)
    assert time.monotonic() - start_s < (300 if is_loaded else 2)


def test_what_was_started_twice_to_end_ends_once(tmp_path, gate):
    """Tools send a second signal, or send it to process and group."""
    results = tmp_path / "results"
    process = start("run", "fake", "--device", "cpu", "--results", results, FAKE_GATE=str(gate.folder))
    gate.wait()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    found, out, err = ending_of(process)
    assert found == 130, err
    assert "reproduced" not in out
    assert err.count("1 finished cases are kept") == 1
    assert "Traceback" not in err
    assert kept(results) == [(1, "done")]


STUBBORN = """
import fake_experiment
import signal
take = fake_experiment.run
def run(case, options):
    while True:
        try:
            return take(case, options)
        except KeyboardInterrupt:
            pass
import dataclasses
fake_experiment.EXPERIMENT = dataclasses.replace(fake_experiment.EXPERIMENT, run=run)
""" + START.replace("GRACE_S = 600.0", "GRACE_S = 1.5")


def test_a_library_that_swallows_the_interrupt_does_not_hold_it_up(tmp_path, gate):
    results = tmp_path / "results"
    process = start(
        "run", "fake", "--device", "cpu", "--results", results, code=STUBBORN, FAKE_GATE=str(gate.folder)
    )
    gate.wait()
    process.send_signal(signal.SIGTERM)
    found, out, err = ending_of(process)
    assert found == 143, err
    assert "reproduced" not in out
    assert "ended by SIGTERM" in err
    assert kept(results) == [(1, "done")]


@pytest.fixture
def default_handlers():
    """Also in a background job, which was told to ignore interrupts: it would wait for one for ever."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "status"), ENDINGS)
def test_the_way_out_is_taken_in_good_order(number, status, default_handlers):
    cleaned, before = [], signal.getsignal(number)

    def work():
        with stopping():
            try:
                os.kill(os.getpid(), number)
                signal.pause()
            finally:
                cleaned.append(True)

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert cleaned
    assert 128 + number_of(caught.value) == status
    assert signal.getsignal(number) is before

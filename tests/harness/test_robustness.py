"""What happens to runs in practice, done to them for real: kills, full disks, strange files and terminals.

Everything goes through the command line, in processes of its own where kills, disks and streams matter.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from command_line import START, Gate, lines, run_fake, start, surroundings
from fake_experiment import steps

from gpipe_bench.harness.store import Store


def stored(results):
    """Steps of the whole records in a results folder."""
    return [each.case["step"] for each in Store(results).load("fake").records]


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


# Killed at any point

KILLER = """
import json, os, signal, sys
from pathlib import Path
import fake_experiment, gpipe_bench.harness.environment, gpipe_bench.harness.store
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.runner import Reporter
from gpipe_bench.harness.runner import run_experiment

WATCHED = gpipe_bench.harness.store.__file__
BASE = Path(sys.argv[1])
gpipe_bench.harness.environment.environment()  # once for all the processes below
write = os.write


def short(descriptor, data):  # as a system does that is interrupted: the rest is left to the caller
    return write(descriptor, data[: len(data) // 2] if len(data) > 300 else data)


def kill_before(point):
    calls = 0

    def watch(frame, event, argument):
        nonlocal calls
        if event != "c_call" or argument.__module__ not in ("posix", "fcntl"):
            return
        if frame.f_code.co_filename == WATCHED or frame.f_back.f_code.co_filename == WATCHED:
            calls += 1
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)

    os.write = short
    sys.setprofile(watch)


def run(folder, point=None):
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.environ["FAKE_LOG"] = str(folder / "log")
        if point is not None:
            kill_before(point)
        options = RunOptions(device="cpu", only={"step": ("1", "2")})
        reporter = Reporter(sys.stderr)
        store = gpipe_bench.harness.store.Store(folder)
        result = run_experiment(fake_experiment.EXPERIMENT, options, store, reporter=reporter)
        os._exit(len(result.records) != 2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def state(folder):
    path = folder / "fake.jsonl"
    loaded = gpipe_bench.harness.store.Store(folder).load("fake")
    return {
        "ran": fake_experiment.steps(folder / "log"),
        "stored": [each.case["step"] for each in loaded.records],
        "lines": path.read_text("latin-1").splitlines() if path.exists() else [],
        "torn": len(loaded.problems),
    }


point, status = 0, None
while status != 0:
    point += 1
    folder = BASE / str(point)
    folder.mkdir()
    (folder / "log").touch()
    status = run(folder, point)
    before = state(folder)
    resumed = run(folder)
    print(json.dumps({"status": status, "before": before, "resumed": resumed, "after": state(folder)}))
"""


def test_a_run_killed_before_any_call_into_the_system_goes_on_and_loses_nothing(tmp_path):
    """Before each system call that the store and its locks make, with records written in small pieces."""
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path)], env=surroundings(), capture_output=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    trials = lines(done.stdout.decode())
    *killed, whole = trials
    assert len(killed) > 25
    assert whole["status"] == whole["resumed"] == 0
    assert {trial["status"] for trial in killed} == {-signal.SIGKILL}
    for trial in killed:
        before, after = trial["before"], trial["after"]
        assert trial["resumed"] == 0
        assert sorted(after["stored"]) == [1, 2], "every case is on record, once"
        assert after["lines"][: len(before["lines"])] == before["lines"], "nothing written is touched"
        again = after["ran"][len(before["ran"]) :]
        assert sorted(again) == sorted({1, 2} - set(before["stored"])), "only what was missing ran"
        assert before["torn"] <= 1
    assert sum(trial["before"]["torn"] for trial in killed) >= 2, "some were killed within a line"
    reached = {tuple(trial["before"]["stored"]) for trial in killed}
    assert reached == {(), (1,), (1, 2)}, "kills fell before the first, between and after the last record"


def test_a_process_that_a_killed_run_left_behind_keeps_nobody_waiting(tmp_path, gate):
    log, results = tmp_path / "log", tmp_path / "results"
    killed = start(
        "run", "fake", "--device", "cpu", "--results", results, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, FAKE_GATE=str(gate.folder), FAKE_LOG=str(log), FAKE_STEP_2="orphan",
    )  # fmt: skip
    gate.wait()
    killed.kill()
    assert killed.wait(60) == -signal.SIGKILL
    status, _, err = run_fake(results, FAKE_LOG=str(log))
    assert status == 0
    assert "waiting" not in err
    assert steps(log) == [1, 2, 2, 3, 4, 5]
    gate.release()  # the orphan was there all the time


# Disks


def in_mount(script, *arguments, **variables):
    """Runs a script of bash where it may mount, seen by nobody else; skips where it may not."""
    command = ["unshare", "--mount", "--map-root-user", "bash", "-euc"]
    try:
        allowed = subprocess.run([*command, "mount -t tmpfs none /mnt"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare, to mount a small disk")
    if allowed.returncode != 0:
        pytest.skip(f"may not mount a small disk here: {allowed.stderr.decode().strip()}")
    done = subprocess.run(
        [*command, script, "bash", *map(str, arguments)], env=surroundings(CODE=START, **variables),
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


RUN = """
run() { "$PYTHON" -c "$CODE" run fake --device cpu --results "$disk" --json || echo "status $?" >&2; }
"""


def test_a_disk_that_fills_up_loses_no_result_and_the_run_goes_on_when_there_is_room(tmp_path):
    (tmp_path / "disk").mkdir()
    out, err = in_mount(
        RUN + """
        disk=$1
        mount -t tmpfs -o size=16k none "$disk"
        head -c 12288 /dev/zero > "$disk/filler"
        run
        cp "$disk/fake.jsonl" "$2/full.jsonl"
        rm "$disk/filler"
        echo ----
        FAKE_LOG=$2/log run
        cp "$disk/fake.jsonl" "$2/roomy.jsonl"
        """,
        tmp_path / "disk", tmp_path, PYTHON=sys.executable,
    )  # fmt: skip
    first, second = (lines(part) for part in out.split("----\n"))
    assert [each["case"]["step"] for each in first] == [1, 2, 3, 4, 5], "all are printed, saved or not"
    assert "fake.jsonl: No space left on device; choose another folder with --results" in err
    assert "status 3" in err
    assert "Traceback" not in err
    saved = lines((tmp_path / "full.jsonl").read_text())
    assert 0 < len(saved) < 5, "whole lines, as many as fit"
    assert saved == first[: len(saved)]
    kept = [each["case"]["step"] for each in saved]
    assert steps(tmp_path / "log") == [step for step in (1, 2, 3, 4, 5) if step not in kept]
    assert [each["case"]["step"] for each in second] == [1, 2, 3, 4, 5]
    assert lines((tmp_path / "roomy.jsonl").read_text()) == second


@pytest.mark.parametrize("arguments", [["list"], ["run", "fake", "--device", "cpu", "--json"]])
def test_a_full_disk_behind_standard_output_is_one_line(tmp_path, arguments):
    run_fake(tmp_path)
    with open("/dev/full", "wb") as full:
        process = start(*arguments, "--results", tmp_path, stdout=full)
    err = process.communicate(timeout=300)[1].decode()
    assert process.returncode == 74
    assert err.endswith("error: [Errno 28] No space left on device\n")
    assert "Traceback" not in err
    assert stored(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_harm_neither_run_nor_records(tmp_path, closed):
    script = f'"$0" -c "$1" run fake --device cpu --results "$2" --json {closed}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, START, str(tmp_path)], env=surroundings(),
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert stored(tmp_path) == [1, 2, 3, 4, 5]
    assert Store(tmp_path).load("fake").problems == ()
    assert (tmp_path / ".fake.lock").read_bytes() == b""
    if closed == "2>&-":
        assert [each["case"]["step"] for each in lines(done.stdout.decode())] == [1, 2, 3, 4, 5]

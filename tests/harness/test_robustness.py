"""What happens to runs in practice, done to them for real: kills, full disks, strange files and terminals.

Everything goes through the command line, in processes of its own where kills, disks and streams matter.
"""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from datetime import UTC, datetime, timedelta

import pytest
from command_line import START, Gate, call, lines, run_fake, start, surroundings
from fake_experiment import steps
from records import record

from gpipe_bench.harness.record import SCHEMA, encode
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
    assert len(killed) > 30
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


def test_a_read_only_folder_is_used_as_far_as_it_goes(tmp_path):
    (tmp_path / "disk").mkdir()
    out, err = in_mount(
        RUN + """
        disk=$1
        mount -t tmpfs none "$disk"
        "$PYTHON" -c "$CODE" run fake --device cpu --only step=1 --results "$disk" >/dev/null 2>&1
        mount -o remount,ro none "$disk"
        FAKE_LOG=$2/log run
        echo ----
        "$PYTHON" -c "$CODE" compare fake --results "$disk"
        "$PYTHON" -c "$CODE" report --no-figures --results "$disk" || echo "status $?" >&2
        """,
        tmp_path / "disk", tmp_path, PYTHON=sys.executable,
    )  # fmt: skip
    records, compared = out.split("----\n", 1)
    assert [each["case"]["step"] for each in lines(records)] == [1, 2, 3, 4, 5]
    assert steps(tmp_path / "log") == [2, 3, 4, 5]
    assert "can't write figures to" in err
    assert "fake.jsonl: Read-only file system; choose another folder with --results" in err
    assert "here: 1 follows" in compared
    assert "report.html: Read-only file system; choose another folder with --output" in err
    assert [line for line in err.splitlines() if line.startswith("status")] == ["status 3", "status 2"]
    assert "Traceback" not in err


def test_figures_that_were_cut_off_do_not_pass_for_whole_ones(tmp_path):
    (tmp_path / "disk").mkdir()
    in_mount(
        RUN + """
        disk=$1
        mount -t tmpfs -o size=24k none "$disk"
        run >/dev/null 2>&1
        test -e "$disk/figures/fake.json"
        rm "$disk/figures/fake.txt"
        cat /dev/zero > "$disk/filler" 2>/dev/null || true
        run >/dev/null 2>"$2/err"
        ! grep records_sha256 "$disk/figures/fake.json"
        """,
        tmp_path / "disk", tmp_path, PYTHON=sys.executable,
    )  # fmt: skip
    assert "can't write figures to" in (tmp_path / "err").read_text()


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


def test_a_log_that_can_not_be_written_stops_nobody(tmp_path):
    with open("/dev/full", "wb") as full:
        process = start("run", "fake", "--device", "cpu", "--results", tmp_path, stderr=full)
    out = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 0
    assert "here: 1 differs; 4 follow" in out
    assert stored(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("closed", "option"),
    [(">&-", ""), ("2>&-", "--json"), ("<&- >&- 2>&-", ""), ("<&- >&- 2>&-", "--json")],
)
def test_closed_standard_streams_harm_neither_run_nor_records(tmp_path, closed, option):
    script = f'"$0" -c "$1" run fake --device cpu --results "$2" {option} {closed}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, START, str(tmp_path)], env=surroundings(),
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert stored(tmp_path) == [1, 2, 3, 4, 5]
    assert Store(tmp_path).load("fake").problems == ()
    assert (tmp_path / ".fake.lock").read_bytes() == b""
    if closed == "2>&-" and option:
        assert [each["case"]["step"] for each in lines(done.stdout.decode())] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("verb", [["compare", "fake"], ["report", "--no-figures"]])
def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path, verb):
    (tmp_path / "file").write_text("not a folder")
    status, _, err = call(*verb, "--results", tmp_path / "file")
    assert status == 2
    assert "error: " in err
    assert "Traceback" not in err
    assert (tmp_path / "file").read_text() == "not a folder"


# Strange lines


def damage(path):
    """Damages lines 2 and 4 of five, in different ways, and adds others; the numbers of the bad lines."""
    one, two, three, four, five = path.read_bytes().splitlines()
    newer = four.replace(b'"schema":%d' % SCHEMA, b'"schema":%d' % (SCHEMA + 1))
    path.write_bytes(
        b"\r\n".join([
            b"", one, two[: len(two) // 2], three, newer,
            b"\x00\xff\x1b[2J",
            '{"schema":1}'.encode("utf-16"), encode(record(1, experiment="other")), b"{}", five,
        ])
    )  # fmt: skip
    return [number for number in range(3, 10) if number != 4]


def test_damaged_lines_are_named_by_every_verb_and_the_rest_is_used(tmp_path):
    run_fake(tmp_path)
    path = tmp_path / "fake.jsonl"
    bad = damage(path)
    status, out, err = call("compare", "fake", "--results", tmp_path)
    assert status == 0, err
    for number in bad[:5]:
        assert f"warning: {path}:{number}: " in err
    assert f"{path}: {len(bad) - 5} more lines can't be read" in err
    assert "\x1b" not in err
    status, out, err = run_fake(tmp_path, "--json", FAKE_LOG=str(tmp_path / "log"))
    assert status == 0
    assert steps(tmp_path / "log") == [2, 4]
    assert [each["case"]["step"] for each in lines(out)] == [1, 2, 3, 4, 5]
    for number, words in zip(bad, ["not a complete line", "newer version"], strict=False):
        assert any(f":{number}: " in line and words in line for line in err.splitlines())


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\r\n", bytes(range(256)) * 400, b"\xef\xbb\xbf"])
def test_a_file_of_anything_else_costs_nothing_but_a_few_warnings(tmp_path, content):
    (tmp_path / "fake.jsonl").write_bytes(content)
    status, out, err = run_fake(tmp_path, "--json")
    assert status == 0
    assert [each["case"]["step"] for each in lines(out)] == [1, 2, 3, 4, 5]
    assert err.count("warning") <= 6
    assert stored(tmp_path) == [1, 2, 3, 4, 5]
    assert (tmp_path / "fake.jsonl").read_bytes().startswith(content), "what is not ours is left alone"


def test_a_whole_record_that_its_experiment_can_not_read_costs_only_itself(tmp_path):
    store = Store(tmp_path)
    store.append(record(99, options={"device": "cpu", "engine": None, "seed": 0}))
    for arguments in (["run", "fake", "--device", "cpu"], ["compare", "fake"]):
        status, out, err = call(*arguments, "--results", tmp_path)
        assert status == 0, err
        assert "warning: fake can't read its record of step=99 (KeyError: 99); left out" in err
        assert "here: 1 differs; 4 follow" in out
    store = Store(tmp_path / "alone")
    store.append(record(99))
    status, out, err = call("compare", "fake", "--results", store.root)
    assert (status, out) == (2, "")
    assert (
        "error: fake can't be shown: KeyError: 99; make records anew with: gpipe-bench run fake --fresh"
        in err
    )


def test_the_report_leaves_out_what_no_experiment_can_read(tmp_path):
    timeline = {"num_stages": "x", "events": 3, "provenance": None}
    cases = {"table4": {"no such": "key"}, "engines": {"no such": "key"}}
    for name, case in cases.items():
        Store(tmp_path).append(record(experiment=name, case=case, details={"timeline": timeline}))
    (tmp_path / "table2.jsonl").write_bytes(bytes(range(256)))
    status, out, err = call("report", "--no-figures", "--results", tmp_path)
    assert status == 0, err
    for name in cases:
        assert f"{name} can't be shown: " in err
    assert "table2.jsonl:1: not a complete line" in err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "table4 can&#39;t be shown" in page
    assert "Its algorithm does" in out, "reference records stand in"


# Clocks


class Backwards(datetime):
    """A clock that is a day earlier whenever it is asked."""

    seconds = 2_000_000_000

    @classmethod
    def now(cls, tz=None):
        cls.seconds -= 86_400
        return datetime.fromtimestamp(cls.seconds, tz)


def test_a_clock_that_runs_backwards_spoils_neither_order_nor_resume(tmp_path):
    common = ["run", "fake", "--device", "cpu", "--results", tmp_path, "--json"]
    log = tmp_path / "log"
    assert call(*common, "--only", "step=1", "--only", "step=2", FAKE_LOG=str(log))[0] == 0
    os.utime(tmp_path / "fake.jsonl", (4e9, 4e9))  # as if written in the year 2096
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpipe_bench.harness.workers.datetime", Backwards)
        patch.setattr(time, "time", lambda: Backwards.now().timestamp())
        status, out, err = call(*common, FAKE_LOG=str(log))
        assert status == 0, err
        assert steps(log) == [1, 2, 3, 4, 5]
        late = [each["started_at"] for each in lines(out)][2:]
        assert late == sorted(late, reverse=True), "the clock did run backwards"
        assert all(each["duration_s"] >= 0 for each in lines(out))
        _, again, _ = call(*common, "--fresh", FAKE_LOG=str(log))
    os.utime(tmp_path / "fake.jsonl", (0, 0))
    assert call(*common, FAKE_LOG=str(log))[1] == again, "the later line counts, whatever its date"
    assert steps(log) == [1, 2, 3, 4, 5] * 2


@pytest.fixture(params=["LINE-14", "PST8PDT,M3.2.0,M11.1.0", "no such zone"])
def zone(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


@pytest.mark.usefixtures("zone")
def test_times_are_utc_wherever_the_machine_stands(tmp_path):
    early = datetime.now(UTC) - timedelta(seconds=1)
    _, out, _ = run_fake(tmp_path, "--json", "--only", "step=1")
    started = datetime.fromisoformat(lines(out)[0]["started_at"])
    assert started.utcoffset() == timedelta(0)
    assert early <= started <= datetime.now(UTC)


# Terminals and locales


def on_terminal(results, columns, **variables):
    """Exit status and text of a run on a terminal of that width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = surroundings(**variables)
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", START, "run", "fake", "--device", "cpu", "--results", str(results)],
        env=environment, stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    content = b""
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not data:
            break
        content += data
    os.close(master)
    return process.wait(60), content


@pytest.mark.parametrize(
    ("columns", "variables", "bar"),
    [
        (100, {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"}, True),
        (1, {"TERM": "xterm"}, False),
        (100, {"TERM": "xterm", "PYTHONIOENCODING": "latin-1", "LC_ALL": "C"}, False),
    ],
)
def test_a_terminal_gets_a_bar_where_it_can_show_one_and_lines_elsewhere(tmp_path, columns, variables, bar):
    status, content = on_terminal(tmp_path / "results", columns, FAKE_STEP_2="print", **variables)
    text = content.decode("utf-8" if bar else variables.get("PYTHONIOENCODING", "utf-8"))
    assert status == 0
    assert "here: 1 differs; 4 follow" in " ".join(text.split())  # a word to a line in one column
    assert "Traceback" not in text
    assert ("\x1b" in text) == bar
    assert ("[5/5] step=5 kind=odd: done in" in text) != bar


def test_a_path_that_is_no_text_is_a_path(tmp_path):
    results = os.fsencode(tmp_path) + b"/caf\xe9"
    status, out, err = run_fake(os.fsdecode(results), "--json")
    assert status == 0, err
    assert [each["case"]["step"] for each in lines(out)] == [1, 2, 3, 4, 5]
    with open(results + b"/fake.jsonl", "rb") as file:
        assert len(file.readlines()) == 5

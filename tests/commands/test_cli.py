"""The command line: standard output, standard error, exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from command_line import NO_TORCH, ROOT, SEVERAL, Gate, call, finish, lines, run_fake, start
from fake_experiment import steps
from records import metric, record

from gpipe_bench.experiments.commands.cli import VERBS, main
from gpipe_bench.experiments.commands.run import TF32
from gpipe_bench.experiments.registry import EXPERIMENTS, VERBS_TOO, program, spelled_out
from gpipe_bench.harness.environment import _software
from gpipe_bench.harness.store import Store


@pytest.fixture
def fake(monkeypatch):
    """The fake experiment for commands that run inside this process."""
    monkeypatch.setitem(EXPERIMENTS, "fake", "fake_experiment")


PUBLISHED = "computed from the paper's description"

# Running


def test_a_run_shows_the_table_and_keeps_records_and_figures(tmp_path):
    status, out, err = run_fake(tmp_path)
    assert status == 0
    assert re.search(r"ours \(modelled\) +81\.79M", out)
    assert f"{PUBLISHED}: 15 not run\nrun here: 1 differs; 4 follow\n" in out
    assert "[5/5] step=5 kind=odd: done in" in err
    assert len((tmp_path / "fake.jsonl").read_text().splitlines()) == 5
    assert (tmp_path / "figures" / "fake.txt").read_text().count("step=") == 5
    status, again, err = run_fake(tmp_path)
    assert "5 of 5 cases were on record already" in err
    assert again.endswith(out[out.index("table1-amoebanet") :])


def test_json_is_records_and_nothing_else(tmp_path):
    status, out, err = run_fake(tmp_path, "--json", "--profile", "smoke")
    assert status == 0
    assert [record["case"]["step"] for record in lines(out) if record["status"] == "done"] == [1, 2, 3]
    assert out == (tmp_path / "fake.jsonl").read_text()
    assert "a library that prints" in err
    assert "and one that writes to the descriptor" in err
    assert run_fake(tmp_path, "--json", "--profile", "smoke")[1] == out
    status, out, err = call("compare", "table3", "--unknowns", "--json")
    assert (status, out) == (2, "")
    assert "--unknowns shows a text; leave --json out" in err


def test_a_failed_case_is_status_3_and_everything_else_is_done(tmp_path):
    steps = {"FAKE_STEP_2": "crash", "FAKE_STEP_3": "package", "FAKE_STEP_4": "memory", "FAKE_STEP_5": "skip"}
    status, out, err = run_fake(tmp_path, **steps)
    assert status == 3
    assert "failed: step=2 kind=even: RuntimeError: the wheel came off" in err
    assert "fake.jsonl; run again to retry" in err
    assert "list --machine` says how to get what is missing" in err
    assert "Traceback" not in err
    assert re.search(r"answer .* differs", out), "what ran out of memory"
    whole = " ".join(call("compare", "fake", "--full", "--results", tmp_path)[1].split())
    assert "failed: RuntimeError: the wheel came off" in whole
    assert "ran out of memory here: MemoryError: no room for 3 GiB" in whole
    assert "skipped: needs 8 devices" in whole
    found = lines((tmp_path / "fake.jsonl").read_text())
    assert [each["status"] for each in found] == ["done", "failed", "failed", "out_of_memory", "skipped"]
    assert "the wheel came off" in found[1]["details"]["traceback"]


def test_assert_fails_on_deviations_after_printing(tmp_path):
    status, out, err = run_fake(tmp_path, "--assert")
    assert status == 1
    assert "1 differs; 4 follow" in out
    assert "below: table1-amoebanet / parameters / pipeline-2: 541.0M lies below 541.50M to 542.50M" in err
    assert run_fake(tmp_path)[0] == 0


# Interrupted, killed, at the same time


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


def start_at(gate, results, log):
    process = start(
        "run", "fake", "--device", "cpu", "--results", results, FAKE_GATE=str(gate.folder), FAKE_LOG=str(log)
    )
    gate.wait()
    return process


def until_waiting(process):
    """Reads progress until the run waits for the other one."""
    for line in process.stderr:
        if b"another run is at work on it; waiting" in line:
            return
    pytest.fail("the run ended without waiting")


def test_two_runs_at_once_run_no_case_twice(tmp_path, gate):
    log, results = tmp_path / "log", tmp_path / "made" / "on demand"
    one = start_at(gate, results, log)
    two = start("run", "fake", "--device", "cpu", "--results", results, "--json", FAKE_LOG=str(log))
    until_waiting(two)
    gate.release()
    out = two.communicate(timeout=300)[0].decode()
    one.communicate(timeout=300)
    assert (one.returncode, two.returncode) == (0, 0)
    assert sorted(steps(log)) == [1, 2, 3, 4, 5]
    assert sorted(record["case"]["step"] for record in lines(out)) == [1, 2, 3, 4, 5]
    assert len(lines((results / "fake.jsonl").read_text())) == 5


def test_a_case_is_taken_over_from_a_run_that_was_killed(tmp_path, gate):
    log, results = tmp_path / "log", tmp_path / "results"
    one = start_at(gate, results, log)
    two = start("run", "fake", "--device", "cpu", "--results", results, FAKE_LOG=str(log))
    until_waiting(two)
    one.kill()
    two.communicate(timeout=300)
    one.communicate()
    assert two.returncode == 0
    assert steps(log) == [1, 2, 2, 3, 4, 5]


def test_a_reader_that_leaves_ends_the_run_quietly_and_loses_nothing(tmp_path):
    process = start("run", "fake", "--device", "cpu", "--results", tmp_path, "--json")
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(60) == 141
    assert "Traceback" not in err
    assert len(lines((tmp_path / "fake.jsonl").read_text())) == 1


# Comparing


def test_compare_makes_the_table_from_records_alone_without_torch(tmp_path):
    _, ran, _ = run_fake(tmp_path)
    status, out, err = finish(start("compare", "fake", "--results", tmp_path, code=NO_TORCH))
    assert (status, err) == (0, "")
    table = out[out.index("table1-amoebanet") :]
    assert table.rstrip() in ran


def test_compare_warns_where_the_records_come_from_different_surroundings(tmp_path):
    for step in (1, 2):
        surroundings = {"variables": {"OMP_NUM_THREADS": str(step)}}
        Store(tmp_path).append(record(step, environment=surroundings))
        modelled = (metric(provenance="modelled"),)
        Store(tmp_path / "b").append(record(step, environment=surroundings, metrics=modelled))
    _, _, err = call("compare", "fake", "--results", tmp_path)
    assert "warning: records differ in variables: " in err
    assert call("compare", "fake", "--results", tmp_path / "b")[2] == "", "the same on every machine"


@pytest.mark.parametrize(
    ("started", "typed"),
    [
        ("/repo/experiments/__main__.py", "python -m experiments"),
        ("{here}/.venv/bin/gpipe-bench", ".venv/bin/gpipe-bench"),
    ],
)
def test_messages_name_the_program_as_it_was_started(tmp_path, monkeypatch, started, typed):
    """By its name where that leads to it, else by its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/python3")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(sys, "argv", [started.format(here=tmp_path)])
    assert program() == typed


def test_records_of_an_earlier_revision_are_left_out(tmp_path, fake, capsys, monkeypatch):
    import fake_experiment

    assert main(["run", "fake", "--device", "cpu", "--results", str(tmp_path)]) == 0
    newer = replace(fake_experiment.EXPERIMENT, revision=2)
    monkeypatch.setattr(fake_experiment, "EXPERIMENT", newer)
    assert main(["compare", "fake", "--results", str(tmp_path)]) == 2
    assert "there are 5 of other profiles or an earlier revision" in capsys.readouterr().err


# Bad usage


@pytest.mark.parametrize(
    ("build", "device"), [("2.13.0+cpu", "cpu"), ("2.13.0", "cuda"), ("2.13.0+rocm6.4", "cuda")]
)
def test_torch_is_asked_for_a_device_unless_it_is_built_for_none(
    fake, tmp_path, capsys, monkeypatch, build, device
):
    monkeypatch.setattr("importlib.metadata.version", lambda name: build)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert main(["run", "fake", "--only", "step=1", "--json", "--results", str(tmp_path)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["options"]["device"] == device
    # The short profile is scaled to two cores, on which a GPU is kept waiting for work and nothing else.
    assert made["profile"] == ("full" if device == "cuda" else "short")


def test_tf32_is_allowed_on_request_and_recorded(fake, tmp_path, capsys, monkeypatch):
    """Apart from what is on record without it, and in processes that a case starts, too."""
    import torch

    run = ["run", "fake", "--only", "step=1", "--json", "--profile", "smoke", "--results", str(tmp_path)]
    assert main([*run, "--device", "cpu", "--tf32"]) == 2
    assert "--tf32 is for GPUs" in capsys.readouterr().err
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv(TF32, "0")
    before = torch.get_float32_matmul_precision()
    made = []
    try:
        for options in ([], ["--tf32"]):
            _software.cache_clear()
            assert main([*run, *options]) == 0
            made.append(json.loads(capsys.readouterr().out))
        child = "import torch; print(torch.backends.cuda.matmul.allow_tf32)"
        assert subprocess.run([sys.executable, "-c", child], capture_output=True).stdout == b"True\n"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)
    assert [each["options"].get("tf32") for each in made] == [None, True]
    assert [each["environment"]["variables"][TF32] for each in made] == ["0", "1"]
    assert len((tmp_path / "fake.jsonl").read_text().splitlines()) == 2


def test_an_engine_is_one_of_the_experiments_or_the_users_own(fake, tmp_path, capsys, monkeypatch):
    import fake_experiment

    monkeypatch.setattr(
        fake_experiment, "EXPERIMENT", replace(fake_experiment.EXPERIMENT, engines=("ours", "plain"))
    )
    common = ["run", "fake", "--device", "cpu", "--results", str(tmp_path), "--json", "--only", "step=1"]
    assert main([*common, "--engine", "plane"]) == 2
    assert (
        "unknown engine 'plane' (did you mean 'plain'?); known: ours, plain, or your own"
        in capsys.readouterr().err
    )
    assert main([*common, "--engine", "no_such_module:Engine"]) == 2
    assert "no module 'no_such_module' in" in capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine_of_a_user.py").write_text("class Engine:\n    def step(self, *_): pass\n")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for engine, stored in [
        ([], "ours"),
        (["--engine", "plain"], "plain"),
        (["--engine", "engine_of_a_user:Engine"], "engine_of_a_user:Engine@0f8a68d2"),
    ]:
        assert main([*common, *engine]) == 0
        options = json.loads(capsys.readouterr().out)["options"]
        assert options["engine"] == stored


# Surroundings


def test_help_and_list_start_without_anything_heavy(tmp_path):
    for words in (["--help"], ["plan", "--help"]):
        status, out, err = finish(start(*words, code=NO_TORCH))
        assert (status, err) == (0, "")
    status, out, err = finish(start("list", "--results", tmp_path, code=NO_TORCH))
    assert (status, err) == (0, "")
    assert "fake: Parameters of Table 1 (v5 Table 1)" in out
    assert "smoke           6 s    3 cases, 0 on record: three steps" in out


def test_list_knows_how_long_it_took_here(tmp_path):
    run_fake(tmp_path, "--only", "step=1")
    _, out, _ = call("list", "--results", tmp_path, "--json")
    fake = next(entry for entry in lines(out) if entry["name"] == "fake")
    smoke, short, _ = fake["profiles"]
    assert (smoke["expected_s"], smoke["on_record"]) == (6.0, 0)
    assert 8.0 <= short["expected_s"] < 10.0
    assert short["on_record"] == 1


def test_every_experiment_lists_its_cases_without_torch():
    code = (
        NO_TORCH.replace("sys.exit(main())", "")
        + f"""
from gpipe_bench.harness.experiment import RunOptions
for name in {list(EXPERIMENTS)!r}:
    experiment = gpipe_bench.experiments.registry.load(name)
    assert experiment.name == name
    for profile in experiment.profiles:
        options = RunOptions(profile=profile, device="cpu")
        cases = experiment.cases(options)
        assert len({{experiment.identity(case, options) for case in cases}}) == len(cases) > 0, name
        assert all(case.estimate_s > 0 for case in cases), name
    assert experiment.cells([]) is not None, name
"""
    )
    status, _, err = finish(start(code=code))
    assert status == 0, err


def test_locale_and_terminal_do_not_matter(tmp_path):
    variables = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb"}
    results = ("--results", tmp_path / "café")
    run = ("run", "fake", "--device", "cpu", *results)
    commands = (*run, "then", *run, "--fresh", "--json", "then", "compare", "fake", *results)
    status, out, err = finish(start(*commands, code=SEVERAL, FAKE_STEP_2="print", **variables))
    assert status == 0, err
    assert "\x1b" not in out + err
    assert len((tmp_path / "café" / "fake.jsonl").read_text(encoding="utf-8").splitlines()) == 10


# This machine


def test_a_torch_that_ends_the_process_is_said_and_a_folder_that_is_none(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    (tmp_path / "psutil.py").write_text("raise ImportError('no psutil here')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "tests" / "support")])
    arguments = ("list", "--machine", "--results", tmp_path / "torch.py" / "results")
    status, out, _ = finish(start(*arguments, PYTHONPATH=path))
    assert status == 1
    assert "importing it ends with signal 4" in out
    assert "can't be examined: no psutil here" in out
    assert "missing: torch, machine, results" in out
    assert "choose another with --results DIR" in out


def test_an_experiments_name_alone_runs_it(tmp_path):
    assert spelled_out(["table1", "--json"]) == ["run", "table1", "--json"]
    assert spelled_out(["list"]) == ["list"]
    assert spelled_out([]) == []
    assert set(VERBS_TOO) == set(VERBS) & set(EXPERIMENTS)
    status, out, _ = call("fake", "--device", "cpu", "--json", "--results", tmp_path)
    assert (status, len(lines(out))) == (0, 5)

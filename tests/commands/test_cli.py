"""The command line: standard output, standard error, exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from dataclasses import replace

import pytest
from command_line import NO_TORCH, ROOT, SEVERAL, Gate, call, finish, lines, run_fake, start
from fake_experiment import steps
from records import metric, record

import gpipe_bench
from gpipe_bench.experiments import gpu
from gpipe_bench.experiments.commands.cli import VERBS, main, parser
from gpipe_bench.experiments.registry import EXPERIMENTS, VERBS_TOO, program, spelled_out
from gpipe_bench.harness.store import Store
from gpipe_bench.models import zoo


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
    assert [(record["case"]["step"], record["status"]) for record in lines(out)] == [
        (1, "done"),
        (2, "done"),
        (3, "done"),
    ]
    assert out == (tmp_path / "fake.jsonl").read_text()
    assert "a library that prints" in err
    assert "and one that writes to the descriptor" in err
    assert run_fake(tmp_path, "--json", "--profile", "smoke")[1] == out


def test_only_narrows_and_the_table_still_knows_the_rest(tmp_path):
    _, out, _ = run_fake(tmp_path, "--only", "kind=odd", "--only", "step=1", "--only", "step=3", "--json")
    assert [record["case"]["step"] for record in lines(out)] == [1, 3]
    _, out, _ = run_fake(tmp_path, "--only", "step=2")
    assert f"{PUBLISHED}: 17 not run\nrun here: 1 differs; 2 follow\n" in out


def test_a_failed_case_is_status_3_and_everything_else_is_done(tmp_path):
    status, out, err = run_fake(tmp_path, FAKE_STEP_2="crash", FAKE_STEP_4="memory", FAKE_STEP_5="skip")
    assert status == 3
    assert "failed: step=2 kind=even: RuntimeError: the wheel came off" in err
    assert "fake.jsonl; run again to retry" in err
    assert "Traceback" not in err
    assert re.search(r"answer .* differs", out), "what ran out of memory"
    whole = " ".join(call("compare", "fake", "--full", "--results", tmp_path)[1].split())
    assert "failed: RuntimeError: the wheel came off" in whole
    assert "ran out of memory here: MemoryError: no room for 3 GiB" in whole
    assert "skipped: needs 8 devices" in whole
    records = lines((tmp_path / "fake.jsonl").read_text())
    assert [record["status"] for record in records] == ["done", "failed", "done", "out_of_memory", "skipped"]
    assert "the wheel came off" in records[1]["details"]["traceback"]


def test_assert_fails_on_deviations_after_printing(tmp_path):
    status, out, err = run_fake(tmp_path, "--assert")
    assert status == 1
    assert "1 differs; 4 follow" in out
    assert "below: table1-amoebanet / parameters / pipeline-2: 541.0M lies below 541.50M to 542.50M" in err
    assert run_fake(tmp_path)[0] == 0


def test_assert_passes_without_deviations_and_not_without_numbers(tmp_path):
    assert run_fake(tmp_path / "one", "--assert", "--only", "step=1")[0] == 0
    status, _, err = run_fake(tmp_path / "two", "--assert", "--only", "step=1", FAKE_STEP_1="skip")
    assert status == 1
    assert "nothing to assert" in err


def test_results_that_can_not_be_written_are_printed(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    status, out, err = run_fake(tmp_path / "file", "--only", "step=1", "--only", "step=2")
    assert status == 3
    records = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [record["case"]["step"] for record in records] == [1, 2]
    assert "here: 2 follow\n" in out
    assert "fake.jsonl: Not a directory; choose another folder with --results" in err
    assert "error: 2 results could not be written" in err
    assert "Traceback" not in err
    status, out, _ = run_fake(tmp_path / "file", "--only", "step=1", "--json")
    assert (status, len(lines(out))) == (3, 1)


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


def test_an_interrupt_keeps_what_is_finished_and_says_how_to_go_on(tmp_path, gate):
    process = start_at(gate, tmp_path / "results", tmp_path / "log")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "1 finished cases are kept, the same command goes on from there" in err.decode()
    assert "answer" not in out.decode()
    assert "Traceback" not in err.decode()


def until_waiting(process):
    """Reads progress until the run waits for the other one."""
    for line in process.stderr:
        if b"another run is at work on it; waiting" in line:
            return
    pytest.fail("the run ended without waiting")


def test_two_runs_at_once_run_no_case_twice(tmp_path, gate):
    log, results = tmp_path / "log", tmp_path / "results"
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
    assert "| follows " in call("compare", "fake", "--results", tmp_path, "--markdown")[1]


def test_compare_takes_the_latest_profile_or_the_one_asked_for(tmp_path):
    run_fake(tmp_path)
    run_fake(tmp_path, "--profile", "smoke")
    assert "profile smoke, 3 records" in call("compare", "fake", "--results", tmp_path)[1]
    assert (
        "profile short, 5 records" in call("compare", "fake", "--results", tmp_path, "--profile", "short")[1]
    )


def test_compare_warns_where_the_records_come_from_different_surroundings(tmp_path):
    for step in (1, 2):
        Store(tmp_path).append(record(step, environment={"variables": {"OMP_NUM_THREADS": str(step)}}))
    _, _, err = call("compare", "fake", "--results", tmp_path)
    assert "warning: records differ in variables: " in err
    for step, sources in ((3, "old"), (4, "new")):  # other sources of one revision, and other surroundings
        surroundings = {"code_sha256": sources, "variables": {"OMP_NUM_THREADS": str(step)}}
        modelled = metric(provenance="modelled")
        Store(tmp_path / "b").append(record(step, environment=surroundings, metrics=(modelled,)))
        Store(tmp_path / "c").append(record(step, environment={"code_sha256": sources}))
    for folder in ("b", "c"):
        assert call("compare", "fake", "--results", tmp_path / folder)[2] == ""


def test_alone_it_says_in_a_screen_what_there_is_and_what_to_type_first(tmp_path):
    status, out, err = call()
    assert (status, err) == (0, "")
    assert len(out.splitlines()) <= 36
    assert max(map(len, out.splitlines())) <= 100
    assert out.startswith(f"gpipe-bench {gpipe_bench.__version__}: ")
    for line in ("list --machine", "compare table1", "run table1"):
        assert f"\n  gpipe-bench {line} " in out
    for verb, (text, *_) in VERBS.items():
        assert f"\n  {verb:<14}{text}\n" in out, "every verb is in one of the groups"
    assert call("--help")[1].startswith(out.rstrip())
    assert call("--version")[1] == f"gpipe-bench {gpipe_bench.__version__}\n"


@pytest.mark.parametrize(
    ("started", "typed"),
    [
        ("/repo/experiments/__main__.py", "python -m experiments"),
        ("/site-packages/gpipe_bench/experiments/__main__.py", "python -m gpipe_bench.experiments"),
        ("/bin/gpipe-bench", "gpipe-bench"),
        ("/elsewhere/gpipe-bench", "/elsewhere/gpipe-bench"),
        ("{here}/.venv/bin/gpipe-bench", ".venv/bin/gpipe-bench"),
        ("/repo/tests/whoever.py", "gpipe-bench"),
    ],
)
def test_messages_name_the_program_as_it_was_started(tmp_path, monkeypatch, started, typed):
    """By its name where that leads to it, else by its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/python3")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(sys, "argv", [started.format(here=tmp_path)])
    assert program() == typed


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_has_an_example_that_is_understood(verb):
    example = VERBS[verb].example
    assert call(verb, "--help")[1].endswith(f"\nexample:\n  gpipe-bench {example}\n")
    assert parser([verb]).parse_args(example.split()).verb == verb


@pytest.mark.parametrize("name", ["table3", "schedules", "consistency", "plan"])
def test_whoever_has_no_records_is_shown_those_of_the_project_in_a_screen(name, tmp_path, monkeypatch):
    """A hundred columns wide; `--full` is as wide as it is."""
    monkeypatch.chdir(tmp_path)
    status, out, _ = call("compare", name)
    assert status == 0
    assert f"records that came with the project (cpu-2-cores); yours: gpipe-bench run {name}\n" in out
    assert [line for line in out.splitlines() if len(line) > 100] == []
    assert len(out.splitlines()) < 120
    assert "records that came with the project" in call("compare", name, "--json")[2]
    if f"gpipe-bench compare {name} --full" in out:
        assert len(call("compare", name, "--full")[1]) > len(out)


def test_one_machine_is_shown_alone(tmp_path):
    _, out, _ = call("compare", "table1", "--machines", "cpu-2-cores", "--results", tmp_path)
    assert "parameter memory" in out
    assert "came with" not in out


def test_records_of_an_earlier_revision_are_left_out(tmp_path, fake, capsys):
    import fake_experiment

    assert main(["run", "fake", "--device", "cpu", "--results", str(tmp_path)]) == 0
    with pytest.MonkeyPatch.context() as patch:
        from dataclasses import replace

        patch.setattr(fake_experiment, "EXPERIMENT", replace(fake_experiment.EXPERIMENT, revision=2))
        assert main(["compare", "fake", "--results", str(tmp_path)]) == 2
        assert "there are 5 of other profiles or an earlier revision" in capsys.readouterr().err


# Bad usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "fake", "--profile", "huge"], "invalid choice: 'huge'"),
        (["run", "fake", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["run", "fake", "--prof", "short"], "unrecognized arguments"),
        (["run"], "the following arguments are required: NAME"),
        (["--verbose"], "the following arguments are required: VERB"),
    ],
)
def test_what_the_parser_refuses_is_one_line_too(fake, tmp_path, capsys, arguments, words):
    results = ["--results", str(tmp_path)] if len(arguments) > 1 else []
    device = ["--device", "cpu"] if "run" in arguments and "--device" not in arguments else []
    try:
        status = main([*arguments, *results, *device])
    except SystemExit as error:
        status = error.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
    assert not (tmp_path / "fake.jsonl").exists()


def test_a_device_that_is_not_there_is_bad_usage(fake, tmp_path, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["run", "fake", "--device", "cuda", "--results", str(tmp_path)]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err


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


def test_an_experiment_has_the_name_that_the_registry_calls_it_by(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(EXPERIMENTS, "other", "fake_experiment")
    assert main(["run", "other", "--results", str(tmp_path)]) == 2
    assert "'other' of the registry is called 'fake' in fake_experiment; give both" in capsys.readouterr().err


def test_a_mistake_of_an_experiment_is_not_taken_for_bad_usage(fake, tmp_path, monkeypatch):
    import fake_experiment

    def twice(records):
        return fake_experiment.cells(records) * 2

    monkeypatch.setattr(fake_experiment, "EXPERIMENT", replace(fake_experiment.EXPERIMENT, cells=twice))
    with pytest.raises(RuntimeError, match="the cells of fake can't be"):
        main(["run", "fake", "--device", "cpu", "--results", str(tmp_path)])


# Surroundings


def test_help_and_list_start_without_anything_heavy(tmp_path):
    helped = """
for verb in ("", *VERBS):
    try:
        main([*verb.split(), "--help"])
    except SystemExit as error:
        assert error.code == 0
"""
    code = NO_TORCH.replace("import main\n", "import VERBS, main\n").replace("sys.exit(main())", helped)
    status, out, err = finish(start(code=code))
    assert (status, err) == (0, "")
    assert re.findall(r"^usage: gpipe-bench ([a-z-]+) ", out, re.M) == list(VERBS)
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
    (kept,) = Store(tmp_path).load("fake").records
    for step, changes in ((2, {"revision": 0}), (3, {"options": {**kept.options, "seed": 7}})):
        Store(tmp_path).append(replace(kept, case={**kept.case, "step": step}, **changes))
    _, out, _ = call("list", "--results", tmp_path, "--json")
    fake = next(entry for entry in lines(out) if entry["name"] == "fake")
    assert fake["profiles"][1]["on_record"] == 1, "run would reuse neither"


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


def test_the_zoo_is_counted_on_the_meta_device(capsys, monkeypatch):
    """Some of it; tests/models/test_models_counts.py has the numbers of the largest."""
    sizes = [(name, keywords.get("num_layers", 0), keywords) for name, keywords in zoo.CONFIGURATIONS]
    assert {("amoebanet-d", 72), ("transformer-lm", 1663)} <= {(name, depth) for name, depth, _ in sizes}
    monkeypatch.setattr(
        zoo, "CONFIGURATIONS", [(name, keywords) for name, depth, keywords in sizes if depth < 72]
    )
    assert main(["list", "--models", "--json"]) == 0
    counts = {
        json.dumps(row["configuration"]) + row["model"]: row["parameters"]
        for row in lines(capsys.readouterr().out)
    }
    assert {81_785_166, 122_579_097, 557_286_057, 282_178_816, 44_549_160} <= set(counts.values())
    monkeypatch.setattr(zoo, "CONFIGURATIONS", zoo.CONFIGURATIONS[-1:])
    assert main(["list", "--models"]) == 0
    assert "44,549,160" in capsys.readouterr().out


@pytest.mark.parametrize(
    "variables",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
        {"NO_COLOR": "1", "TERM": "dumb"},
    ],
)
def test_locale_and_terminal_do_not_matter(tmp_path, variables):
    results = ("--results", tmp_path / "café")
    run = ("run", "fake", "--device", "cpu", *results)
    commands = (*run, "then", *run, "--fresh", "--json", "then", "compare", "fake", *results)
    status, out, err = finish(start(*commands, code=SEVERAL, FAKE_STEP_2="print", **variables))
    assert status == 0, err
    assert "\x1b" not in out + err
    assert len((tmp_path / "café" / "fake.jsonl").read_text(encoding="utf-8").splitlines()) == 10


# This machine


def test_this_machine_is_found_fit_or_says_what_is_missing(tmp_path):
    status, out, _ = call("list", "--machine", "--results", tmp_path / "new", "--json")
    checks = {check["name"]: check for check in lines(out)}
    assert {"python", "packages", "torch", "processor", "memory", "results", "gpus"} <= set(checks)
    assert status == (1 if any(check["status"] == "missing" for check in checks.values()) else 0)
    assert all(check["remedy"] for check in checks.values() if check["status"] != "ok")
    assert checks["torch"]["status"] == "ok"
    assert not (tmp_path / "new").exists()


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


def test_missing_packages_are_named_and_how_to_get_them(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu, "ask_torch", lambda: "is not asked here")
    monkeypatch.setattr(gpu, "declared", lambda: ["msgspec", "no-such-package"])
    assert main(["list", "--machine", "--results", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"missing +packages +no-such-package\n +-> python -m pip install 'no-such-package'\n", out
    )


def test_an_experiments_name_alone_runs_it(tmp_path):
    assert spelled_out(["table1", "--json"]) == ["run", "table1", "--json"]
    assert spelled_out(["list"]) == ["list"]
    assert spelled_out([]) == []
    assert set(VERBS_TOO) == set(VERBS) & set(EXPERIMENTS)
    status, out, _ = call("fake", "--device", "cpu", "--json", "--results", tmp_path)
    assert (status, len(lines(out))) == (0, 5)

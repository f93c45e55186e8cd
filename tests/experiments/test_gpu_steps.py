"""The steps of a machine with a GPU, taken by small programs in their place on a machine that is said to have
one: what is taken in which order, what is skipped, what is left and what is said about it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import record

from gpipe_bench.experiments import gpu
from gpipe_bench.experiments.commands.cli import parser as cli_parser
from gpipe_bench.experiments.gpu import DONE, FAILED, LACKING, NO_GPU, STEPS, Step, main, of_step, sentences
from gpipe_bench.experiments.registry import load
from gpipe_bench.harness.experiment import RunOptions, only_of, select
from gpipe_bench.harness.record import Metric, Record
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.verdict import Result
from gpipe_bench.models.paper import HALVES

ROOT = Path(__file__).parents[2]
ONE = {
    "version": "2.11.0", "cuda": "13.0", "gpus": ["Fake H100, 80 GiB"], "gib": 79.6, "distributed": True,
    "threads": 1,
}  # fmt: skip
NONE = {**ONE, "gpus": [], "gib": 0.0}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for results, on a machine with one GPU."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu, "STATE", tmp_path)
    monkeypatch.setattr(gpu, "ask_torch", lambda: ONE)
    monkeypatch.setattr(gpu, "of_step", lambda words, records: ["what it found"])
    return tmp_path


def step(name: str, code: str, minutes: float = 1, gib: float = 1, gpus: int = 1) -> Step:
    return Step(name, minutes, gib, code, f"what {name} gives", gpus)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_commands_are_taken_in_turn_and_the_next_call_goes_on(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed one holds up nobody; one that a signal ended is begun again; one whose longest case has no
    time left is not begun, and shorter ones behind it are.
    """
    monkeypatch.setattr(gpu, "command", lambda step, *_: python(step.arguments))
    killed = "import os; os.kill(os.getpid(), 9)"
    write = f"open(r'{out}/{{}}', 'a').write('.')".format
    steps = [
        step("fails", f"{write('fails')}; raise SystemExit(5)"), step("killed", killed),
        step("large", "", gib=100), step("many", "", gpus=2), step("long", write("long"), minutes=100),
        step("works", write("works")),
    ]  # fmt: skip
    monkeypatch.setattr(gpu, "STEPS", steps)
    assert main([]) == FAILED
    said = capsys.readouterr().out
    assert "fails: exit status 5" in said
    assert "== works: what it found\n" in said
    assert "large: skipped: needs 100 GiB" in said
    assert "many: skipped: needs 2 GPUs" in said
    assert "long: left for the next call" in said
    assert (out / "ended.txt").read_text().split() == ["fails", "works"]
    steps[1] = step("killed", write("killed"))
    assert main([]) == DONE
    assert "fails: ended before" in capsys.readouterr().out
    assert main(["fails"]) == FAILED  # by its name, whatever ended before
    with pytest.raises(SystemExit):
        main(["fials"])
    Store(out / "records").append(record(experiment="table1"))
    assert main(["--minutes", "0"]) == DONE  # the first one that is left, whatever it takes
    assert [len((out / name).read_text()) for name in ("fails", "killed", "works", "long")] == [2, 1, 1, 1]
    assert Store(out / "records.jsonl").load("table1") == Store(out / "records").load("table1")
    # Tiny models, for which nothing has ended.
    assert main(["--profile", "smoke", "--minutes", "0"]) == FAILED
    assert (out / "smoke" / "ended.txt").read_text().split() == ["fails"]


def test_a_command_is_interrupted_when_the_time_is_over(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by a keyboard, so that it can keep what it has; it goes on in the next call."""
    monkeypatch.setattr(gpu, "command", lambda step, *_: python(step.arguments))
    waits = f"""
import os
import signal
import time
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
try:
    os.mkdir(r'{out}/begun')  # not a file: an interrupt while one is finalized is swallowed
    time.sleep(60)
except KeyboardInterrupt:
    open(r'{out}/kept', 'w').write('all')
"""

    class Over(subprocess.Popen[bytes]):
        """Its time is over as soon as it waits."""

        def wait(self, timeout: float | None = None) -> int:
            if not (out / "begun").exists():
                while not (out / "begun").exists():
                    time.sleep(0.01)
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            return super().wait(timeout)

    monkeypatch.setattr("subprocess.Popen", Over)
    monkeypatch.setattr(gpu, "STEPS", [step("waits", waits), step("never", "raise SystemExit(1)")])
    assert main([]) == DONE
    assert capsys.readouterr().out.endswith("waits: the time is over; the next call goes on\n")
    assert (out / "kept").read_text() == "all"
    assert not (out / "ended.txt").exists()


@pytest.mark.parametrize("answer", [NONE, {**NONE, "cuda": None}, "No module named 'torch'"])
def test_without_a_gpu_there_is_one_clear_line(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Any
) -> None:
    monkeypatch.setattr(gpu, "ask_torch", lambda: answer)
    assert main([]) == NO_GPU
    said, error = capsys.readouterr()
    assert (said, error.count("\n"), list(out.iterdir())) == ("", 1, [])
    assert error.startswith("error: torch")


def test_finding_out_what_is_missing_needs_nothing() -> None:
    """From the shell, without any package: python -S has the standard library alone."""
    found = subprocess.run(
        [sys.executable, "-S", "-m", "gpipe_bench.experiments.gpu"], cwd=ROOT, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (LACKING, "", 1)
    assert found.stderr.startswith("error: missing: torch, ")
    assert "python -m pip install 'torch>=2.11' " in found.stderr


@pytest.mark.parametrize("profile", ["smoke", "full"])
def test_every_command_fits_into_a_call_and_names_cases_that_there_are(profile: str, tmp_path: Path) -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert 0 < step.minutes <= 9
        words = gpu.command(step, tmp_path, profile)
        if "pytest" in words:
            continue
        options = cli_parser(["run"]).parse_args(words[3:])
        experiment = load(options.name)
        cases = experiment.cases(RunOptions(profile=options.profile, device=options.device))
        assert select(cases, only_of(options.only))
        assert options.results == tmp_path
    memory = {step.name: step.memory_gib for step in STEPS}
    assert memory["baseline"] == max(half.cap_gib for half in HALVES.values())


# What a step says at its end, on made-up records


GIB = 2**30


def measured(name: str, value: float | None, unit: str = "ratio") -> Metric:
    return Metric(name, value, unit, "measured")


def done(*metrics: Metric, details: Any = None, **case: Any) -> Record:
    return record(case=case, metrics=metrics, details=details or {})


def lost(reason: str, status: str = "skipped", **case: Any) -> Record:
    return record(case=case, status=status, reason=reason, metrics=(), details={})


def peaks(column: str, found: float | None, modelled: float) -> Record:
    size = None if found is None else found * GIB
    return done(
        measured("measured peak", size, "bytes"),
        Metric("modelled peak", modelled * GIB, "bytes", "modelled"),
        details={"fits": found is not None}, part="device", half="amoebanet", column=column,
        precision="float32",
    )  # fmt: skip


OUT = {"cells": {"naive-1": {"out_of_memory": "CUDA out of memory"}, "pipeline-1": {"out_of_memory": ""}}}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (
            [peaks("naive-1", None, 33.06), peaks("pipeline-1", 5.42, 5.34)],
            ["amoebanet in float32 under 8 GiB: naive-1 does not fit (33.06 GiB modelled), pipeline-1 fits "
             "(5.42 GiB measured); the paper: all of these fit"],
        ),
        ([lost("KeyError: 3", "failed", model="amoebanet")], ["model=amoebanet: failed: KeyError: 3"]),
    ],
)  # fmt: skip
def test_a_step_says_what_it_found_beside_the_paper_and_why_what_is_missing_did_not_run(
    records: list[Record], said: list[str]
) -> None:
    assert list(sentences(records)) == said


def test_numbers_beside_the_papers_are_counted_and_what_found_no_room_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = done(details=OUT, model="transformer", batch="fixed")
    results = [
        Result(
            table="table2-transformer", row=row, column="K=2", metric=measured("throughput", value),
            record=ran,
        )
        for row, value in (("M=1", 1.1), ("M=4", 1.7 * 1.3))
    ]  # fmt: skip
    monkeypatch.setattr(
        "gpipe_bench.experiments.registry.load", lambda name: SimpleNamespace(cells=lambda records: results)
    )
    fell = Metric("control", 0.8, "ratio", "replayed", low=0.79, high=0.81)
    also = done(fell, part="replay error", model="transformer")
    assert list(sentences([ran, also])) == [
        "model=transformer batch=fixed: naive-1 did not run: CUDA out of memory",
        "part=replay error model=transformer: void: the control is 0.800 [0.790, 0.810], not 1: the machine "
        "changed while it measured; measure again", "2 cases are done",
        "2 numbers stand beside the paper's, half of them within 20 % of it",
    ]  # fmt: skip


def test_the_lines_are_about_the_steps_own_cases_as_they_are_now(tmp_path: Path) -> None:
    """Cases of another step of the experiment and older records of a case are left out."""
    store = Store(tmp_path)
    case = {"part": "device", "half": "amoebanet", "precision": "float32"}
    for column, reason in (("naive-1", "before"), ("naive-1", "now"), ("pipeline-2", "another step's")):
        store.append(
            record(experiment="table1", case={**case, "column": column}, status="skipped", reason=reason,
                   metrics=(), details={})
        )  # fmt: skip
    (line,) = of_step(["table1", "--only", "part=device", "--only", "column=naive-1"], tmp_path)
    assert line.endswith("skipped: now")
    assert of_step(["table2"], tmp_path) == ["no case has ended"]

"""The steps of a machine with a GPU, taken by small programs in their place on a machine that is said to have
one: what is taken in which order, what is skipped, what is left and what is said about it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from records import record

from gpipe_bench.experiments import gpu
from gpipe_bench.experiments.commands.cli import main as cli
from gpipe_bench.experiments.gpu import DONE, LACKING, NO_GPU, STEP_FAILED, STEPS, Step, main
from gpipe_bench.experiments.registry import load
from gpipe_bench.harness.experiment import RunOptions, select
from gpipe_bench.harness.store import Store
from gpipe_bench.models.paper import HALVES

ROOT = Path(__file__).parents[1]
ONE = {
    "version": "2.11.0", "cuda": "13.0", "gpus": ["Fake H100, 80 GiB"], "gib": 79.6, "distributed": True,
    "threads": 1,
}  # fmt: skip
NONE = {**ONE, "gpus": [], "gib": 0.0}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for results, on a machine with one GPU."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu, "ask_torch", lambda: ONE)
    return tmp_path


def step(name: str, code: str, minutes: float = 1, gib: float = 1, packages: tuple[str, ...] = ()) -> Step:
    return Step(name, minutes, gib, ("-S", "-c", code), f"what {name} gives", packages)


def test_steps_are_taken_in_turn_and_the_next_call_goes_on(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed one holds up nobody; one that a signal ended is begun again; one too long for what is left of
    the minutes is left, unless it is the first.
    """
    interrupted = "import os; print('begun', flush=True); os.kill(os.getpid(), 9)"
    records = "{records}"
    steps = [
        step("fails", "raise SystemExit(5)"), step("killed", interrupted), step("large", "", gib=100),
        step("lacks", "", packages=("no-such-package>=1.2",)), step("works", f"print(r'''{records}''')"),
        step("long", "print('at last')", minutes=100), step("never", ""),
    ]  # fmt: skip
    monkeypatch.setattr(gpu, "STEPS", steps)
    assert main([]) == STEP_FAILED
    said = capsys.readouterr().out
    assert "fails: exit status 5" in said
    assert "large: skipped: needs 100 GiB" in said
    assert "lacks: skipped: needs no-such-package: python -m pip install 'no-such-package>=1.2'" in said
    assert said.endswith("long: left for the next call, which goes on here\n")
    assert sorted(path.name for path in out.iterdir()) == ["fails.txt", "killed.part", "records", "works.txt"]
    assert (out / "works.txt").read_text() == f"{out / 'records'}\n"
    steps[1] = step("killed", "print('whole')")
    assert main([]) == DONE
    said = capsys.readouterr().out
    assert "fails: ended before" in said
    assert "== killed" in said
    assert "== works" not in said
    assert main(["fails"]) == STEP_FAILED  # by its name, whatever ended before
    with pytest.raises(SystemExit):
        main(["fials"])
    Store(out / "records").append(record(experiment="table1"))
    assert main(["--minutes", "0"]) == DONE
    assert (out / "long.txt").read_text() == "at last\n"
    assert zipfile.is_zipfile(out / "records.zip")


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


@pytest.mark.parametrize(
    ("version", "requirement", "fits"),
    [
        ("2.11.0", "p>=2.11", True),
        ("2.9", "p>=2.11", False),
        ("2", "p>=2.0,<3", True),
        ("0.19.0+cu130", "p>=0.19", True),
        ("1.0rc1", "p", True),
    ],
)
def test_versions_are_compared_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch, version: str, requirement: str, fits: bool
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert (gpu.absent([requirement]) == []) == fits


def test_every_step_fits_into_a_call_and_names_cases_that_there_are() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert 0 < step.minutes <= 9
        if step.command[2] != "run":
            continue
        only = [word.split("=") for word in step.command if "=" in word]
        cases = load(step.command[3]).cases(RunOptions(profile="full", device="cuda"))
        assert select(cases, {key: (value,) for key, value in only})
    memory = {step.name: step.memory_gib for step in STEPS}
    assert memory["table1-amoebanet"] == HALVES["amoebanet"].cap_gib
    assert memory["table1-transformer"] == HALVES["transformer"].cap_gib


def test_the_doctor_says_what_would_run_and_what_it_takes(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "ask_torch", lambda: {**ONE, "gib": 24.0})
    assert cli(["doctor", "--device", "cuda", "--results", str(out), "--json"]) == 0
    checks = {each["name"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    steps = [name.removeprefix("step ") for name in checks if name.startswith("step ")]
    assert steps == [step.name for step in STEPS]
    assert checks["gpus"]["found"] == "1 x Fake H100, 80 GiB"
    fits, does_not = checks["step table1-amoebanet"], checks["step table2-transformer"]
    assert (fits["status"], fits["found"]) == ("ok", "at most 5 min and 8 GiB of a GPU (modelled)")
    assert (does_not["status"], does_not["remedy"]) == ("optional", "needs 54 GiB (modelled)")
    monkeypatch.setattr(gpu, "ask_torch", lambda: NONE)
    assert cli(["doctor", "--device", "cuda", "--results", str(out)]) == 1
    assert "missing: gpus" in capsys.readouterr().out

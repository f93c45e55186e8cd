"""The steps of a machine with a GPU, taken by small programs in their place on a machine that is said to have
one: what is taken in which order, what is skipped, what is left and what is said about it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from records import record

from gpipe_bench.experiments import gpu
from gpipe_bench.experiments.commands.cli import parser as cli_parser
from gpipe_bench.experiments.gpu import DONE, FAILED, LACKING, NO_GPU, STEPS, Step, main
from gpipe_bench.experiments.registry import load
from gpipe_bench.harness.experiment import RunOptions, select
from gpipe_bench.harness.store import Store
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
    monkeypatch.setattr(gpu, "_results", lambda step, records: [f"what {step.name} found"])
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
    assert "== works: what works found\n" in said
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
        only: dict[str, tuple[str, ...]] = {}
        for text in options.only:
            key, _, value = text.partition("=")
            only[key] = (*only.get(key, ()), value)
        experiment = load(options.name)
        cases = experiment.cases(RunOptions(profile=options.profile, device=options.device))
        assert select(cases, only)
        assert options.results == tmp_path
    memory = {step.name: step.memory_gib for step in STEPS}
    assert memory["baseline"] == max(half.cap_gib for half in HALVES.values())

"""The steps of a machine with a GPU, taken with faked devices and faked programs: what is taken in which
order, what is remembered, what is missing and what is said about it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_bench.experiments.commands import doctor
from gpipe_bench.experiments.commands.cli import main as cli
from gpipe_bench.experiments.gpu import bitwise, nccl_alone, packages, run
from gpipe_bench.experiments.gpu.device import Gpu
from gpipe_bench.experiments.gpu.plan import plan
from gpipe_bench.experiments.gpu.results import ARCHIVE, Results, Taken
from gpipe_bench.experiments.gpu.run import DONE, LACKING, NO_GPU, STEP_FAILED, Machine, main
from gpipe_bench.experiments.gpu.steps import STEPS, find
from gpipe_bench.experiments.paper_models import HALVES
from gpipe_bench.experiments.registry import load
from gpipe_bench.harness.experiment import RunOptions, select

ROOT = Path(__file__).parents[1]
ONE = {
    "version": "2.11.0", "cuda": "13.0", "gpus": ["Fake H100"], "bytes": [80 * 2**30], "distributed": True,
    "threads": 1,
}  # fmt: skip
NONE = {**ONE, "gpus": [], "bytes": []}


@dataclass
class Fake:
    """A machine whose programs only note that they were started; a step takes its upper estimate."""

    answer: dict[str, Any] | str = field(default_factory=lambda: dict(ONE))
    fails: Mapping[str, int | None] = field(default_factory=dict)
    path: tuple[str, ...] | None = None
    now_s: float = 0.0
    taken: list[str] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def execute(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], limit_s: float
    ) -> Any:
        name = log.stem
        self.taken.append(name)
        self.commands.append(list(command))
        self.now_s += min(60 * find(name).minutes[1], limit_s)
        log.write_text(f"{name} was here\n")
        if "--results" in command:
            records = Path(command[command.index("--results") + 1])
            with (records / f"{name.partition('-')[0]}.jsonl").open("a") as file:
                file.write(f'{{"case": "{name}"}}\n')
        return self.fails.get(name, 0)

    def machine(self) -> Machine:
        def ask(environment: Mapping[str, str]) -> Any:
            self.asked.append(environment.get("PYTHONPATH", ""))
            return self.answer

        return Machine(ask, self.execute, lambda: self.now_s, self.path)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results go to an empty folder, and none of this checkout's own are found."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path


NAMES = [step.name for step in STEPS]


def test_calls_of_ten_minutes_walk_through_all_steps_each_with_an_empty_folder(places: Path) -> None:
    """As on a machine that gives every call a new folder, whose archive is carried to the next."""
    fake, archives = Fake(), []
    for call in range(20):
        out = places / f"out-{call}"
        os.environ["OUT"] = str(out)
        before = len(fake.taken)
        start_s = fake.now_s
        assert main([word for each in archives for word in ("--earlier", str(each))], fake.machine()) == DONE
        assert [path.name for path in out.iterdir()] == [ARCHIVE]  # one file, and no part of another
        assert fake.now_s - start_s <= 600
        archives = [out / ARCHIVE]
        if len(fake.taken) == before:
            break
    assert fake.taken == NAMES  # in their order, none twice
    with tarfile.open(archives[0]) as file:
        names = set(file.getnames())
        records = file.extractfile("records/table2.jsonl")
        assert records is not None
        lines = [json.loads(line)["case"] for line in records]
    assert lines == [name for name in NAMES if name.startswith("table2")]
    assert {f"logs/{name}.txt" for name in NAMES} <= names


def test_a_folder_that_stays_is_earlier_results_by_itself(places: Path) -> None:
    fake = Fake()
    assert main(["--budget-s", "100"], fake.machine()) == DONE
    assert main(["--budget-s", "100"], fake.machine()) == DONE
    assert fake.taken == NAMES[: len(fake.taken)]
    assert len(fake.taken) > 1


def test_a_step_by_its_name_is_taken_again(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake()
    for _ in range(2):
        assert main(["bitwise"], fake.machine()) == DONE
    assert fake.taken == ["bitwise", "bitwise"]
    assert main(["bitwize"], fake.machine()) == run.BAD_USAGE
    assert "did you mean 'bitwise'" in capsys.readouterr().err


def test_a_failed_step_does_not_hold_up_the_others_and_a_cut_one_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = Fake(fails={"tests": 1, "table1-amoebanet": None})
    assert (
        main(["tests", "table1-amoebanet", "table3-amoebanet", "--budget-s", "1e4"], fake.machine())
        == STEP_FAILED
    )
    assert "exit status 1" in capsys.readouterr().out
    fake.fails = {}
    fake.taken.clear()
    main(["--budget-s", "100000"], fake.machine())
    assert fake.taken == [name for name in NAMES if name not in ("tests", "table3-amoebanet")]


def test_the_archive_is_written_after_every_step(places: Path) -> None:
    """A call that is ended from outside costs the step that it was in."""
    fake = Fake()

    def killed(*arguments: Any) -> Any:
        if len(fake.taken) == 2:
            raise KeyboardInterrupt
        return Fake.execute(fake, *arguments)

    fake.execute = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        main([], fake.machine())
    results = Results(places / "look")
    results.read([places / "out"])
    assert list(results.taken()) == sorted(NAMES[:2])


def test_an_archive_cut_off_on_its_way_is_as_none(places: Path) -> None:
    fake = Fake()
    main(["doctor"], fake.machine())
    archive = places / "out" / ARCHIVE
    archive.write_bytes(archive.read_bytes()[:-40])
    main(["--budget-s", "1"], fake.machine())
    assert fake.taken == ["doctor", "doctor"]


def test_results_of_two_machines_are_joined(places: Path) -> None:
    folders = [places / "a", places / "b"]
    for folder, at, line in zip(
        folders, ("2026-01-02", "2026-01-01"), (b'{"x": 2}\n', b'{"x": 1}\n'), strict=True
    ):
        each = Results(folder)
        each.add(Taken("tests", "done" if at.endswith("2") else "failed", 1.0, 0, "GPU", at))
        (each.records / "table1.jsonl").write_bytes(b'{"x": 0}\n' + line)
    joined = Results(places / "joined")
    joined.read(folders)
    assert joined.taken()["tests"].status == "done"
    assert joined.records.joinpath("table1.jsonl").read_text().split() == [
        '{"x":', "0}", '{"x":', "2}", '{"x":', "1}",
    ]  # fmt: skip


# What a machine lacks


@pytest.mark.parametrize("answer", [NONE, {**NONE, "cuda": None}, "No module named 'torch'"])
def test_without_a_gpu_there_is_one_clear_line(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(answer)
    assert main([], fake.machine()) == NO_GPU
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), fake.taken) == ("", 1, [])
    assert err.startswith("error: torch")
    assert "--rehearse" in err


def test_here_it_ends_with_that_line() -> None:
    """The real thing, from the shell."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU and would begin")
    found = subprocess.run(
        [ROOT / ".ci" / "gpu"], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert found.returncode == NO_GPU
    assert (found.stdout, found.stderr.count("\n")) == ("", 1)
    assert "sees no GPU here" in found.stderr


def test_a_missing_package_is_named_with_how_to_carry_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "declared", lambda: ["torch>=2.11", "no-such-package>=1.2"])
    fake = Fake()
    assert main([], fake.machine()) == LACKING
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "missing: no-such-package;" in err
    assert "pip download --no-deps" in err
    assert "'no-such-package>=1.2'" in err
    assert fake.taken == []


def test_carried_wheels_are_installed_for_the_steps_and_only_those_that_are_missing(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = places / "wheels"
    wheels.mkdir()
    _wheel(wheels, "no_such_package", "1.3")
    _wheel(wheels, "numpy", "0.1")  # would break what is there
    monkeypatch.setattr(packages, "declared", lambda: ["numpy", "no-such-package>=1.2"])
    fake = Fake()
    assert main(["doctor", "--wheels", str(wheels)], fake.machine()) == DONE
    assert fake.asked[0].split(os.pathsep)[0].endswith("site")
    assert [path.name for path in packages.wheels_for(["no.such_Package>=1"], wheels)] == [
        "no_such_package-1.3-py3-none-any.whl"
    ]


def test_a_carried_wheel_that_is_too_old_is_as_none(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _wheel(places, "no_such_package", "1.1")
    monkeypatch.setattr(packages, "declared", lambda: ["no-such-package>=1.2"])
    assert main(["doctor", "--wheels", str(places)], Fake().machine()) == LACKING
    assert "missing: no-such-package" in capsys.readouterr().err


def _wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("version", "requirement", "fits"),
    [
        ("2.11.0", "p>=2.11", True),
        ("2.9", "p>=2.11", False),
        ("0.19.0+cu130", "p>=0.19", True),
        ("1.0rc1", "p", True),
    ],
)
def test_versions_are_compared_by_their_numbers(
    places: Path, version: str, requirement: str, fits: bool
) -> None:
    info = places / f"p-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: p\nVersion: {version}\n")
    assert (packages.absent([requirement], (str(places),)) == []) == fits


def test_finding_out_what_is_missing_needs_nothing() -> None:
    """Without any package: python -S has the standard library alone."""
    code = "import gpipe_bench.experiments.gpu.run as r; r.main(['--list', '--rehearse'])"
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "missing: torch" in found.stdout
    assert "table1-transformer" in found.stdout


# What is planned


def test_small_devices_and_missing_tools_skip_steps_with_the_reason() -> None:
    small = {each.step.name: each for each in plan([Gpu("Small", 24 * 2**30)], {}, path=())}
    assert (
        small["table2-transformer"]
        .describe()
        .startswith("skipped: needs 54 GiB (modelled), Small has 24; elsewhere 4 to 9 min")
    )
    assert small["tests"].lacks == "needs pytest, hypothesis, pytest-benchmark"
    assert small["bitwise"].is_next
    assert not any(each.is_next for each in plan([], {}))
    assert plan([], {})[0].lacks == "needs 1 GPU, torch sees none"


def test_skipped_steps_are_in_the_results(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake({**ONE, "bytes": [24 * 2**30]})
    assert main(["--budget-s", "100000"], fake.machine()) == DONE
    assert "table2-transformer: skipped: needs 54 GiB" in capsys.readouterr().out
    results = Results(places / "look")
    results.read([places / "out"])
    assert results.taken()["table2-transformer"].status == "skipped"
    larger = Fake()
    main(["--budget-s", "100000"], larger.machine())
    assert "table2-transformer" in larger.taken  # a larger device makes up for it


def test_a_rehearsal_is_not_taken_for_the_real_thing(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(NONE)
    assert main(["--rehearse", "--budget-s", "1e9"], fake.machine()) == DONE
    assert fake.taken == NAMES
    assert not any("cuda" in command or "full" in command for command in fake.commands)
    real = Fake()
    main(["--budget-s", "1e9"], real.machine())
    assert real.taken == NAMES
    assert "all steps have been taken" in capsys.readouterr().out


def test_every_step_fits_into_ten_minutes_and_names_cases_that_there_are() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for step in STEPS:
        assert 0 < step.minutes[0] <= step.minutes[1] <= run.BUDGET_S / 60
        for command, device in ((step.command, "cuda"), (step.rehearsal, "cpu")):
            if command[2] != "run":
                continue
            words = list(command)
            profile = words[words.index("--profile") + 1]
            only: dict[str, tuple[str, ...]] = {}
            for at, word in enumerate(words):
                if word == "--only":
                    key, _, value = words[at + 1].partition("=")
                    only[key] = (value,)
            options = RunOptions(profile=profile, device=device)
            assert select(load(words[3]).cases(options), only)
    assert find("table1-amoebanet").memory_gib == HALVES["amoebanet"].cap_gib
    assert find("table1-transformer").memory_gib == HALVES["transformer"].cap_gib


def test_the_doctor_says_what_would_run_and_what_it_takes(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_ask_torch", lambda: ONE)
    main(["bitwise"], Fake().machine())
    capsys.readouterr()
    assert cli(["doctor", "--device", "cuda", "--results", str(places / "out"), "--json"]) == 0
    checks = {each["name"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert [name for name in checks if name.startswith("step ")] == [f"step {name}" for name in NAMES]
    assert checks["gpus"]["found"] == "1 x Fake H100, 80 GiB"
    assert checks["step bitwise"]["found"].startswith("done in 120 s on Fake H100")
    assert checks["step table1-amoebanet"]["found"] == "1.5 to 5 min and 8 GiB of 1 GPU (modelled)"
    monkeypatch.setattr(doctor, "_ask_torch", lambda: NONE)
    assert cli(["doctor", "--device", "cuda", "--results", str(places)]) == 1
    out = capsys.readouterr().out
    assert "skipped: needs 1 GPU, torch sees none; elsewhere 1.5 to 5 min and 8 GiB" in out
    assert "missing: gpus" in out


# The programs of the steps


def test_a_program_that_outlasts_its_time_is_told_to_end(places: Path, capfdbinary: Any) -> None:
    waits = "import time; print('begun', flush=True); time.sleep(600)"
    log = places / "log.txt"
    environment = dict(os.environ)
    assert run.execute(["-S", "-c", waits], log, environment, 3.0) is None  # begins within milliseconds
    assert log.read_text() == "begun\n"
    assert b"begun" in capfdbinary.readouterr().out
    assert run.execute(["-c", "raise SystemExit(3)"], log, environment, 60.0) == 3


class Loopback:
    """A backend of one rank with NCCL's rule: to send to itself it must have a receive in the same group."""

    def __init__(self, name: str = "nccl", gain: float = 1.0) -> None:
        self._name, self._gain, self.aborted = name, gain, False
        self._sent: list[torch.Tensor] = []
        self._wanted: list[torch.Tensor] = []

    def name(self) -> str:
        return self._name

    def _start_coalescing(self) -> None:
        self._sent, self._wanted = [], []

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> None:
        self._sent += tensors

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> None:
        self._wanted += tensors

    def _end_coalescing(self) -> None:
        for sent, wanted in zip(self._sent, self._wanted, strict=True):
            wanted.copy_(sent * self._gain)

    def abort(self) -> None:
        self.aborted = True


def test_one_rank_alone_checks_what_the_engine_asks_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_alone, "SIZES", (3, 8))
    good = Loopback()
    assert nccl_alone.check(good, torch.device("cpu")) == []
    assert good.aborted
    assert len(nccl_alone.check(Loopback("gloo", 2.0), torch.device("cpu"))) == 3


def test_different_bits_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = torch.device("cpu")
    assert bitwise.check(cpu, ["transformer-lm"], (1, 2)) == []
    real = bitwise.Pipeline

    def seeded_by_stages(model: Any, *, num_stages: int, **more: Any) -> Any:
        return real(model, num_stages=num_stages, seed=num_stages, **more)

    monkeypatch.setattr(bitwise, "Pipeline", seeded_by_stages)
    assert len(bitwise.check(cpu, ["transformer-lm"], (1, 2))) == 4
    assert capsys.readouterr().out.count("DIFFERENT") == 4

"""Engines under test: naming one, what each does, and what the conformance suite says.

Engines that raise, hang, die or are wrong are named with their error, and nobody else's results are lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from command_line import call, lines
from planted_engines import OVER_PROCESSES, PLANTED, RIGHT
from torch import Tensor, nn

from gpipe_bench.experiments.beyond import engine_turns
from gpipe_bench.experiments.beyond.trainings import ALWAYS, WORKLOADS
from gpipe_bench.experiments.engines import trials
from gpipe_bench.experiments.engines.cases import BASE, CASES, GROUPS
from gpipe_bench.experiments.engines.checks import gradient_error, named_parameters, verify
from gpipe_bench.experiments.engines.setup import Setup, pinned, resolve
from gpipe_bench.experiments.engines.trials import Row, are_right, examine, faults, in_place, settled
from gpipe_bench.experiments.registry import ENGINES

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EXAMPLE = "own_engine:FillDrain"
CPU = torch.device("cpu")
mse = nn.functional.mse_loss


def setup_of(num_microbatches: int = 4, remat: str = "never", **more: Any) -> Setup:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).double() for _ in range(5)]
    return Setup(layers, (range(0, 2), range(2, 5)), num_microbatches, remat, CPU, **more)


def data(size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (size, 4)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes a module into the working directory, as a user would; it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    names = []

    def write(name: str, text: str) -> None:
        names.append(name)
        (tmp_path / f"{name}.py").write_text(text)

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def examples_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", sys.path.copy())


# Names


@pytest.mark.parametrize("name", ENGINES)
def test_known_engines_resolve_and_keep_their_names(name: str) -> None:
    assert callable(resolve(name))
    assert pinned(name) == name


def test_a_module_that_cannot_be_imported_is_told_apart_from_one_that_is_not_there(user_module) -> None:
    user_module("lacks_a_package", "import no_such_package\n")
    with pytest.raises(
        ValueError,
        match="engine 'lacks_a_package:Engine': importing lacks_a_package needs 'no_such_package',",
    ):
        resolve("lacks_a_package:Engine")
    user_module("fails_on_import", "1 / 0\n")
    with pytest.raises(
        ValueError, match="'fails_on_import:Engine': importing fails_on_import failed with ZeroDivisionError:"
    ):
        resolve("fails_on_import:Engine")


def test_the_users_engine_is_found_in_the_working_directory_and_pinned_to_its_content(user_module) -> None:
    user_module("users_own", "class Outer:\n    class Engine: pass\n")
    assert resolve("users_own:Outer.Engine").__name__ == "Engine"
    first = pinned("users_own:Outer.Engine")
    assert first.startswith("users_own:Outer.Engine@")
    assert resolve(first) is resolve("users_own:Outer.Engine")
    user_module("users_own", "class Outer:\n    class Engine: changed = True\n")
    assert pinned("users_own:Outer.Engine") != first


# What engines do, in this process


def in_process(name: str) -> Any:
    if name == "torchgpipe":
        pytest.importorskip("torchgpipe", reason="the optional extra `peers` is not installed")
    return resolve(name)


@pytest.mark.usefixtures("examples_folder")
@pytest.mark.parametrize("name", ["ours", "ours-1f1b", "torchgpipe", EXAMPLE])
@pytest.mark.parametrize("remat", ["never", "except_last", "always"])
def test_engines_in_one_process_do_what_the_setup_says(name: str, remat: str) -> None:
    setup = setup_of(remat=remat)
    engine = in_process(name)(setup)
    found = verify(name, engine, setup, *data(), mse)
    forwards = {"never": 4, "except_last": 7, "always": 8}[remat]
    assert (found["forwards"], found["backwards"], found["examples"]) == (forwards, 4, 2)
    assert found["gradient error"] < 1e-12
    assert all(parameter.grad is None for parameter in named_parameters(setup).values())
    loss = engine.step(*data(), mse)
    assert float(loss) == pytest.approx(mse(nn.Sequential(*setup.layers)(data()[0]), data()[1]).item())


# Engines that do something else


def test_a_parameter_whose_gradient_vanishes_is_compared_with_the_others() -> None:
    """Rounding is all that some gradients are made of, such as that of a bias before a normalization."""
    expected = {"a": torch.tensor([1.0]), "b": torch.tensor([1e-9])}
    assert gradient_error({"a": torch.tensor([1.0]), "b": torch.tensor([-1e-9])}, expected, "it") < 1e-5
    with pytest.raises(RuntimeError, match="the gradients of it are wrong:"):
        gradient_error({"a": torch.tensor([1.0]), "b": torch.tensor([1e-5])}, expected, "it")
    with pytest.raises(RuntimeError, match="the gradients of it are wrong:"):
        gradient_error({"a": torch.tensor([float("nan")]), "b": torch.tensor([0.0])}, expected, "it")


def conformance(folder: Path, *options: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    """Runs them in a folder, in which engines are found."""
    paths = (ROOT, ROOT / "tests" / "support", folder)
    command = [sys.executable, "-m", "pytest", "--pyargs", "gpipe_bench.conformance"]
    command += ["-p", "gpipe_bench.conformance.options", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *options], cwd=folder, input=typed, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )  # fmt: skip


def test_chosen_cases_are_tests_in_pytests_own_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    asked = ["--engine", "planted_engines:sums", "-k", "summed or returned", "--junitxml", str(report)]
    done = conformance(tmp_path, *asked)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed, 2 skipped" in done.stdout
    cases = {case.attrib["name"]: case for case in ElementTree.parse(report).iter("testcase")}
    assert {*cases} == {
        f"test_engine[{case}-{place}]"
        for case in ("summed loss", "returned loss")
        for place in ("one process", "two processes")
    }
    failure = cases["test_engine[summed loss-one process]"].find("failure")
    assert failure is not None
    said = failure.attrib["message"]
    assert "failed: every gradient is 4 times that of the mean loss over the mini-batch" in said
    assert "in training: the learning rate is off by a factor" in said
    skipped = cases["test_engine[summed loss-two processes]"].find("skipped")
    assert skipped is not None
    assert skipped.attrib["message"].startswith("its step can't be asked: all stages in one process, in line")


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ((), 0, "skipped"),
        (("--engine", "nowhere:Engine"), 4, "engine 'nowhere:Engine': no module 'nowhere'"),
    ],
)
def test_without_an_engine_nothing_is_asked(
    tmp_path: Path, options: tuple[str, ...], status: int, said: str
) -> None:
    done = conformance(tmp_path, *options)
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    assert "passed" not in done.stdout


# Engines with mistakes

SCENE = """
import os
import time

from own_engine import FillDrain


class Good(FillDrain):
    pass


class Raises(FillDrain):
    def step(self, batch, target, loss_fn):
        raise RuntimeError("boom of the engine\\nand more of it")


class Hangs(FillDrain):
    def step(self, batch, target, loss_fn):
        while True:
            time.sleep(0.05)


class Wrong(FillDrain):
    def step(self, batch, target, loss_fn):
        return super().step(batch, target, lambda output, wanted: loss_fn(output, wanted) * self.count)


class Picky(FillDrain):
    def step(self, batch, target, loss_fn):
        raise ValueError("no batch is good enough")


class Dies(FillDrain):
    def step(self, batch, target, loss_fn):
        os._exit(7)


class Empty:
    def __init__(self, setup):
        pass


class Refuses:
    def __init__(self, setup):
        raise ValueError("needs another kind of computer")

    def step(self, batch, target, loss_fn):
        pass
"""


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scene_engines.py").write_text(SCENE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), str(tmp_path), *sys.path])
    return tmp_path


def check(name: str, *options: str) -> tuple[int, str, dict[str, str]]:
    """Exit status, what is said first, and the verdict of every case in the last place."""
    status, out, err = call("check-engine", f"scene_engines:{name}", "--json", *options)
    return status, err.strip(), {row["case"]: row["verdict"] for row in lines(out)}


def only(monkeypatch: pytest.MonkeyPatch, *places: str) -> None:
    kept = {place: trials.PLACES[place] for place in places}
    monkeypatch.setattr(trials, "PLACES", kept)


def in_this_process(name: str) -> dict[str, Row]:
    """What `check-engine` finds in one process, in this one."""
    rows: list[Row] = []
    for group in GROUPS:
        rows += examine(name, group, "one process")
        if not are_right(rows):
            break
    return {row.case: row for row in settled(rows)}


# check-engine


def test_a_good_engine_passes_in_one_process_and_over_two(scene: Path) -> None:
    status, out, err = call("check-engine", "scene_engines:Good", "--json")
    assert status == 0, err
    cannot = {
        (row["place"], row["case"]): row["text"] for row in lines(out) if row["verdict"] == "cannot be asked"
    }
    assert {row["verdict"] for row in lines(out)} == {"ok", "cannot be asked"}
    assert len(lines(out)) == 2 * len(CASES)
    methods = ("clipping over stages", "evaluation first")
    assert set(cannot) == {
        *((place, case) for place in trials.PLACES for case in (*methods, "ragged mini-batch")),
        ("two processes", "shared weights"),
    }
    assert cannot["two processes", methods[0]] == "it has no method clip(max_norm)"
    assert cannot["one process", "ragged mini-batch"].startswith("10 examples do not divide into 4")
    assert err.strip().endswith("scene_engines:Good: 41 cases passed, 7 cannot be asked")


@pytest.mark.parametrize("name", RIGHT)
def test_no_right_engine_is_blamed(name: str) -> None:
    assert faults([*in_this_process(name).values()]) == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_named_by_its_case_and_by_no_other(name: str) -> None:
    cases, said = PLANTED[name]
    found = faults([*in_this_process(f"planted_engines:{name}").values()])
    assert {row.case for row in found} == cases
    assert said in found[0].text, "which is what is said first"


@pytest.mark.parametrize("name", OVER_PROCESSES)
def test_over_processes_too_it_is_named_by_what_it_is(scene: Path, name: str) -> None:
    case, verdict, said = OVER_PROCESSES[name]
    limit_s = 20.0 if "Hangs" in name else 300.0  # on a busy machine a step may take long
    found = faults(in_place(f"planted_engines:{name}", "two processes", limit_s, ["accumulation over steps"]))
    assert (found[0].case, found[0].verdict) == (case, verdict)
    assert said in found[0].text


def test_the_table_fits_a_screen_and_says_who_has_met_it(
    scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "one process")
    status, out, _ = call("check-engine", "planted_engines:sums")
    assert status == 1
    shown = out.splitlines()
    assert max(map(len, shown[1:])) <= 100
    (row,) = [line for line in shown if line.startswith("summed loss")]
    assert "failed: every gradient" in row
    assert row.split("  ")[-1].strip().startswith("the learning rate is off")
    assert shown[-1] == "  summed loss: https://github.com/pytorch/torchtitan/issues/2972"


@pytest.mark.parametrize(
    ("name", "status", "first"),
    [
        ("Raises", 3, "RuntimeError: boom of the engine, in line 14 of scene_engines.py (step) [step, one"),
        ("Dies", 3, "its process ended with status 7 [step, one process]"),
        (
            "Wrong",
            1,
            "every gradient is 4 times that of the mean loss over the mini-batch: the losses of the",
        ),
        ("Empty", 1, "engine 'scene_engines:Empty' returned Empty, which has no method step(batch, target,"),
        ("Refuses", 1, "it can do nothing that was asked: needs another kind of computer"),
    ],
)
def test_a_bad_engine_is_named_in_the_first_line(
    scene: Path, monkeypatch: pytest.MonkeyPatch, name: str, status: int, first: str
) -> None:
    only(monkeypatch, "one process")
    found, head, _ = check(name)
    assert found == status
    assert head.startswith(f"scene_engines:{name}: {first}")


def test_one_that_hangs_is_ended_and_its_place_named(scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "one process")
    status, head, verdicts = check("Hangs", "--timeout-s", "1")
    assert status == 3
    assert "no answer within 1 s: its process was in line 20 of scene_engines.py (step)" in head
    assert list(verdicts.values()) == ["broken"] + ["not tried"] * (len(CASES) - len(BASE))


def test_a_name_that_leads_nowhere_is_bad_usage(scene: Path) -> None:
    status, head, _ = check("Missing")
    assert (status, head) == (
        2,
        "error: engine 'scene_engines:Missing': scene_engines has no attribute 'Missing'; "
        "name a class or function that takes a Setup",
    )
    assert check("Good", "--timeout-s", "0")[:2] == (2, "error: --timeout-s is 0; give seconds, such as 30")


# run engines


@pytest.mark.usefixtures("undrawn")
def test_four_bad_engines_and_a_good_one_are_four_reasons_and_a_result(
    scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"num_layers": 6, "vocab_size": 8, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "seq_len": 8}
    monkeypatch.setitem(WORKLOADS, "transformer", WORKLOADS["transformer"]._replace(options=tiny))
    monkeypatch.setattr(engine_turns, "TRIAL_S", 20.0)
    names = [f"scene_engines:{name}" for name in ("Raises", "Hangs", "Wrong", "Empty", "Good", "Picky")]
    status, _, err = call(
        "run", "engines", "--profile", "smoke", "--engine", ",".join(names), "--results", scene / "results",
        "--only", "where=processes", "--only", "workload=transformer",
    )  # fmt: skip
    assert status == 3, err
    (found,) = [json.loads(line) for line in (scene / "results/engines.jsonl").read_text().splitlines()]
    assert found["status"] == "failed"
    faulty = found["details"]["faulty"]
    assert list(faulty) == names[:4]
    assert faulty[names[0]].startswith("RuntimeError: boom of the engine, in line 14 of scene_engines.py")
    assert faulty[names[1]].startswith("no answer within 20 s: process 0 was in line 20 of scene_engines.py")
    assert "gradients of scene_engines:Wrong are wrong" in faulty[names[2]]
    assert "Empty, which has no method step(batch, target, loss_fn)" in faulty[names[3]]
    numbers = {(each["name"], *each["key"].values()): each for each in found["metrics"]}
    for engine in ("ours", "torch-gpipe", "torch-1f1b", names[4]):
        assert numbers["step", engine]["value"] > 0
        assert numbers["peak memory", engine, 0]["value"] > 0
    assert len(numbers["speed", "torch-gpipe", names[4]]["samples"]) == found["details"]["rounds"]
    right = ["ours", "torch-gpipe", "torch-1f1b", ALWAYS, names[4]]
    (refused,) = found["details"]["refused"].items()
    assert refused[0] == names[5]
    assert refused[1].startswith("no batch is good enough, in line ")
    assert [name for name in found["details"]["engines"] if name not in faulty] == [*right, names[5]]
    assert found["options"]["engine"].startswith(f"{names[0]}@")
    for checks in found["details"]["checks"]:
        assert [checks[name]["forwards"] for name in right] == [7, 8, 8, 8, 7]
        assert {(checks[name]["backwards"], checks[name]["examples"]) for name in right} == {(4, 2)}
    shown = call("compare", "engines", "--full", "--results", scene / "results")[1]
    for name in names[:4]:
        assert f"{name} failed: {faulty[name]}" in " ".join(shown.split())
    assert f"{names[5]} skipped: {refused[1]}" in " ".join(shown.split())

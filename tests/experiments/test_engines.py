"""Engines under test: naming one, what each does, and the suite that pytest runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench.experiments.engines.checks import (
    gradient_error,
    named_parameters,
    verify,
)
from gpipe_bench.experiments.engines.setup import Setup, pinned, resolve
from gpipe_bench.experiments.registry import ENGINES

EXAMPLES = Path(__file__).parents[2] / "examples"
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


ROOT = Path(__file__).parents[2]


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

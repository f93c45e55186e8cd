"""The conformance tests as users of pytest run them, with pytest's own options and report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

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
    asked = ["--engine", "planted_engines:Sums", "-k", "summed or returned", "--junitxml", str(report)]
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

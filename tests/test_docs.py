"""The documentation's code runs, and its links lead somewhere."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from gpipe_bench.harness.experiment import Experiment, RunOptions
from gpipe_bench.harness.records.store import Store
from gpipe_bench.harness.running.progress import PlainReporter
from gpipe_bench.harness.running.runner import run_experiment

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.md")])


def test_the_example_experiment_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "adding-an-experiment.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    module = types.ModuleType("widths")
    monkeypatch.setitem(sys.modules, "widths", module)
    exec(compile(code, "widths.py", "exec"), module.__dict__)
    experiment: Experiment = module.EXPERIMENT
    result = run_experiment(
        experiment,
        RunOptions(),
        Store(tmp_path),
        reporter=PlainReporter(sys.stderr),
        fresh=False,
        command="test",
    )
    assert [record.status for record in result.records] == ["done", "done"]
    (quantity,) = result.records[0].quantities
    assert quantity.value is not None
    assert quantity.value > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(
        r"`((?:experiments|harness|pipeline|models|results|docs|tests)/[\w./-]+\.\w+)`", text
    ):
        assert name.startswith("results/local/") or (ROOT / name).exists(), name

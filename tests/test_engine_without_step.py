"""An engine under test that can take no step is a mistake of the command line, not a skipped row."""

from __future__ import annotations

import pytest

from gpipe_bench.experiments.commands.cli import main
from gpipe_bench.experiments.engines.setup import NoStepError, check_step

ENGINES = """
class Empty:
    def __init__(self, setup):
        pass

class NotCallable(Empty):
    step = 1.0

class Late(Empty):
    def __init__(self, setup):
        self.step = lambda batch, target, loss_fn: None

class Picky:
    def __init__(self, setup):
        raise ValueError("needs a process group")

    def step(self, batch, target, loss_fn):
        pass

class PickyAndEmpty:
    def __init__(self, setup):
        raise ValueError("needs a process group")

def function(setup):
    return Empty(setup)

def nothing(setup):
    return None
"""


@pytest.fixture
def engines(tmp_path, monkeypatch):
    (tmp_path / "engines_to_test.py").write_text(ENGINES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("name", ["Empty", "NotCallable", "function", "nothing", "PickyAndEmpty"])
@pytest.mark.parametrize("experiment", ["peers", "table2"])
def test_it_is_refused_before_anything_is_run(engines, tmp_path, monkeypatch, capsys, name, experiment):
    def measured(*_, **options):
        raise AssertionError("something was run")

    monkeypatch.setattr("gpipe_bench.experiments.commands.run.run_experiment", measured)
    command = ["run", experiment, "--device", "cpu", "--engine", f"engines_to_test:{name}"]
    assert main([*command, "--results", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"error: engine 'engines_to_test:{name}'")
    assert "has no method step(batch, target, loss_fn)" in line


@pytest.mark.parametrize("name", ["Late", "Picky"])
def test_one_that_has_it_only_here_or_is_built_only_there_is_let_through(engines, name):
    check_step(f"engines_to_test:{name}")


def test_where_it_shows_only_in_the_processes_the_case_fails(engines, monkeypatch):
    """No reason to leave the engine out, as what it says of itself would be."""
    from gpipe_bench.experiments import engine_turns as turns

    monkeypatch.setattr(turns, "build", lambda engine, setup: (_ for _ in ()).throw(NoStepError("no")))
    with pytest.raises(NoStepError):
        turns.built("mine:Engine", None)

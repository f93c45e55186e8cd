"""Shared test set-up: pinned threads, the GPU marker, where the fake experiment of a test leaves things, and
launches that do not import torch again.

Two cores run the whole suite, so every test uses one compute thread; a test that needs more says so itself.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import forked
import hypothesis
import pytest
import torch
from case_runner import Outcomes, once, outcomes_of, selected
from tiers import is_all_deep, is_deep, patterns

from gpipe_bench.harness.store import Store

torch.set_num_threads(1)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for bits that repeat; read at its first use
# An example's time is the machine's. Where nobody looks on, each run has the same examples.
hypothesis.settings.register_profile(
    "tests", deadline=None, print_blob=True, derandomize="CI" in os.environ, max_examples=40
)
hypothesis.settings.load_profile("tests")
os.environ.pop("COLUMNS", None)  # a terminal's width is for whoever sits before it
# torch looks up the name behind every connection that it accepts; a lost request costs five seconds each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="session", autouse=True)
def forking() -> Iterator[None]:
    """Where starting processes is what is tested, `spawning` undoes it."""
    with forked.forking():
        yield


@pytest.fixture(scope="session", autouse=True)
def frozen() -> None:
    """What is imported by now, and what the first optimizer imports, is not looked through when garbage is
    collected: a quarter of a second each time, and steps that are timed ask for it. Once only: what tests
    leave behind is to be collected, but not so often that a tenth of the time goes there.
    """
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def spawning() -> Iterator[None]:
    """Launches start their processes as they do for users."""
    with forked.spawning():
        yield


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What each of four ranks says of the file's `CASES`, of those that are to be run. Tests of one file may
    be shared out among the workers of a run: one of them launches for all.
    """
    cases = selected(request, request.module.CASES)
    if not hasattr(request.config, "workerinput"):
        return outcomes_of(cases)
    path = tmp_path_factory.getbasetemp().parent / f"{request.module.__name__}.outcomes"
    return once(path, lambda: outcomes_of(cases))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no figures, which takes longer than many a case and is asserted elsewhere."""
    monkeypatch.setattr("gpipe_bench.experiments.commands.run.draw", lambda *arguments: [])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty; the fake experiment appends each case that it runs."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("FAKE_LOG", str(path))
    return path


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m alone` and `-m gpu` import only the files that have such tests, and the first tier none that has
    none: importing all takes as long as running some.
    """
    if "not deep" in config.option.markexpr and is_all_deep(
        collection_path.relative_to(Path(__file__).parent).as_posix()
    ):
        return True
    if (mark := config.option.markexpr) in ("alone", "gpu") and collection_path.match("test_*.py"):
        return f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    second = patterns()
    for item in items:
        if is_deep(item.nodeid.removeprefix("tests/"), second):
            item.add_marker(pytest.mark.deep)
    # Of the processes that share the list, one begins with its head: it runs what starts processes, one file
    # after the other, while the others run the rest.
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; the same code path is tested on the CPU")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # not keywords, which have the names of folders
            item.add_marker(skip)

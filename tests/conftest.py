"""Shared test set-up: pinned threads, the GPU marker, and where the fake experiment of a test leaves things.

Two cores run the whole suite, so every test uses one compute thread; a test that needs more says so itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gpipe_bench.harness.records.store import Store

torch.set_num_threads(1)
# torch looks up the name behind every connection that it accepts; a lost request costs five seconds each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; the same code path is tested on the CPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

"""Shared test set-up: pinned threads and the GPU marker.

Two cores run the whole suite, so every test uses one compute thread; a test that needs more says so itself.
"""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; the same code path is tested on the CPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

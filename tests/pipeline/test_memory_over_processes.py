"""The memory model of workers in processes of their own, beside real steps of two, counted to the byte.

In these models messages are most of what a worker holds, so that a buffer too many is many percent.
"""

from __future__ import annotations

import mmap

import over_processes_cases as cases
import pytest

from gpipe_bench.experiments.beyond.plan.steps import title
from gpipe_bench.pipeline import launch

PAGES = 2 * mmap.PAGESIZE + 64
"""Of shared memory, for the header and the loss, which the model counts as the few bytes that they are."""


@pytest.fixture(scope="module")
def counted() -> list[dict[str, list[int]]]:
    """By process, model and way."""
    return launch(cases.count_all, 2, device="cpu")


@pytest.mark.parametrize("name", cases.MODELS)
def test_peaks_are_those_of_real_steps(name: str, counted: list[dict[str, list[int]]]) -> None:
    """Every worker, under every schedule of the experiment. What is sent counts whole, also where a sender's
    graph holds it: without recomputation that is an upper estimate.
    """
    ways, most = cases.ways(), 1.15 if name.endswith("kept") else 1.01
    for place, modelled in enumerate(cases.peaks_of(cases.planned(name), ways)):
        for found, peak in zip(counted, modelled, strict=True):
            real = found[name][place]
            assert 0.99 * real - PAGES <= peak <= most * real + PAGES, title(ways[place])


@pytest.mark.parametrize("name", ["small", "large"])
def test_through_gloo_messages_take_as_much(name: str, counted: list[dict[str, list[int]]]) -> None:
    for found in counted:
        assert found[f"{name} over gloo"] == pytest.approx(found[name][:4], rel=0.01, abs=PAGES)

"""Lets several ways of taking the same step take turns in all processes of a case.

The processes live through all rounds, so that neither start-up nor a cold allocator is measured. Each takes
the turns in the same order (`harness.rounds`), begins them with the others and keeps its own times;
whoever reads them takes the slowest process's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.harness.rounds import Usage, repeats_for, turns
from gpipe_bench.planner.timing import settle, time_step

CALIBRATION_STEPS = 2

Steps = Mapping[str, Callable[[], object] | None]
"""By arm: one training step, or None in a process that has no part in it."""


class Measured(NamedTuple):
    """What one process found: seconds per step by arm, two samples per round, and what it used meanwhile."""

    times: dict[str, list[float]]
    usage: Usage


def measure(steps: Steps, layers: Sequence[nn.Module], num_rounds: int, seed: int) -> Measured:
    """Times all arms, which train the same `layers`. All processes must call; every arm has warmed up."""
    repeats = {arm: _repeats(step, layers) for arm, step in steps.items()}
    settle()
    times: dict[str, list[float]] = {arm: [] for arm in steps}
    start = Usage.now()
    for arm in turns(list(steps), num_rounds, seed):
        times[arm].append(time_step(steps[arm], layers, repeats=repeats[arm]))
    return Measured(times, Usage.now().since(start))


def _repeats(step: Callable[[], object] | None, layers: Sequence[nn.Module]) -> int:
    """Steps per sample, the same in every process: as many as the slowest needs to fill a sample."""
    step_s = torch.tensor([time_step(step, layers, repeats=CALIBRATION_STEPS)], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(step_s, dist.ReduceOp.MAX)
    return repeats_for([float(step_s)])

"""Seconds of every layer of a model, by which the processes of a timing case cut it into stages.

Each finds its own, but all must cut at the same places, since a stage's neighbour is in another process; so
the mean over processes counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.setup import clear
from gpipe_bench.experiments.measuring.timed_actions import samples_of
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.planner.timing import time_step


def layer_seconds(
    layers: Sequence[nn.Module],
    num_microbatches: int,
    compute_loss: Callable[..., Tensor],
    batch: Any,
    target: Any,
    remat: str,
) -> tuple[float, ...]:
    """Forward, backward and, as `remat` says, recomputation of one micro-batch, with the layers as stages of
    their own in a pipeline of single layers; the mean over processes, all of which must call.
    """
    pipeline = Pipeline(layers, num_stages=len(layers), num_microbatches=num_microbatches, remat=remat)
    for _ in range(2):  # the first warms up
        time_step(partial(pipeline.step, batch, target, compute_loss), layers)
    clear(layers)
    found = [0.0] * len(layers)
    for (stage, _), samples in samples_of([pipeline.timeline]).items():
        found[stage] += median(samples)
    seconds = torch.tensor(found, dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(seconds)
        seconds /= dist.get_world_size()
    return tuple(seconds.tolist())

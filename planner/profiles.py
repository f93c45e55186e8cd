"""Profiles of a model's layers in bytes, at the sizes of micro-batches that predictions ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import ModelProfile, Profiler
from gpipe_bench.planner.model import Subject


def profiles_of(subject: Subject) -> Callable[[int, bool, int], ModelProfile]:
    """(micro-batch size, whether with I and W, tp) -> profiles; each is made once."""

    @cache
    def profile(size: int, split: bool, tp: int) -> ModelProfile:
        if tp > 1:
            raise ValueError(f"profiles of whole layers are asked for tp {tp}; plan the model with tp 1")
        with torch.device("meta"):
            layers, loss = subject.build()
        ends = map(Boundary.of, subject.batch(size, "meta"))
        return ModelProfile(*Profiler(split_backward=split).model(layers, loss, *ends))

    return profile

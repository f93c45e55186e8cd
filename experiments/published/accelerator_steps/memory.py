"""Whether a step of a published model fits into an accelerator's memory, by the project's own memory model.

Layers are profiled on fake tensors for two sizes of the micro-batch, and scaled from there (every number of
a profile is constant or grows with the examples, which is checked to the byte at both). A single example, and
formats of 16 bits other than bfloat16, are taken as what that gives, though kernels may take other paths
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import Profiler
from gpipe_bench.pipeline.memory.sizes.scaling import ScaledProfile, fit
from gpipe_bench.pipeline.memory.stages.footprint import Footprint, footprint
from gpipe_bench.pipeline.memory.stages.peaks import stage_memory
from gpipe_bench.pipeline.memory.story import LayerProfile
from gpipe_bench.pipeline.plan.schedule import Schedule, gpipe

EXAMPLES = (2, 16)
"""Sizes that are profiled."""
_BY_EXAMPLES = ((0,), (1,))

_profilers: dict[str, Profiler] = {}
_schedule = cache(gpipe)


@cache
def _family(
    name: str, options: tuple[tuple[str, Any], ...], activation_format: str
) -> tuple[ScaledProfile, ...]:
    """A scaled profile of each layer, and of the loss as the last."""
    given = dict(options)
    half = None if activation_format == "float32" else torch.bfloat16
    profiler = _profilers.setdefault(activation_format, Profiler(half))
    with torch.device("meta"):
        modules = MODELS[name](**given)
    samples = {}
    for examples in EXAMPLES:
        inputs, target = example_batch(name, examples, device="meta", **given)
        layers, loss = profiler.model(
            modules, loss_fn(name, **given), Boundary.of(inputs), Boundary.of(target)
        )
        samples[examples] = [*layers, loss]
    known: dict[tuple[int, ...], ScaledProfile] = {}
    found = []
    for profiles in zip(*samples.values(), strict=True):
        key = tuple(map(id, profiles))
        if key not in known:
            at: dict[tuple[int, ...], LayerProfile] = {
                (examples,): each for examples, each in zip(EXAMPLES, profiles, strict=True)
            }
            known[key] = fit(at, _BY_EXAMPLES)
        found.append(known[key])
    return tuple(found)


@dataclass(frozen=True)
class Memory:
    """The memory of one model with activations of one format."""

    model: str
    options: tuple[tuple[str, Any], ...]
    activation_format: str

    @classmethod
    def of(cls, model: str, options: Mapping[str, Any], activation_format: str) -> Memory:
        return cls(model, tuple(sorted(options.items())), activation_format)

    def peak_bytes(
        self, stages: Sequence[range], num_microbatches: int, examples: int, remat: str, optimizer: str
    ) -> int:
        """Of the fullest stage under gpipe, with micro-batches of so many examples (modelled)."""
        schedule: Schedule = _schedule(len(stages), num_microbatches, remat)
        return max(
            self._stage((stage.start, stage.stop), schedule.actions[number], examples, number == 0, optimizer)
            for number, stage in enumerate(stages)
        )

    def _stage(
        self, span: tuple[int, int], actions: Any, examples: int, is_first: bool, optimizer: str
    ) -> int:
        return stage_memory(
            _footprint(self, span, examples), actions, optimizer, is_first=is_first, receive_ahead=1
        ).peak

    def layers(self, examples: int) -> tuple[LayerProfile, ...]:
        """Profiles of all layers, and of the loss as the last, at a size of the micro-batch."""
        return _layers(self, examples)


@cache
def _layers(memory: Memory, examples: int) -> tuple[LayerProfile, ...]:
    known: dict[int, LayerProfile] = {}
    found = []
    for scaled in _family(memory.model, memory.options, memory.activation_format):
        if id(scaled) not in known:
            known[id(scaled)] = scaled.at((examples,))
        found.append(known[id(scaled)])
    return tuple(found)


@cache
def _footprint(memory: Memory, span: tuple[int, int], examples: int) -> Footprint:
    layers = memory.layers(examples)
    start, stop = span
    return footprint(layers[start:stop], layers[-1] if stop == len(layers) - 1 else None)

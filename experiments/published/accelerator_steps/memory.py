"""Whether a step of a published model fits into an accelerator's memory, by the project's own memory model.

Layers are profiled on fake tensors with one prime number of examples, by which every size tells how it grows
(pipeline.memory.labels). A single example, and formats of 16 bits other than bfloat16, are taken as
what that gives, though kernels may take other paths there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gpipe_bench.experiments.paper_profiles import EXAMPLES, Reading, profiled_model
from gpipe_bench.pipeline.memory.labels import Label, Relabel
from gpipe_bench.pipeline.memory.stages.footprint import Footprint, footprint
from gpipe_bench.pipeline.memory.stages.peaks import stage_memory
from gpipe_bench.pipeline.memory.story import LayerProfile
from gpipe_bench.pipeline.plan.schedule import Schedule, gpipe

_schedule = cache(gpipe)


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
            stage_memory(
                _footprint(self, (stage.start, stage.stop), examples), schedule.actions[number], optimizer,
                is_first=number == 0, receive_ahead=1,
            ).peak
            for number, stage in enumerate(stages)
        )  # fmt: skip

    def layers(self, examples: int) -> tuple[LayerProfile, ...]:
        """Profiles of all layers, and of the loss as the last, at a size of the micro-batch."""
        return _layers(self, examples)


@cache
def _layers(memory: Memory, examples: int) -> tuple[LayerProfile, ...]:
    number_format = "float32" if memory.activation_format == "float32" else "bfloat16"
    reading = Reading(number_format=number_format)
    found = profiled_model(reading, memory.model, EXAMPLES, **dict(memory.options))
    at = cache(Relabel((Label(EXAMPLES, EXAMPLES, examples),)).profile)  # many layers share one profile
    return tuple(map(at, (*found.layers, found.loss)))


@cache
def _footprint(memory: Memory, span: tuple[int, int], examples: int) -> Footprint:
    layers = memory.layers(examples)
    start, stop = span
    return footprint(layers[start:stop], layers[-1] if stop == len(layers) - 1 else None)

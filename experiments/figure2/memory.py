"""Peak activations of a Transformer and of AmoebaNet-D beside the paper's O(N + (L/K)(N/M)).

The formula says how memory grows; the memory model says how much it is. With the model's own bytes in it (the
inputs of a stage for all N examples, and the saved activations of one micro-batch) the two should differ by
no more than what a backward pass needs for a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gpipe_bench.experiments.paper_profiles import Reading, amoebanet, transformer
from gpipe_bench.pipeline.memory.profile import ModelProfile
from gpipe_bench.pipeline.memory.stages.footprint import footprint
from gpipe_bench.pipeline.memory.stages.workers import pipeline_memory
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import gpipe

BATCH_SIZE = 32


@dataclass(frozen=True)
class Subject:
    """A model of the paper. `num_layers` is the paper's L, `num_filters` is 0 for the Transformer."""

    title: str
    num_layers: int
    num_filters: int
    num_microbatches: tuple[int, ...]


SUBJECTS: dict[str, Subject] = {
    "transformer-lm": Subject("Transformer-24", 24, 0, (1, 4, 32)),
    "amoebanet-d": Subject("AmoebaNet-D (18, 256)", 18, 256, (32,)),
}


@dataclass(frozen=True)
class Peak:
    """Bytes of the fullest stage, in parts that add up, and what the formula makes of the same stage."""

    boundary: int
    activations: int
    transients: int
    formula_boundary: int  # N inputs of the stage
    formula_activations: int  # its saved activations of N / M examples
    kept: int  # what is saved for all N examples without re-materialization, on one device: O(N L)

    @property
    def total(self) -> int:
        return self.boundary + self.activations + self.transients

    @property
    def formula(self) -> int:
        return self.formula_boundary + self.formula_activations


@cache
def profile(model: str, microbatch_size: int) -> ModelProfile:
    subject = SUBJECTS[model]
    if model == "transformer-lm":
        return transformer(Reading(), subject.num_layers, microbatch_size, "fused")
    return amoebanet(Reading(), subject.num_layers, subject.num_filters, microbatch_size)


def cut(model: str, num_stages: int, num_microbatches: int) -> Partition:
    """Stages that save as evenly as possible."""
    layers = profile(model, BATCH_SIZE // num_microbatches).layers
    saved = {layer: footprint([layer]).saved_bytes for layer in set(layers)}
    return partition([saved[layer] for layer in layers], num_stages)


def peak(model: str, num_stages: int, num_microbatches: int) -> Peak:
    """The stage whose activations need most under gpipe with re-materialization of every micro-batch."""
    found = profile(model, BATCH_SIZE // num_microbatches)
    stages = cut(model, num_stages, num_microbatches)
    schedule = gpipe(num_stages, num_microbatches, "always")
    memory = pipeline_memory(found.layers, found.loss, stages, schedule)
    fullest = max(range(num_stages), key=lambda stage: memory[stage].working_set)
    last = fullest == num_stages - 1
    own = footprint([found.layers[layer] for layer in stages[fullest]], found.loss if last else None)
    # The targets are inputs of the last stage.
    inputs = own.input_bytes + own.target_bytes
    everything = footprint(found.layers, found.loss)
    return Peak(
        boundary=memory[fullest].boundary,
        activations=memory[fullest].activations,
        transients=memory[fullest].transients,
        formula_boundary=num_microbatches * inputs,
        formula_activations=own.saved_bytes,
        kept=num_microbatches * (everything.saved_bytes + everything.input_bytes + everything.target_bytes),
    )

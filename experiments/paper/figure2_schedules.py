"""The schedules of Figure 2 and what each wastes and keeps: exact, with stages that take one time."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from gpipe_bench.pipeline.plan.named import gpipe, naive, one_f_one_b
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.schedule import Kind, Remat, Schedule, most_alive_of
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline


class Variant(NamedTuple):
    """A schedule as drawn and counted; `formula` is that of its bubble."""

    title: str
    schedule: Callable[[int, int, Remat], Schedule]
    remat: Remat
    formula: str
    early_recompute: bool = True
    microbatches_at_once: bool = False  # the whole mini-batch goes through as one micro-batch

    def closed_form(self, num_stages: int, num_microbatches: int) -> Fraction:
        """Idle share of the device time by the formula."""
        others = num_stages - 1
        if self.microbatches_at_once:
            return Fraction(others, num_stages)
        if self.remat == "never" or not self.early_recompute:
            return Fraction(others, num_microbatches + others)
        # Recomputation fills no gap of the drain, so it adds to the step and not to the idle time.
        recomputed = num_microbatches - (self.remat == "except_last")
        idle = 3 * others  # a forward and a backward each
        return Fraction(idle, 3 * num_microbatches + idle + recomputed)

    def replay(self, num_stages: int, num_microbatches: int) -> Timeline:
        """The step of a mini-batch that is worth M forwards, in forwards."""
        scale = num_microbatches if self.microbatches_at_once else 1
        return replay(
            self.schedule(num_stages, num_microbatches // scale, self.remat),
            {kind: slots * scale for kind, slots in SLOTS.items()},
            early_recompute=self.early_recompute,
        )

    def bubble(self, num_stages: int, num_microbatches: int) -> Fraction:
        """Idle share of the replayed step, exact."""
        timeline = self.replay(num_stages, num_microbatches)
        return Fraction(timeline.idle_s) / Fraction(num_stages * timeline.makespan_s)

    def graphs_alive(self, num_stages: int, num_microbatches: int) -> int:
        """Most micro-batches whose graph the first stage keeps at a time."""
        scale = num_microbatches if self.microbatches_at_once else 1
        return most_alive_of(self.schedule(num_stages, num_microbatches // scale, self.remat).row(0)) * scale


_FORMULA, _EARLY = "(K-1)/(M+K-1)", "GPipe, recomputing early"
VARIANTS: dict[str, Variant] = {
    "naive": Variant(
        "naive: the mini-batch in one piece", naive, "never", "(K-1)/K", microbatches_at_once=True
    ),
    "gpipe": Variant("GPipe without re-materialization", gpipe, "never", _FORMULA),
    "gpipe-late": Variant(
        "GPipe, recomputing when the gradient is there", gpipe, "always", _FORMULA, early_recompute=False
    ),
    "gpipe-early": Variant(f"{_EARLY} (the paper's)", gpipe, "always", "3(K-1)/(3(M+K-1)+M)"),
    "gpipe-kept": Variant(f"{_EARLY}, last micro-batch kept", gpipe, "except_last", "3(K-1)/(3(M+K-1)+M-1)"),
    "1f1b": Variant("1F1B without re-materialization", one_f_one_b, "never", _FORMULA),
}
"""Variants in the order in which they are shown, by the name that cases and records use."""


def peak_activations(schedule: Schedule, num_layers: int) -> Fraction:
    """Most activations alive on a stage, where those of one layer for the whole mini-batch are 1.

    Counted over the actions: a boundary input per micro-batch in flight, and the L / K layers of every
    micro-batch whose graph exists. The paper's O(N + (L/K)(N/M)) with constants of 1, divided by N.
    """
    layers_per_stage = Fraction(num_layers, schedule.num_stages)
    peak = Fraction(0)
    for row in schedule.actions:
        inputs, graphs = 0, 0
        for action in row:
            inputs += action.kind is Kind.F
            makes_graph = Kind.R if schedule.recomputes(action.microbatch, action.stage) else Kind.F
            graphs += action.kind is makes_graph
            peak = max(peak, inputs + layers_per_stage * graphs)
            if action.kind is Kind.B:
                inputs, graphs = inputs - 1, graphs - 1
    return peak / schedule.num_microbatches


def peak_bytes(
    num_layers: int, num_filters: int, batch_size: int, num_stages: int, num_microbatches: int
) -> dict[str, int]:
    """Bytes of the stage whose activations need most, under gpipe with every micro-batch recomputed, of
    AmoebaNet-D or, without filters, the Transformer.

    "boundary", "activations" and "transients" add up to what the memory model says. The formula says how
    memory grows; with the model's own bytes in it ("formula_boundary" for the inputs of a stage for all N
    examples, "formula_activations" for what is saved of one micro-batch) the two should differ by no more
    than what a backward pass needs for a moment. "kept" is what one device saves for all N examples without
    re-materialization: O(N L).
    """
    from gpipe_bench.experiments.paper.profiles import Reading, amoebanet, transformer
    from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
    from gpipe_bench.pipeline.memory.workers import pipeline_memory

    microbatch_size = batch_size // num_microbatches
    if num_filters:
        found = amoebanet(Reading(), num_layers, num_filters, microbatch_size)
    else:
        found = transformer(Reading(), num_layers, microbatch_size, "fused")
    saved = {layer: stage_bytes([layer]).saved_bytes for layer in set(found.layers)}
    stages = partition([saved[layer] for layer in found.layers], num_stages)  # that save evenly
    memory = pipeline_memory(found.layers, found.loss, stages, gpipe(num_stages, num_microbatches, "always"))
    fullest = max(range(num_stages), key=lambda stage: memory[stage].working_set)
    last = fullest == num_stages - 1
    own = stage_bytes([found.layers[layer] for layer in stages[fullest]], found.loss if last else None)
    everything = stage_bytes(found.layers, found.loss)
    ends = everything.input_bytes + everything.target_bytes
    return {
        "boundary": memory[fullest].boundary,
        "activations": memory[fullest].activations,
        "transients": memory[fullest].transients,
        # The targets are inputs of the last stage.
        "formula_boundary": num_microbatches * (own.input_bytes + own.target_bytes),
        "formula_activations": own.saved_bytes,
        "kept": num_microbatches * (everything.saved_bytes + ends),
    }

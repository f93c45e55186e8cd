"""The schedules of Figure 2 and what the paper's algebra says of each.

Equal stages, a free link, forward : recompute : backward = 1 : 1 : 2, time counted in forwards of one
micro-batch on one stage, so everything is a whole number and "equal" means equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from gpipe_bench.pipeline.plan.replay import SLOTS, replay
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule, gpipe, naive, one_f_one_b
from gpipe_bench.pipeline.plan.timeline import Timeline

UNIT = "forwards"
_FORWARD_AND_BACKWARD = 3
_RECOMPUTE = 1


@dataclass(frozen=True)
class Variant:
    """A schedule as drawn and counted; `closed_form(K, M)` is the idle share of the device time."""

    title: str
    make: Callable[[int, int], Schedule]
    closed_form: Callable[[int, int], Fraction]
    formula: str
    early_recompute: bool = True
    microbatches_at_once: bool = False  # the whole mini-batch goes through as one micro-batch

    def schedule(self, num_stages: int, num_microbatches: int) -> Schedule:
        return self.make(num_stages, 1 if self.microbatches_at_once else num_microbatches)

    def replay(self, num_stages: int, num_microbatches: int) -> Timeline:
        """The step of a mini-batch that is worth M forwards, in forwards."""
        scale = num_microbatches if self.microbatches_at_once else 1
        return replay(
            self.schedule(num_stages, num_microbatches),
            {kind: slots * scale for kind, slots in SLOTS.items()},
            early_recompute=self.early_recompute,
        )

    def bubble(self, num_stages: int, num_microbatches: int) -> Fraction:
        """Idle share of the replayed step, exact."""
        timeline = self.replay(num_stages, num_microbatches)
        return Fraction(timeline.idle_s) / Fraction(num_stages * timeline.makespan_s)


def _pipeline(num_stages: int, num_microbatches: int) -> Fraction:
    return Fraction(num_stages - 1, num_microbatches + num_stages - 1)


def _early(num_stages: int, num_microbatches: int, recomputed: int) -> Fraction:
    """Recomputation fills no gap of the drain, so it adds to the step and not to the idle time."""
    rounds = num_microbatches + num_stages - 1
    idle = _FORWARD_AND_BACKWARD * (num_stages - 1)
    return Fraction(idle, _FORWARD_AND_BACKWARD * rounds + _RECOMPUTE * recomputed)


VARIANTS: dict[str, Variant] = {
    "naive": Variant(
        "naive: the mini-batch in one piece",
        lambda k, m: naive(k, m, "never"),
        lambda k, m: Fraction(k - 1, k),
        "(K-1)/K",
        microbatches_at_once=True,
    ),
    "gpipe": Variant(
        "GPipe without re-materialization",
        lambda k, m: gpipe(k, m, "never"),
        _pipeline,
        "(K-1)/(M+K-1)",
    ),
    "gpipe-late": Variant(
        "GPipe, recomputing when the gradient is there",
        lambda k, m: gpipe(k, m, "always"),
        _pipeline,
        "(K-1)/(M+K-1)",
        early_recompute=False,
    ),
    "gpipe-early": Variant(
        "GPipe, recomputing early (the paper's)",
        lambda k, m: gpipe(k, m, "always"),
        lambda k, m: _early(k, m, m),
        "3(K-1)/(3(M+K-1)+M)",
    ),
    "gpipe-kept": Variant(
        "GPipe, recomputing early, last micro-batch kept",
        lambda k, m: gpipe(k, m, "except_last"),
        lambda k, m: _early(k, m, m - 1),
        "3(K-1)/(3(M+K-1)+M-1)",
    ),
    "1f1b": Variant(
        "1F1B without re-materialization",
        lambda k, m: one_f_one_b(k, m, "never"),
        _pipeline,
        "(K-1)/(M+K-1)",
    ),
}
"""By the name that cases and records use, in the order in which they are shown."""


def graphs_alive(variant: Variant, num_stages: int, num_microbatches: int) -> int:
    """Most micro-batches whose graph the first stage keeps at a time."""
    live = variant.replay(num_stages, num_microbatches).live_activations(0)
    return max(count for _, count in live) * (num_microbatches if variant.microbatches_at_once else 1)


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

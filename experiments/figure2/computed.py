"""What Figure 2 and section 2 say, computed: schedules and their bubbles, activation memory, traffic.

Schedules are replayed with equal stages, a free link and forward : recompute : backward = 1 : 1 : 2, time
counted in forwards of one micro-batch on one stage, so everything is a whole number and "equal" means equal.
Memory and traffic follow from shapes, which are found on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from gpipe_bench.pipeline.plan.named import gpipe, naive, one_f_one_b
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline

UNIT = "forwards"


@dataclass(frozen=True)
class Variant:
    """A schedule as drawn and counted; `closed_form(K, M)` is the idle share of the device time."""

    title: str
    make: Callable[[int, int], Schedule]
    closed_form: Callable[[int, int], Fraction]
    formula: str
    early_recompute: bool = True
    microbatches_at_once: bool = False  # the whole mini-batch goes through as one micro-batch

    def replay(self, num_stages: int, num_microbatches: int) -> Timeline:
        """The step of a mini-batch that is worth M forwards, in forwards."""
        scale = num_microbatches if self.microbatches_at_once else 1
        return replay(
            self.make(num_stages, num_microbatches // scale),
            {kind: slots * scale for kind, slots in SLOTS.items()},
            early_recompute=self.early_recompute,
        )

    def bubble(self, num_stages: int, num_microbatches: int) -> Fraction:
        """Idle share of the replayed step, exact."""
        timeline = self.replay(num_stages, num_microbatches)
        return Fraction(timeline.idle_s) / Fraction(num_stages * timeline.makespan_s)

    def graphs_alive(self, num_stages: int, num_microbatches: int) -> int:
        """Most micro-batches whose graph the first stage keeps at a time."""
        live = self.replay(num_stages, num_microbatches).live_activations(0)
        return max(count for _, count in live) * (num_microbatches if self.microbatches_at_once else 1)


def _pipeline(num_stages: int, num_microbatches: int) -> Fraction:
    return Fraction(num_stages - 1, num_microbatches + num_stages - 1)


def _early(num_stages: int, num_microbatches: int, recomputed: int) -> Fraction:
    """Recomputation fills no gap of the drain, so it adds to the step and not to the idle time."""
    idle = 3 * (num_stages - 1)  # a forward and a backward each
    return Fraction(idle, 3 * num_microbatches + idle + recomputed)


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


# Memory -----------------------------------------------------------------------------------------------------

BATCH_SIZE = 32


class Subject(NamedTuple):
    """A model of the paper. `num_layers` is the paper's L, `num_filters` is 0 for the Transformer."""

    title: str
    num_layers: int
    num_filters: int
    num_microbatches: tuple[int, ...]


SUBJECTS: dict[str, Subject] = {
    "transformer-lm": Subject("Transformer-24", 24, 0, (1, 4, 32)),
    "amoebanet-d": Subject("AmoebaNet-D (18, 256)", 18, 256, (32,)),
}


def peak(model: str, num_stages: int, num_microbatches: int) -> dict[str, int]:
    """Bytes of the stage whose activations need most, under gpipe with every micro-batch recomputed.

    "boundary", "activations" and "transients" add up to what the memory model says. The formula says how
    memory grows; with the model's own bytes in it ("formula_boundary" for the inputs of a stage for all N
    examples, "formula_activations" for what is saved of one micro-batch) the two should differ by no more
    than what a backward pass needs for a moment. "kept" is what one device saves for all N examples without
    re-materialization: O(N L).
    """
    from gpipe_bench.experiments.paper_profiles import Reading, amoebanet, transformer
    from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
    from gpipe_bench.pipeline.memory.workers import pipeline_memory

    _, num_layers, num_filters, _ = SUBJECTS[model]
    microbatch_size = BATCH_SIZE // num_microbatches
    if num_filters:
        found = amoebanet(Reading(), num_layers, num_filters, microbatch_size)
    else:
        found = transformer(Reading(), num_layers, microbatch_size, "fused")
    saved = {layer: stage_bytes([layer]).saved_bytes for layer in set(found.layers)}
    stages = partition([saved[layer] for layer in found.layers], num_stages)  # that save evenly
    schedule = gpipe(num_stages, num_microbatches, "always")
    memory = pipeline_memory(found.layers, found.loss, stages, schedule)
    fullest = max(range(num_stages), key=lambda stage: memory[stage].working_set)
    last = fullest == num_stages - 1
    own = stage_bytes([found.layers[layer] for layer in stages[fullest]], found.loss if last else None)
    everything = stage_bytes(found.layers, found.loss)
    return {
        "boundary": memory[fullest].boundary,
        "activations": memory[fullest].activations,
        "transients": memory[fullest].transients,
        # The targets are inputs of the last stage.
        "formula_boundary": num_microbatches * (own.input_bytes + own.target_bytes),
        "formula_activations": own.saved_bytes,
        "kept": num_microbatches
        * (everything.saved_bytes + everything.input_bytes + everything.target_bytes),
    }


# Traffic ----------------------------------------------------------------------------------------------------
#
# The paper's case for pipelines on slow links (section 2.3): only activations at the K - 1 boundaries travel,
# and their gradients back. Data parallelism moves every gradient of every parameter around a ring, twice,
# whatever the batch.


class Shape(NamedTuple):
    """What matters of a model here; bytes are those of one example, and of float32 parameters."""

    num_parameters: int
    gradient_bytes: int
    flops: tuple[int, ...]  # of the forward, per layer
    parameters: tuple[int, ...]  # per layer
    output_bytes: tuple[int, ...]  # what the layer hands on
    output_gradient_bytes: tuple[int, ...]  # what comes back for it: nothing for integers


class Traffic(NamedTuple):
    """Bytes sent in a step: of the device that sends most, and of all devices, per example or per step."""

    pipeline_busiest: int  # per example
    pipeline_total: int  # per example
    data_parallel_each: int  # per step, whatever the batch
    data_parallel_total: int


def shape(name: str, options: Mapping[str, Any]) -> Shape:
    """The model's shape, built without memory for its parameters; each distinct layer runs once."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from gpipe_bench.models import MODELS, example_batch
    from gpipe_bench.pipeline.memory.boundary import Boundary
    from gpipe_bench.pipeline.signature import signature

    with torch.device("meta"):
        model = MODELS[name](**options)
    value, _ = example_batch(name, 1, device="meta", **options)
    known: dict[object, tuple[int, Any]] = {}
    flops, outputs = [], []
    for layer in model:
        key = (signature(layer), Boundary.of(value))
        if key not in known:
            with FlopCounterMode(display=False) as counter:
                value = _detached(layer(value))
            known[key] = (counter.get_total_flops(), value)
        count, value = known[key]
        flops.append(count)
        outputs.append(Boundary.of(value))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Shape(
        num_parameters=sum(parameter.numel() for parameter in trainable),
        gradient_bytes=sum(parameter.numel() * parameter.itemsize for parameter in trainable),
        flops=tuple(flops),
        parameters=tuple(sum(parameter.numel() for parameter in layer.parameters()) for layer in model),
        output_bytes=tuple(output.num_bytes for output in outputs),
        output_gradient_bytes=tuple(
            sum(output.tensors[i].num_bytes for i in output.distinct if output.tensors[i].requires_grad)
            for output in outputs
        ),
    )


def _detached(value: Any) -> Any:
    """The same without a graph. A tensor that stands twice stays one."""
    from torch import Tensor

    from gpipe_bench.pipeline.memory.boundary import as_tuple

    seen: dict[int, Tensor] = {}
    tensors = tuple(
        seen.setdefault(id(tensor), tensor.detach().requires_grad_(tensor.requires_grad))
        for tensor in as_tuple(value)
    )
    return tensors[0] if isinstance(value, Tensor) else tensors


def traffic(found: Shape, num_stages: int, costs: Sequence[float] | None = None) -> Traffic:
    """A pipeline of `num_stages` stages of equal costs, by default of forward FLOPs, as far as cuts allow,
    and as many replicas.

    Ring all-reduce: each of K devices sends 2 (K - 1) / K of the gradient bytes. Raises ValueError for more
    stages than layers.
    """
    stages = partition(found.flops if costs is None else costs, num_stages)
    ends = [stage.stop - 1 for stage in stages[:-1]]
    forward = [found.output_bytes[end] for end in ends] + [0]  # the last stage sends no activations
    backward = [0] + [found.output_gradient_bytes[end] for end in ends]  # and the first no gradients
    sent = [ahead + back for ahead, back in zip(forward, backward, strict=True)]
    everyone = 2 * (num_stages - 1) * found.gradient_bytes
    return Traffic(max(sent), sum(sent), everyone // num_stages, everyone)

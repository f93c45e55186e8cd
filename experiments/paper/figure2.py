"""Figure 2 and the formulas of section 2: what a pipeline wastes and keeps.

Expected: the replay's bubble equals (K-1)/(M+K-1) exactly, less where recomputation starts early; memory
follows O(N + (L/K)(N/M)), with a backward pass on top. No GPU is needed:

    python -m experiments run figure2

Schedules are replayed with equal stages, a free link and forward : recompute : backward = 1 : 1 : 2, time
counted in forwards of one micro-batch on one stage, so everything is a whole number and "equal" means equal
(`replayed`). Memory follows from shapes, which are found on the meta device (`modelled`). Nothing here is
timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from gpipe_bench.experiments.paper.figure2_shown import (
    UNIT,
    VARIANTS,
    figures,
    of_part,
    tables,
)
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.paper import SENTENCES
from gpipe_bench.harness.record import Metric, Provenance, Record, Scalar
from gpipe_bench.harness.verdict import Part, Result, Spread
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule

DRAWN_STAGES = 4
DRAWN_MICROBATCHES = (4, 8)
STAGES = (2, 4, 8, 16)
MICROBATCHES = (1, 4, 8, 32, 128)
PER_STAGE = (1, 2, 3, 4, 8)  # M / K
COUNTED = ((24, 32, 2), (24, 32, 4), (24, 32, 8), (48, 32, 8), (24, 1, 1))  # L, M, K of the paper's formula
MEMORY_STAGES = (1, 2, 4, 8)
BATCH_SIZE = 32
COUNTED_MODELS = ("amoebanet-b", "transformer-seq2seq")
TABLE = "formulas"  # in results/paper.csv


class Subject(NamedTuple):
    """A model of the paper. `num_layers` is the paper's L, `num_filters` is 0 for the Transformer."""

    title: str
    num_layers: int
    num_filters: int
    num_microbatches: tuple[int, ...]
    estimate_s: float


SUBJECTS: dict[str, Subject] = {
    "transformer-lm": Subject("Transformer-24", 24, 0, (1, 4, 32), 2.0),
    "amoebanet-d": Subject("AmoebaNet-D (18, 256)", 18, 256, (32,), 5.0),
}


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    drawn = itertools.product(DRAWN_MICROBATCHES[:1] if smoke else DRAWN_MICROBATCHES, VARIANTS)
    found = [Case({"part": "chart", "schedule": name, "num_microbatches": m}, 0.02) for m, name in drawn]
    found += [Case({"part": "bubble", "num_stages": k}, 0.02 * k) for k in (STAGES[:3] if smoke else STAGES)]
    found += [
        Case({"part": "formula", "num_layers": layers, "num_microbatches": m, "num_stages": k}, 0.01)
        for layers, m, k in COUNTED
    ]
    found += [
        Case({"part": "memory", "model": model, "num_stages": k}, 0.1 if place else subject.estimate_s)
        for model, subject in [*SUBJECTS.items()][: 1 if smoke else 2]
        for place, k in enumerate(MEMORY_STAGES)
    ]
    return found + [Case({"part": "size", "model": model, "size": size}, 0.4) for model, size in _zoo()]


def run(case: Case, options: RunOptions) -> Outcome:
    part = str(case.key["part"])
    if part in ("memory", "size"):
        import torch

        torch.set_num_threads(1)
    runs = {
        "chart": _run_chart, "bubble": _run_bubble, "formula": _run_formula, "memory": _run_memory,
        "size": _run_size,
    }  # fmt: skip
    return runs[part](case.key)


def _metric(
    name: str,
    value: float,
    unit: str,
    provenance: Provenance = "modelled",
    key: Mapping[str, Scalar] | None = None,
    **more: Any,
) -> Metric:
    return Metric(name=name, key=key or {}, value=value, unit=unit, provenance=provenance, **more)


def _bytes(sizes: Mapping[str, int], **key: Scalar) -> list[Metric]:
    return [_metric(name, size, "bytes", key=key) for name, size in sizes.items()]


# Schedules


def _run_chart(key: dict[str, Any]) -> Outcome:
    """One step of one schedule, with its timeline for the drawing."""
    variant, num_microbatches = VARIANTS[key["schedule"]], key["num_microbatches"]
    timeline = variant.replay(DRAWN_STAGES, num_microbatches)
    alive = variant.graphs_alive(DRAWN_STAGES, num_microbatches)
    return Outcome(
        (
            _metric("step", timeline.makespan_s, "number", "replayed", note=UNIT),
            _metric("bubble", float(timeline.bubble), "ratio", "replayed"),
            _metric("graphs alive on the first stage", alive, "number", "replayed", note="micro-batches"),
        ),
        {"num_stages": DRAWN_STAGES, "timeline": timeline.to_data()},
    )


def _run_bubble(key: dict[str, Any]) -> Outcome:
    """Closed form and replay of every schedule over M, as fractions."""
    num_stages = key["num_stages"]
    counts = sorted({*MICROBATCHES, *(ratio * num_stages for ratio in PER_STAGE)})
    metrics, fractions, differing = [], {}, 0
    for (name, variant), count in itertools.product(VARIANTS.items(), counts):
        closed, replayed = variant.closed_form(num_stages, count), variant.bubble(num_stages, count)
        differing += closed != replayed
        fractions[f"{name} M={count}"] = {"closed form": str(closed), "replay": str(replayed)}
        at: dict[str, Scalar] = {"schedule": name, "M": count}
        found = _metric("bubble", float(replayed), "ratio", "replayed", at)
        metrics.append(found)
    off = _metric("fractions that differ from the closed form", differing, "number", "replayed")
    return Outcome((*metrics, off), {"num_microbatches": counts, "fractions": fractions})


def _run_formula(key: dict[str, Any]) -> Outcome:
    """Activations alive, counted over the schedule, where every layer's weigh the same."""
    schedule = gpipe(key["num_stages"], key["num_microbatches"], "always")
    found = peak_activations(schedule, key["num_layers"])
    return Outcome((_metric("peak activations / N", float(found), "number"),), {"fraction": str(found)})


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


# Memory


def _run_memory(key: dict[str, Any]) -> Outcome:
    """The fullest stage of a real model at several M."""
    subject, metrics, details = SUBJECTS[key["model"]], [], {}
    for count in subject.num_microbatches:
        found = peak(key["model"], key["num_stages"], count)
        kept = found.pop("kept")
        sizes = {
            "peak activations": found["boundary"] + found["activations"] + found["transients"],
            "formula": found["formula_boundary"] + found["formula_activations"],
            "kept without re-materialization": kept,
        }
        metrics += _bytes(sizes, M=count)
        details[f"M={count}"] = found
    facts = {"title": subject.title, "num_layers": subject.num_layers, "batch_size": BATCH_SIZE}
    counts = subject.num_microbatches
    return Outcome(tuple(metrics), {**facts, "num_microbatches": counts, "bytes": details})


def peak(model: str, num_stages: int, num_microbatches: int) -> dict[str, int]:
    """Bytes of the stage whose activations need most, under gpipe with every micro-batch recomputed.

    "boundary", "activations" and "transients" add up to what the memory model says. The formula says how
    memory grows; with the model's own bytes in it ("formula_boundary" for the inputs of a stage for all N
    examples, "formula_activations" for what is saved of one micro-batch) the two should differ by no more
    than what a backward pass needs for a moment. "kept" is what one device saves for all N examples without
    re-materialization: O(N L).
    """
    from gpipe_bench.experiments.paper.profiles import Reading, amoebanet, transformer
    from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
    from gpipe_bench.pipeline.memory.workers import pipeline_memory

    _, num_layers, num_filters, *_ = SUBJECTS[model]
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


# Sizes that no other table of the paper counts


def _run_size(key: dict[str, Any]) -> Outcome:
    """Parameters of a model of the zoo, on the meta device."""
    import torch

    from gpipe_bench.models import MODELS, count_parameters

    with torch.device("meta"):
        model = MODELS[key["model"]](**_zoo()[key["model"], key["size"]])
    return Outcome((_metric("parameters", count_parameters(model), "parameters"),))


def _zoo() -> dict[tuple[str, str], dict[str, Any]]:
    """Configurations that the paper counts in its text, by model and by size as the paper writes it."""
    from gpipe_bench.models.zoo import CONFIGURATIONS

    return {
        (name, _size(options)): options
        for name, options in CONFIGURATIONS
        if name in COUNTED_MODELS and "preset" not in options
    }


def _size(options: dict[str, Any]) -> str:
    layers, filters = options.get("num_layers"), options.get("num_filters")
    return (
        f"({layers}, {filters})" if filters else f"T({layers}, {options['ffn_dim']}, {options['num_heads']})"
    )


# Judged: our numbers for the formulas that the paper's text gives, and for sizes that no other table counts


def cells(records: Sequence[Record]) -> list[Result]:
    """A cell for every formula that the paper's text gives and we have a record for."""
    return [*_formulas(records), *_early_over_late(records), *_sizes(records)]


def _formulas(records: Sequence[Record]) -> Iterator[Result]:
    for record in of_part(records, "bubble"):
        k = record.case["num_stages"]
        for m in (1, 4, 32) if k in (2, 4, 8) else ():
            yield Result(
                table=TABLE, row=f"bubble (K-1)/(M+K-1) at M={m}", column=f"K={k}", question="as published",
                metric=record.metric("bubble", schedule="gpipe", M=m), record=record,
                note="GPipe without re-materialization, equal stages, a free link.",
            )  # fmt: skip
    for record in of_part(records, "formula"):
        at = f"at L={record.case['num_layers']}, M={record.case['num_microbatches']}"
        yield Result(
            table=TABLE, row=f"activation memory (N + L/K N/M) / N {at}",
            column=f"K={record.case['num_stages']}", question="as published",
            metric=record.metric("peak activations / N"), record=record,
            note="Counted over the schedule's actions, where every layer's activations weigh the same.",
        )  # fmt: skip


def _sizes(records: Sequence[Record]) -> Iterator[Result]:
    for record in of_part(records, "size"):
        name = str(record.case["size"]).replace(", ", ",")
        places = {
            "amoebanet-b": ("amoebanet-b", "parameters", "v5"),
            "transformer-seq2seq": ("nmt-models", name, "parameters"),
        }
        if place := places.get(str(record.case["model"])):
            table, row, column = place
            yield Result(
                table=table, row=row, column=column, question="as published",
                metric=record.metric("parameters"), record=record,
            )  # fmt: skip


def _early_over_late(records: Sequence[Record]) -> Iterator[Result]:
    """Ratio of the bubble with early recomputation to that with late, over all K > 1 and M on record."""
    ratios: list[float] = []
    for record in of_part(records, "bubble"):
        for each in record.metrics:
            late = record.metric("bubble", schedule="gpipe-late", M=each.key.get("M"))
            if each.key.get("schedule") == "gpipe-early" and late is not None and each.value and late.value:
                ratios.append(float(each.value) / float(late.value))
    if not ratios:
        return
    part = Part(what="K and M", low=min(ratios), high=max(ratios))
    yield Result(
        table=SENTENCES, row="bubble with early recomputation over late", column="largest over K and M",
        question="as published", metric=_metric("bubble, early over late", max(ratios), "ratio"),
        spread=Spread(low=min(ratios), high=max(ratios), parts=(part,)),
        note=f"Equal stages, a free link, forward : backward = 1 : 2; {len(ratios)} pairs of K and M.",
    )  # fmt: skip


EXPERIMENT = Experiment(
    name="figure2",
    title="Figure 2 and the formulas: schedules, bubbles, memory",
    source="arXiv v5, Figure 2 and section 2",
    describe=(
        "The schedules as Gantt charts, their bubbles by formula and by replay, and peak activations by "
        "formula and by memory model."
    ),
    profiles={
        "smoke": "charts at M = 4, bubbles up to K = 8, the Transformer's memory",
        "short": "everything; no device is needed",
        "full": "the same as short",
    },
    cases=cases,
    run=run,
    cells=cells,
    paper_tables=("formulas",),
    tables=tables,
    figures=figures,
)

"""Figure 2 and the formulas of section 2: what a pipeline wastes, keeps and sends.

Expected: the replay's bubble equals (K-1)/(M+K-1) exactly, less where recomputation starts early; memory
follows O(N + (L/K)(N/M)), with a backward pass on top; a pipeline sends far fewer bytes than data parallelism
for Transformers, and not for small convolutional models on many stages. No GPU is needed:

    python -m experiments run figure2

Schedules are replayed with equal stages and a free link (`replayed`), memory and traffic follow from shapes
(`modelled`). Nothing here is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from gpipe_bench.experiments.figure2.computed import (
    BATCH_SIZE,
    SUBJECTS,
    UNIT,
    VARIANTS,
    peak,
    peak_activations,
    shape,
    traffic,
)
from gpipe_bench.experiments.figure2.shown import MOST_STAGES, figures, of_part, tables, timelines
from gpipe_bench.experiments.timed.claims import TABLE as SENTENCES
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, PaperTable, RunOptions
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Provenance, Quantity, Record, Scalar
from gpipe_bench.harness.unknowns import load_unknowns, points
from gpipe_bench.harness.verdict import Answer, Part, Spread, printed
from gpipe_bench.pipeline.plan.named import gpipe

DRAWN_STAGES = 4
DRAWN_MICROBATCHES = (4, 8)
STAGES = (2, 4, 8, 16)
MICROBATCHES = (1, 4, 8, 32, 128)
PER_STAGE = (1, 2, 3, 4, 8)  # M / K
COUNTED = ((24, 32, 2), (24, 32, 4), (24, 32, 8), (48, 32, 8), (24, 1, 1))  # L, M, K of the paper's formula
MEMORY_STAGES = (1, 2, 4, 8)
TRAFFIC_STAGES = (2, 4, 8)
SMOKE_TRAFFIC = ("transformer-lm", "resnet101")
BATCH_SIZES = {"transformer-lm": 32, "transformer-seq2seq": 32}
"""Mini-batch of the comparison of traffic: the paper's 32 sequences (Table 1); 128 images otherwise."""
IMAGES = 128
NOT_IN_THE_PAPER = ("amoebanet-a", "amoebanet-c")
MOST_LAYERS = 103  # of a Transformer on 8 partitions (Table 1)
TABLE = "formulas"  # in results/paper.csv


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    drawn = itertools.product(DRAWN_MICROBATCHES[:1] if smoke else DRAWN_MICROBATCHES, VARIANTS)
    profiled = (("transformer-lm", 2.0), ("amoebanet-d", 5.0))[: 1 if smoke else 2]
    return [
        *(Case({"part": "chart", "schedule": name, "num_microbatches": m}, 0.02) for m, name in drawn),
        *(Case({"part": "bubble", "num_stages": k}, 0.02 * k) for k in (STAGES[:3] if smoke else STAGES)),
        *(
            Case({"part": "formula", "num_layers": layers, "num_microbatches": m, "num_stages": k}, 0.01)
            for layers, m, k in COUNTED
        ),
        *(
            Case(
                {"part": "memory", "model": model, "num_stages": k}, first_s if k == MEMORY_STAGES[0] else 0.1
            )
            for model, first_s in profiled
            for k in MEMORY_STAGES
        ),
        *(
            Case({"part": "traffic", "model": model, "size": size}, 0.4)
            for model, size in _zoo()
            if not smoke or model in SMOKE_TRAFFIC
        ),
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    part = str(case.key["part"])
    if part in ("memory", "traffic"):
        import torch

        torch.set_num_threads(1)
    runs = {
        "chart": _run_chart,
        "bubble": _run_bubble,
        "formula": _run_formula,
        "memory": _run_memory,
        "traffic": _run_traffic,
    }
    return runs[part](case.key)


def _run_chart(key: dict[str, Any]) -> Outcome:
    """One step of one schedule, with its timeline for the drawing."""
    variant, num_microbatches = VARIANTS[key["schedule"]], key["num_microbatches"]
    timeline = variant.replay(DRAWN_STAGES, num_microbatches)
    alive = variant.graphs_alive(DRAWN_STAGES, num_microbatches)
    return Outcome(
        (
            _quantity("step", timeline.makespan_s, "number", "replayed", note=UNIT),
            _quantity("bubble", float(timeline.bubble), "ratio", "replayed"),
            _quantity("graphs alive on the first stage", alive, "number", "replayed", note="micro-batches"),
        ),
        {"num_stages": DRAWN_STAGES, "timeline": timeline.to_data()},
    )


def _run_bubble(key: dict[str, Any]) -> Outcome:
    """Closed form and replay of every schedule over M, as fractions."""
    num_stages = key["num_stages"]
    counts = sorted({*MICROBATCHES, *(ratio * num_stages for ratio in PER_STAGE)})
    quantities, fractions, differing = [], {}, 0
    for name, variant in VARIANTS.items():
        for count in counts:
            closed, replayed = variant.closed_form(num_stages, count), variant.bubble(num_stages, count)
            differing += closed != replayed
            fractions[f"{name} M={count}"] = {"closed form": str(closed), "replay": str(replayed)}
            at: dict[str, Scalar] = {"schedule": name, "M": count}
            quantities.append(
                _quantity("bubble", float(replayed), "ratio", "replayed", at, higher_is_better=False)
            )
    quantities.append(
        _quantity("fractions that differ from the closed form", differing, "number", "replayed")
    )
    return Outcome(tuple(quantities), {"num_microbatches": counts, "fractions": fractions})


def _run_formula(key: dict[str, Any]) -> Outcome:
    """Activations alive, counted over the schedule, where every layer's weigh the same."""
    schedule = gpipe(key["num_stages"], key["num_microbatches"], "always")
    found = peak_activations(schedule, key["num_layers"])
    return Outcome((_quantity("peak activations / N", float(found), "number"),), {"fraction": str(found)})


def _run_memory(key: dict[str, Any]) -> Outcome:
    """The fullest stage of a real model at several M."""
    subject, quantities, details = SUBJECTS[key["model"]], [], {}
    for count in subject.num_microbatches:
        found = peak(key["model"], key["num_stages"], count)
        kept = found.pop("kept")
        sizes = {
            "peak activations": found["boundary"] + found["activations"] + found["transients"],
            "formula": found["formula_boundary"] + found["formula_activations"],
            "kept without re-materialization": kept,
        }
        quantities += _bytes(sizes, M=count)
        details[f"M={count}"] = found
    facts = {"title": subject.title, "num_layers": subject.num_layers, "batch_size": BATCH_SIZE}
    return Outcome(
        tuple(quantities), {**facts, "num_microbatches": subject.num_microbatches, "bytes": details}
    )


def _run_traffic(key: dict[str, Any]) -> Outcome:
    """Bytes sent by a pipeline and by data parallelism."""
    found = shape(key["model"], _zoo()[key["model"], key["size"]])
    batch_size = BATCH_SIZES.get(key["model"], IMAGES)
    quantities = [
        _quantity("parameters", found.num_parameters, "parameters"),
        _quantity("mini-batch", batch_size, "examples"),
    ]
    stages = [k for k in TRAFFIC_STAGES if k <= len(found.flops)]  # the smallest Transformer has five layers
    for num_stages in stages:
        sent = traffic(found, num_stages)
        sizes = {
            "pipeline, busiest device": sent.pipeline_busiest * batch_size,
            "pipeline, all devices": sent.pipeline_total * batch_size,
            "data parallelism, each device": sent.data_parallel_each,
            "data parallelism, all devices": sent.data_parallel_total,
        }
        even, note = (
            sent.data_parallel_each / sent.pipeline_busiest,
            "the pipeline's busiest device sends less below it",
        )
        quantities += _bytes(sizes, K=num_stages)
        quantities.append(
            _quantity("break-even mini-batch", even, "examples", key={"K": num_stages}, note=note)
        )
    return Outcome(tuple(quantities), {"num_stages": stages})


def _quantity(
    name: str,
    value: float,
    unit: str,
    provenance: Provenance = "modelled",
    key: Mapping[str, Scalar] | None = None,
    **more: Any,
) -> Quantity:
    return Quantity(name=name, key=key or {}, value=value, unit=unit, provenance=provenance, **more)


def _bytes(sizes: Mapping[str, int], **key: Scalar) -> list[Quantity]:
    return [_quantity(name, size, "bytes", key=key, higher_is_better=False) for name, size in sizes.items()]


def _zoo() -> dict[tuple[str, str], dict[str, Any]]:
    """By model and size, what the paper trains on up to 8 devices, built as the paper does."""
    from gpipe_bench.models.zoo import CONFIGURATIONS

    return {
        (name, _size(options)): options
        for name, options in CONFIGURATIONS
        if name not in NOT_IN_THE_PAPER
        and options.get("num_layers", 0) <= MOST_LAYERS
        and "preset" not in options
    }


def _size(options: dict[str, Any]) -> str:
    """The configuration in a word, as the paper writes it: (18, 256), 48 layers."""
    layers, filters = options.get("num_layers"), options.get("num_filters")
    if filters:
        return f"({layers}, {filters})"
    if "ffn_dim" in options:
        return f"T({layers}, {options['ffn_dim']}, {options['num_heads']})"
    return f"{layers} layers" if layers else "224x224"


# Judged: our numbers for the formulas that the paper's text gives, and for sizes that no other table counts.


def cells(records: Sequence[Record]) -> list[Answer]:
    """A cell for every formula that the paper's text gives and we have a record for."""
    return [*_formulas(records), *_least_multiple(records), *_early_over_late(records), *_sizes(records)]


def _formulas(records: Sequence[Record]) -> Iterator[Answer]:
    for record in of_part(records, "bubble"):
        k = record.case["num_stages"]
        for m in (1, 4, 32) if k in (2, 4, 8) else ():
            yield Answer(
                table=TABLE,
                row=f"bubble (K-1)/(M+K-1) at M={m}",
                column=f"K={k}",
                question="as published",
                quantity=record.quantity("bubble", schedule="gpipe", M=m),
                record=record,
                note="GPipe without re-materialization, equal stages, a free link.",
            )
    for record in of_part(records, "formula"):
        at = f"at L={record.case['num_layers']}, M={record.case['num_microbatches']}"
        yield Answer(
            table=TABLE,
            row=f"activation memory (N + L/K N/M) / N {at}",
            column=f"K={record.case['num_stages']}",
            question="as published",
            quantity=record.quantity("peak activations / N"),
            record=record,
            note="Counted over the schedule's actions, where every layer's activations weigh the same.",
        )


def _sizes(records: Sequence[Record]) -> Iterator[Answer]:
    for record in of_part(records, "traffic"):
        name = str(record.case["size"]).replace(", ", ",")
        places = {
            "amoebanet-b": ("amoebanet-b", "parameters", "v5"),
            "transformer-seq2seq": ("nmt-models", name, "parameters"),
        }
        if place := places.get(str(record.case["model"])):
            table, row, column = place
            yield Answer(
                table=table, row=row, column=column, question="as published",
                quantity=record.quantity("parameters"), record=record,
            )  # fmt: skip


def least_multiple(share: float, *, early: bool = False) -> int:
    """The least whole M / K with which the bubble stays below a share for every K: by the formula, or with
    recomputation as early as it can be and forward : backward = 1 : 2.
    """

    def bubble(k: int, m: int) -> Fraction:
        return Fraction(3 * (k - 1), 4 * m + 3 * (k - 1)) if early else Fraction(k - 1, m + k - 1)

    return next(
        ratio
        for ratio in itertools.count(1)
        if all(bubble(k, ratio * k) < share for k in range(1, MOST_STAGES + 1))
    )


def _least_multiple(records: Sequence[Record]) -> Iterator[Answer]:
    """How many micro-batches for each stage make the bubble negligible; the paper says that 4 do."""
    negligible = load_unknowns().find("claims", "negligible_share")
    if not of_part(records, "bubble"):
        return
    high, middle, low = (
        [least_multiple(float(share), early=early) for early in (False, True)] for share in points(negligible)
    )
    row = "micro-batches per stage for a negligible bubble"
    cell = next(cell for cell in load_paper() if cell.key == (TABLE, row, "M / K"))
    parts = (
        Part(what="negligible_share", low=low[0], high=high[0]),
        Part(what="recomputation early or late", low=min(middle), high=max(middle)),
    )
    yield Answer(
        table=TABLE,
        row=row,
        column="M / K",
        question="as published",
        quantity=_quantity(row, middle[0], "ratio"),
        spread=Spread(
            low=min(low), high=max(high), parts=parts, combinations=6, values=(*low, *middle, *high)
        ),
        allowed=printed(replace(cell, bound="at most")),  # the text says that so many are enough
        note=(
            "The least whole M / K with which the bubble keeps below a negligible share at K = 8, for both "
            "ends and the middle of what negligible may mean: by (K-1)/(M+K-1), and with recomputation as "
            "early as the same sentence says (found after looking)."
        ),
    )


def _early_over_late(records: Sequence[Record]) -> Iterator[Answer]:
    """What early recomputation makes of the bubble, over all K > 1 and M on record."""
    ratios: list[float] = []
    for record in of_part(records, "bubble"):
        for each in record.quantities:
            late = record.quantity("bubble", schedule="gpipe-late", M=each.key.get("M"))
            if each.key.get("schedule") == "gpipe-early" and late is not None and each.value and late.value:
                ratios.append(float(each.value) / float(late.value))
    if not ratios:
        return
    part = Part(what="K and M", low=min(ratios), high=max(ratios))
    yield Answer(
        table=SENTENCES,
        row="bubble with early recomputation over late",
        column="largest over K and M",
        question="as published",
        quantity=_quantity("bubble, early over late", max(ratios), "ratio"),
        spread=Spread(low=min(ratios), high=max(ratios), parts=(part,)),
        note=f"Equal stages, a free link, forward : backward = 1 : 2; {len(ratios)} pairs of K and M.",
    )


EXPERIMENT = Experiment(
    name="figure2",
    title="Figure 2 and the formulas: schedules, bubbles, memory, traffic",
    source="arXiv v5, Figure 2 and section 2",
    describe=(
        "The schedules as Gantt charts, their bubble fractions by formula and by replay, peak activations by "
        "formula and by memory model, and the bytes a pipeline sends against data parallelism."
    ),
    profiles={
        "smoke": "charts at M = 4, bubbles up to K = 8, the Transformer's memory, traffic of a few models",
        "short": "everything; no device is needed",
        "full": "the same as short",
    },
    cases=cases,
    run=run,
    cells=cells,
    paper_tables={
        "formulas": PaperTable(
            title="Figure 2 and the formulas of section 2",
            short="Formulas",
            about=(
                "Bubble fractions and activation memory by the paper's algebra and by replaying the schedule."
            ),
        ),
    },
    tables=tables,
    figures=figures,
    timelines=timelines,
    options=(),
)

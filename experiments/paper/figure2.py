"""Figure 2 and the formulas of section 2: what a pipeline wastes and keeps.

Expected: the replay's bubble equals (K-1)/(M+K-1) exactly, less where recomputation starts early; activations
follow O(N + (L/K)(N/M)). No GPU is needed:

    python -m experiments run figure2

Schedules are replayed with equal stages, a free link and forward : recompute : backward = 1 : 1 : 2, time
counted in forwards of one micro-batch on one stage, so everything is a whole number and "equal" means equal
(`replayed`). Nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from gpipe_bench.experiments.paper.figure2_schedules import (
    DRAWN_STAGES,
    UNIT,
    VARIANTS,
    figures,
    peak_activations,
    tables,
)
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.paper import SENTENCES
from gpipe_bench.harness.record import Metric, Record, Scalar, of_case
from gpipe_bench.harness.verdict import Part, Result, Spread
from gpipe_bench.pipeline.plan.named import gpipe

DRAWN_MICROBATCHES = (4, 8)
STAGES, MICROBATCHES, PER_STAGE = (2, 4, 8, 16), (1, 4, 8, 32, 128), (1, 2, 3, 4, 8)  # the last are M / K
COUNTED = ((24, 32, 2), (24, 32, 4), (24, 32, 8), (48, 32, 8), (24, 1, 1))  # L, M, K of the paper's formula
SIZES = {"amoebanet-b": "amoebanet-b", "transformer-seq2seq": "nmt-models"}
"""Models whose parameters no other table of the paper counts, and their tables."""


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    drawn = product(DRAWN_MICROBATCHES[:1] if smoke else DRAWN_MICROBATCHES, VARIANTS)
    found = [Case({"part": "chart", "schedule": name, "num_microbatches": m}, 0.02) for m, name in drawn]
    found += [Case({"part": "bubble", "num_stages": k}, 0.02 * k) for k in (STAGES[:3] if smoke else STAGES)]
    found += [
        Case({"part": "formula", "num_layers": layers, "num_microbatches": m, "num_stages": k}, 0.01)
        for layers, m, k in COUNTED
    ]
    return found + [Case({"part": "size", "model": model, "size": size}, 0.4) for model, size in _zoo()]


def run(case: Case, options: RunOptions) -> Outcome:
    key: dict[str, Any] = case.key
    match key["part"]:
        case "chart":
            m, variant = key["num_microbatches"], VARIANTS[key["schedule"]]
            timeline = variant.replay(DRAWN_STAGES, m)
            metrics = [
                Metric("step", timeline.makespan_s, "number", "replayed", note=UNIT),
                Metric("bubble", float(timeline.bubble), "ratio", "replayed"),
                Metric("graphs alive on the first stage", variant.graphs_alive(DRAWN_STAGES, m), "number",
                       "replayed", note="micro-batches"),
            ]  # fmt: skip
            return Outcome(tuple(metrics), {"num_stages": DRAWN_STAGES, "timeline": timeline.to_data()})
        case "bubble":
            return _bubble(key["num_stages"])
        case "formula":
            schedule = gpipe(key["num_stages"], key["num_microbatches"], "always")
            found = peak_activations(schedule, key["num_layers"])
            metric = Metric("peak activations / N", float(found), "number", "modelled")
            return Outcome((metric,), {"fraction": str(found)})
    import torch

    from gpipe_bench.models import MODELS as ZOO
    from gpipe_bench.models import count_parameters

    with torch.device("meta"):
        model = ZOO[key["model"]](**_zoo()[key["model"], key["size"]])
    return Outcome((Metric("parameters", count_parameters(model), "parameters", "modelled"),))


def _bubble(k: int) -> Outcome:
    """Closed form and replay of every schedule over M, as fractions."""
    counts = sorted({*MICROBATCHES, *(ratio * k for ratio in PER_STAGE)})
    metrics, fractions, differing = [], {}, 0
    for (name, variant), m in product(VARIANTS.items(), counts):
        closed, replayed = variant.closed_form(k, m), variant.bubble(k, m)
        differing += closed != replayed
        fractions[f"{name} M={m}"] = {"closed form": str(closed), "replay": str(replayed)}
        at: dict[str, Scalar] = {"schedule": name, "M": m}
        metrics.append(Metric("bubble", float(replayed), "ratio", "replayed", key=at))
    off = Metric("fractions that differ from the closed form", differing, "number", "replayed")
    return Outcome((*metrics, off), {"num_microbatches": counts, "fractions": fractions})


def _zoo() -> Mapping[tuple[str, str], dict[str, Any]]:
    """Configurations that the paper counts in its text, by model and by size as the paper writes it."""
    from gpipe_bench.models.zoo import CONFIGURATIONS

    def size(layers: int, filters: int = 0, ffn_dim: int = 0, num_heads: int = 0, **_: Any) -> str:
        return f"({layers}, {filters})" if filters else f"T({layers}, {ffn_dim}, {num_heads})"

    return {
        (name, size(options["num_layers"], options.get("num_filters", 0), **options)): options
        for name, options in CONFIGURATIONS
        if name in SIZES and "preset" not in options
    }


# Answers: formulas that the paper's text gives, and sizes


def cells(records: Sequence[Record]) -> list[Result]:
    """Formulas first, what says something in words of them, then sizes."""
    found = [*_formulas(records)]
    formulas = [each for each in found if each.table == "formulas"]
    bubbles = of_case(records, "done", part="bubble")
    return [*formulas, *_early_over_late(bubbles), *(each for each in found if each not in formulas)]


def _formulas(records: Sequence[Record]) -> Iterator[Result]:
    for record in of_case(records, "done"):
        key = record.case
        answer = partial(Result, table="formulas", question="as published", record=record)
        match key["part"]:
            case "bubble" if key["num_stages"] in (2, 4, 8):
                for m in (1, 4, 32):
                    yield answer(
                        row=f"bubble (K-1)/(M+K-1) at M={m}", column=f"K={key['num_stages']}",
                        metric=record.metric("bubble", schedule="gpipe", M=m),
                        note="GPipe without re-materialization, equal stages, a free link.",
                    )  # fmt: skip
            case "formula":
                at = f"at L={key['num_layers']}, M={key['num_microbatches']}"
                yield answer(
                    row=f"activation memory (N + L/K N/M) / N {at}", column=f"K={key['num_stages']}",
                    metric=record.metric("peak activations / N"),
                    note="Counted over the schedule's actions, where every layer's activations weigh the "
                    "same.",
                )  # fmt: skip
            case "size":
                size = str(key["size"]).replace(", ", ",")
                places = {"amoebanet-b": ("parameters", "v5"), "transformer-seq2seq": (size, "parameters")}
                row, column = places[str(key["model"])]
                yield answer(
                    table=SIZES[str(key["model"])], row=row, column=column, metric=record.metric("parameters")
                )


def _early_over_late(bubbles: Sequence[Record]) -> Iterator[Result]:
    """Ratio of the bubble with early recomputation to that with late, over all K > 1 and M on record."""
    ratios: list[float] = []
    for record in bubbles:
        for each in record.metrics:
            late = record.metric("bubble", schedule="gpipe-late", M=each.key.get("M"))
            if each.key.get("schedule") == "gpipe-early" and late is not None and each.value and late.value:
                ratios.append(float(each.value) / float(late.value))
    if ratios:
        low, high = min(ratios), max(ratios)
        yield Result(
            table=SENTENCES, row="bubble with early recomputation over late", column="largest over K and M",
            question="as published", metric=Metric("bubble, early over late", high, "ratio", "modelled"),
            spread=Spread(low=low, high=high, parts=(Part(what="K and M", low=low, high=high),)),
            note=f"Equal stages, a free link, forward : backward = 1 : 2; {len(ratios)} pairs of K and M.",
        )  # fmt: skip


EXPERIMENT = Experiment(
    name="figure2",
    title="Figure 2 and the formulas: schedules and bubbles",
    source="arXiv v5, Figure 2 and section 2",
    describe=("The schedules as Gantt charts, their bubbles by formula and by replay, and peak activations."),
    profiles={
        "smoke": "charts at M = 4, bubbles up to K = 8",
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

"""Figure 2 and the formulas of section 2: what a pipeline wastes, keeps and sends.

Expected: the replay's bubble equals (K-1)/(M+K-1) exactly, less where recomputation starts early; memory
follows O(N + (L/K)(N/M)), with a backward pass on top; a pipeline sends far fewer bytes than data parallelism
for Transformers, and not for small convolutional models on many stages. No GPU is needed:

    python -m experiments run figure2

Schedules are replayed with equal stages and a free link (`replayed`), memory and traffic follow from shapes
(`modelled`). Nothing here is timed.
"""

from __future__ import annotations

from typing import Any

from gpipe_bench.experiments.figure2.figures import figures, timelines
from gpipe_bench.experiments.figure2.schedules import UNIT, VARIANTS, graphs_alive, peak_activations
from gpipe_bench.experiments.figure2.tables import cells, tables
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.records.record import Quantity, Scalar
from gpipe_bench.harness.shown import PaperTable
from gpipe_bench.pipeline.plan.schedule import gpipe

DRAWN_STAGES = 4
DRAWN_MICROBATCHES = (4, 8)
STAGES = (2, 4, 8, 16)
MICROBATCHES = (1, 4, 8, 32, 128)
PER_STAGE = (1, 2, 3, 4, 8)  # M / K
COUNTED = ((24, 32, 2), (24, 32, 4), (24, 32, 8), (48, 32, 8), (24, 1, 1))  # L, M, K of the paper's formula
MEMORY_STAGES = {"transformer-lm": (1, 2, 4, 8), "amoebanet-d": (1, 2, 4, 8)}
TRAFFIC_STAGES = (2, 4, 8)
SMOKE_TRAFFIC = ("transformer-lm", "resnet101")
BATCH_SIZES = {"transformer-lm": 32, "transformer-seq2seq": 32}
"""Mini-batch of the comparison of traffic: the paper's 32 sequences (Table 1); 128 images otherwise."""
IMAGES = 128
NOT_IN_THE_PAPER = ("amoebanet-a", "amoebanet-c")
MOST_LAYERS = 103  # of a Transformer on 8 partitions (Table 1)


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    found = [
        Case({"part": "chart", "schedule": name, "num_microbatches": count}, 0.02)
        for count in (DRAWN_MICROBATCHES[:1] if smoke else DRAWN_MICROBATCHES)
        for name in VARIANTS
    ]
    found += [
        Case({"part": "bubble", "num_stages": count}, 0.02 * count)
        for count in (STAGES[:3] if smoke else STAGES)
    ]
    found += [
        Case({"part": "formula", "num_layers": layers, "num_microbatches": m, "num_stages": k}, 0.01)
        for layers, m, k in COUNTED
    ]
    for model, counts in MEMORY_STAGES.items():
        if smoke and model != "transformer-lm":
            continue
        first = 2.0 if model == "transformer-lm" else 5.0
        found += [
            Case({"part": "memory", "model": model, "num_stages": k}, first if k == counts[0] else 0.1)
            for k in counts
        ]
    for model, size in _zoo():
        if not smoke or model in SMOKE_TRAFFIC:
            found.append(Case({"part": "traffic", "model": model, "size": size}, 0.4))
    return found


def run(case: Case, options: RunOptions) -> Outcome:
    match case.key["part"]:
        case "chart":
            return _run_chart(case.key)
        case "bubble":
            return _run_bubble(case.key)
        case "formula":
            return _run_formula(case.key)
    import torch

    torch.set_num_threads(1)
    return _run_memory(case.key) if case.key["part"] == "memory" else _run_traffic(case.key)


def _run_chart(key: dict[str, Any]) -> Outcome:
    """One step of one schedule, with its timeline for the drawing."""
    variant, num_microbatches = VARIANTS[key["schedule"]], key["num_microbatches"]
    timeline = variant.replay(DRAWN_STAGES, num_microbatches)
    alive = graphs_alive(variant, DRAWN_STAGES, num_microbatches)
    return Outcome(
        (
            _number("step", timeline.makespan_s, "replayed", note=UNIT),
            Quantity(name="bubble", value=float(timeline.bubble), unit="ratio", provenance="replayed"),
            _number("graphs alive on the first stage", alive, "replayed", note="micro-batches"),
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
            quantities.append(
                Quantity(
                    name="bubble", key={"schedule": name, "M": count}, value=float(replayed), unit="ratio",
                    provenance="replayed", higher_is_better=False,
                )
            )  # fmt: skip
    quantities.append(_number("fractions that differ from the closed form", differing, "replayed"))
    return Outcome(tuple(quantities), {"num_microbatches": counts, "fractions": fractions})


def _run_formula(key: dict[str, Any]) -> Outcome:
    """Activations alive, counted over the schedule, where every layer's weigh the same."""
    schedule = gpipe(key["num_stages"], key["num_microbatches"], "always")
    peak = peak_activations(schedule, key["num_layers"])
    return Outcome((_number("peak activations / N", float(peak), "modelled"),), {"fraction": str(peak)})


def _run_memory(key: dict[str, Any]) -> Outcome:
    """The fullest stage of a real model at several M."""
    from gpipe_bench.experiments.figure2.memory import BATCH_SIZE, SUBJECTS, peak

    subject, quantities, details = SUBJECTS[key["model"]], [], {}
    for count in subject.num_microbatches:
        found = peak(key["model"], key["num_stages"], count)
        sizes = {
            "peak activations": found.total,
            "formula": found.formula,
            "kept without re-materialization": found.kept,
        }
        quantities += [_modelled_bytes(what, size, M=count) for what, size in sizes.items()]
        details[f"M={count}"] = {
            "boundary": found.boundary, "activations": found.activations, "transients": found.transients,
            "formula_boundary": found.formula_boundary, "formula_activations": found.formula_activations,
        }  # fmt: skip
    facts = {"title": subject.title, "num_layers": subject.num_layers, "batch_size": BATCH_SIZE}
    return Outcome(
        tuple(quantities), {**facts, "num_microbatches": subject.num_microbatches, "bytes": details}
    )


def _run_traffic(key: dict[str, Any]) -> Outcome:
    """Bytes sent by a pipeline and by data parallelism."""
    from gpipe_bench.experiments.figure2.traffic import shape, traffic

    found = shape(key["model"], _zoo()[key["model"], key["size"]])
    batch_size = BATCH_SIZES.get(key["model"], IMAGES)
    quantities = [
        Quantity(name="parameters", value=found.num_parameters, unit="parameters", provenance="modelled"),
        Quantity(name="mini-batch", value=batch_size, unit="examples", provenance="modelled"),
    ]
    for num_stages in TRAFFIC_STAGES:
        if num_stages > len(found.flops):
            continue  # the smallest Transformer has five layers
        sent = traffic(found, num_stages)
        quantities += [
            _modelled_bytes("pipeline, busiest device", sent.pipeline_busiest * batch_size, K=num_stages),
            _modelled_bytes("pipeline, all devices", sent.pipeline_total * batch_size, K=num_stages),
            _modelled_bytes("data parallelism, each device", sent.data_parallel_each, K=num_stages),
            _modelled_bytes("data parallelism, all devices", sent.data_parallel_total, K=num_stages),
            Quantity(
                name="break-even mini-batch", key={"K": num_stages},
                value=sent.data_parallel_each / sent.pipeline_busiest, unit="examples", provenance="modelled",
                note="the pipeline's busiest device sends less below it",
            ),
        ]  # fmt: skip
    return Outcome(tuple(quantities), {"num_stages": [k for k in TRAFFIC_STAGES if k <= len(found.flops)]})


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


def _number(name: str, value: float, provenance: Any, note: str = "") -> Quantity:
    return Quantity(name=name, value=value, unit="number", provenance=provenance, note=note)


def _modelled_bytes(name: str, value: int, **key: Scalar) -> Quantity:
    return Quantity(
        name=name, key=key, value=value, unit="bytes", provenance="modelled", higher_is_better=False
    )


PAPER_TABLES = {
    "formulas": PaperTable(
        title="Figure 2 and the formulas of section 2",
        short="Formulas",
        about="Bubble fractions and activation memory by the paper's algebra and by replaying the schedule.",
    ),
}


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
    paper_tables=PAPER_TABLES,
    tables=tables,
    figures=figures,
    timelines=timelines,
    options=(),
)

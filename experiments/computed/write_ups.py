"""Claims that web pages make about GPipe, checked as the paper's are: by formula, replay and count.

They are not the paper's, so they count nowhere among its numbers. Where one contradicts the paper, its row in
paper.csv says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from gpipe_bench.experiments.computed.answer import Answer, over
from gpipe_bench.experiments.computed.quotients import parameters, parameters_of
from gpipe_bench.experiments.figure2.schedules import VARIANTS, graphs_alive, peak_activations
from gpipe_bench.experiments.figure2.tables import least_multiple
from gpipe_bench.harness.judging.spread import Part, Spread
from gpipe_bench.harness.judging.unknowns import load_unknowns
from gpipe_bench.pipeline.plan.schedule import gpipe

STAGES, MICROBATCHES = 4, 8  # of the second page's example
MOST_STAGES = 128  # of the paper
LARGE = 32  # micro-batches, the paper's most
REPLAYED = "GPipe without re-materialization, equal stages, a free link"
RECOMPUTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("resnet101", {}),
    ("amoebanet-d", {"num_layers": 18, "num_filters": 256}),
    ("transformer-lm", {"num_layers": 48}),
)
"""Models whose speed the paper gives."""


def bubbles() -> list[Answer]:
    """Idle shares of replayed schedules."""
    pipeline, naive = VARIANTS["gpipe"], VARIANTS["naive"]
    found = [
        _percent("bubble", f"K=4, M={count}", pipeline.bubble(4, count), REPLAYED)
        for count in (4, 8, 32, 128)
    ]
    found.append(_percent("pipeline efficiency", "K=4, M=8", 1 - pipeline.bubble(4, 8), REPLAYED))
    found += [
        _percent(
            "busy share of a device without pipelining", f"K={count}", 1 - naive.bubble(count, 1),
            "the naive schedule, equal stages, a free link",
        )
        for count in (4, 8)
    ]  # fmt: skip
    rule = [100 * float(pipeline.closed_form(count, 4 * count)) for count in range(2, MOST_STAGES + 1)]
    found += [
        Answer(
            row="bubble at M >= 4K",
            column="any K",
            value=rule[-1],
            unit="%",
            what=f"(K-1)/(5K-1) for K from 2 to {MOST_STAGES}",
            spread=over("number of stages", rule),
        ),
        Answer(
            row="bubble at M = 4K",
            column="K large",
            value=rule[-1],
            unit="%",
            what=f"(K-1)/(5K-1) at K = {MOST_STAGES}, the paper's most",
        ),
    ]
    return found


def _percent(row: str, column: str, share: Fraction, what: str) -> Answer:
    return Answer(
        row=row, column=column, value=100 * float(share), unit="%", what=what, provenance="replayed"
    )


def schedules() -> list[Answer]:
    """1F1B beside GPipe, neither with re-materialization."""
    example = f"{STAGES} GPUs, {MICROBATCHES} micro-batches"
    ours, other = VARIANTS["1f1b"], VARIANTS["gpipe"]
    idle = ours.bubble(STAGES, MICROBATCHES) / other.bubble(STAGES, MICROBATCHES)
    alive = {
        name: graphs_alive(VARIANTS[name], STAGES, MICROBATCHES) for name in ("1f1b", "gpipe")
    }  # of the first stage, which keeps the most
    return [
        _replayed("bubble of 1F1B over GPipe's", example, float(idle), "ratio", "of both schedules replayed"),
        _replayed(
            "micro-batches in flight, 1F1B", example, alive["1f1b"], "micro-batches",
            "most whose graph the first stage keeps",
        ),
        _replayed(
            "micro-batches in flight, GPipe", example, alive["gpipe"], "micro-batches",
            "most whose graph the first stage keeps",
        ),
        _replayed(
            "activation memory of 1F1B over GPipe's", example, alive["1f1b"] / alive["gpipe"], "ratio",
            "most graphs on the fullest stage, without re-materialization",
        ),
    ]  # fmt: skip


def _replayed(row: str, column: str, value: float, unit: str, what: str) -> Answer:
    return Answer(row=row, column=column, value=value, unit=unit, what=what, provenance="replayed")


def growth_of_memory() -> list[Answer]:
    """A device's fullest moment in activations of one micro-batch, over layers + micro-batches."""
    shares = [
        float(peak_activations(gpipe(1, m, "always"), layers) * m / (layers + m))
        for layers in (8, 24, 48)
        for m in (1, 4, 32, 128)
    ]
    return [
        Answer(
            row="activation memory with re-materialization",
            column="of N layers and M micro-batches",
            value=shares[0],
            unit="number",
            what=(
                "layers' activations of one micro-batch alive at once, over N + M, on one device: the "
                "paper's formula with constants of 1, counted in micro-batches instead of examples"
            ),
            spread=over("number of layers and of micro-batches", shares),
        )
    ]


def speed() -> list[Answer]:
    """What twice as many stages gain by the closed form at the paper's largest M."""
    gains = [_gain(count) for count in (2, 4)]
    return [
        Answer(
            row="throughput with twice the devices",
            column="large M",
            value=gains[0],
            unit="ratio",
            what=(
                f"2 (M+K-1)/(M+2K-1) at M = {LARGE}, from 2 to 4 and from 4 to 8 stages; the paper's Table 2 "
                "has 1.5 to 1.9 there"
            ),
            spread=over("number of stages", gains),
        ),
        _negligible(),
    ]


def _gain(num_stages: int) -> float:
    busy = [1 - VARIANTS["gpipe"].closed_form(count, LARGE) for count in (num_stages, 2 * num_stages)]
    return float(2 * busy[1] / busy[0])


def _negligible() -> Answer:
    limit = load_unknowns().find("claims", "negligible_share")
    assert limit.low is not None
    assert limit.high is not None
    fewest, most = least_multiple(limit.high), least_multiple(limit.low)
    return Answer(
        row="bubble negligible",
        column="M / K",
        value=(fewest + most) / 2,
        unit="ratio",
        what="the least whole M / K with a negligible bubble at K = 8, for both ends of that word",
        spread=Spread(
            low=fewest,
            high=most,
            parts=(Part(what="negligible_share", low=fewest, high=most),),
            combinations=2,
        ),
    )


def operations() -> list[Answer]:
    """A forward once more, over forward and backward, in operations of the models' own."""
    shares = [100 * recomputed_share(name, options) for name, options in RECOMPUTED]
    what = (
        "operations of a forward over those of forward and backward: ResNet-101, AmoebaNet-D, Transformer-48"
    )
    return [
        Answer(
            row=row,
            column="share of the step without",
            value=shares[0],
            unit="%",
            what=what,
            spread=over("model", shares),
        )
        for row in (
            "extra computation by recomputation",
            "extra computation by recomputation, second page",
        )
    ]


def recomputed_share(name: str, options: dict[str, Any]) -> float:
    """Operations of a forward over those of forward and backward, counted without computing anything."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from gpipe_bench.models import MODELS, example_batch, loss_fn

    with torch.device("meta"):
        model = MODELS[name](**options)
    inputs, target = example_batch(name, 2, device="meta", **options)
    with FlopCounterMode(display=False) as counter:
        loss = loss_fn(name, **options)(model(inputs), target)
        forward = counter.get_total_flops()
        torch.autograd.backward(loss)
        both = counter.get_total_flops()
    return float(forward / both)


def traffic() -> list[Answer]:
    """What the busiest device sends in a step: a pipeline of 8 stages over data parallelism of 8 replicas."""
    from gpipe_bench.experiments.figure2.traffic import shape
    from gpipe_bench.experiments.figure2.traffic import traffic as sent_by

    ratios = []
    for layers in (48, 103):
        sent = sent_by(shape("transformer-lm", {"num_layers": layers}), 8)
        ratios.append(32 * sent.pipeline_busiest / sent.data_parallel_each)
    return [
        Answer(
            row="what a pipeline sends over what data parallelism sends",
            column="very large models with small activations",
            value=ratios[-1],
            unit="ratio",
            what="bytes sent by the busiest of 8 devices in a step of 32 sequences: Transformer-48 and -103",
            spread=over("number of layers", ratios),
        )
    ]


def counts() -> list[Answer]:
    """Sizes of the models that the pages name."""
    size = {"num_layers": 18, "num_filters": 512, "num_classes": 1001}
    image = [parameters("amoebanet-d", size | {"aux_head": head}) for head in (False, True)]
    return [
        Answer(
            row="parameters of the image model",
            column="AmoebaNet-D",
            value=image[0],
            unit="parameters",
            what="AmoebaNet-D (18, 512), without and with the auxiliary head",
            spread=replace(over("auxiliary head", image), combinations=len(image)),
        ),
        Answer(
            row="parameters of the largest Transformer",
            column="8 TPUs",
            value=parameters_of("transformer", "pipeline-8"),
            unit="parameters",
            what="the paper's model on 8 accelerators, Transformer-L of 103 layers, counted",
        ),
        Answer(
            row="parameters of the largest AmoebaNet",
            column="8 accelerators",
            value=parameters_of("amoebanet", "pipeline-8"),
            unit="parameters",
            what="the paper's model on 8 accelerators, AmoebaNet-D (72, 512), counted",
        ),
        Answer(
            row="size over GPT-2 XL's",
            column="83B / 1.5B",
            value=83 / 1.5,
            unit="ratio",
            what="the quotient of the two sizes that the page names",
        ),
    ]


WRITE_UPS: dict[str, Callable[[], list[Answer]]] = {
    "bubbles": bubbles,
    "schedules": schedules,
    "memory": growth_of_memory,
    "speed": speed,
    "operations": operations,
    "traffic": traffic,
    "sizes": counts,
}
"""By what they are about."""

"""What a pipeline and data parallelism send in a step, by the shapes of a model, and as counted.

Expected: a pipeline sends a small part of what replicas send for Transformers, and not for small AmoebaNets.

    python -m experiments run grid

Only activations at the boundaries of a pipeline travel, and their gradients back. Data parallelism moves the
gradient of every parameter around a ring, twice, whatever the batch. By shape at the paper's sizes, with cuts
of equal operations, and for the range those of equal parameters and of as many layers. Counted on two
processes of a small model: what each of them wrote in a step (Linux counts it, in /proc/self/io), all
messages over sockets. Whatever else is sent is in the count.

How long steps take on such grids, beside their prediction, is measured by `plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Metric, Record, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.verdict import Part, Result, Spread
from gpipe_bench.pipeline.plan.partition import partition

MODELLED, COUNTED = "traffic", "traffic, counted"
MICROBATCHES = 4
COUNTED_STEPS = 3  # two before them do not count
RATIO = "pipeline over data parallelism"
LANGUAGE, IMAGES = "transformer-lm", "amoebanet-d"
_IMAGE_67 = {"num_layers": 3, "num_filters": 32, "image_size": 67, "num_classes": 10, "aux_head": False}


class Workload(NamedTuple):
    """A model with its batch on so many ranks; `column` is its in results/paper.csv."""

    model: str
    options: Mapping[str, Any]
    batch_size: int
    ranks: int
    column: str


FULL_SIZE = {
    "Transformer-24": Workload(
        LANGUAGE, {"num_layers": 24}, 32, 4, "Transformer-24, 4 accelerators, 32 sequences"
    ),
    "AmoebaNet-D (18, 256)": Workload(
        IMAGES, {"num_layers": 18, "num_filters": 256, "num_classes": 1000}, 128, 4,
        "AmoebaNet-D (18, 256), 4 accelerators, 128 images",
    ),
    "AmoebaNet-D (3, 32)": Workload(
        IMAGES, _IMAGE_67, 32, 4, "AmoebaNet-D (3, 32), 4 accelerators, 32 images"
    ),
}  # fmt: skip
"""Models whose traffic is computed, by name and shape."""
SMALL = {
    "Transformer-6": Workload(
        LANGUAGE,
        {
            "num_layers": 6, "d_model": 128, "ffn_dim": 512, "num_heads": 4, "seq_len": 32,
            "vocab_size": 1000, "dropout": 0.0,
        },
        16, 2, "Transformer-6 of width 128, 2 processes",
    ),
    "AmoebaNet-D (3, 32)": Workload(IMAGES, _IMAGE_67, 8, 2, "AmoebaNet-D (3, 32), 2 processes"),
}  # fmt: skip
"""Models whose traffic is counted."""


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    shapes = ("AmoebaNet-D (3, 32)",) if smoke else tuple(FULL_SIZE)
    counted = ("Transformer-6",) if smoke else tuple(SMALL)
    return [
        *(Case({"part": MODELLED, "model": name}, 2.0) for name in shapes),
        *(Case({"part": COUNTED, "model": name}, 15.0) for name in counted),
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    name = str(case.key["model"])
    return by_shape(FULL_SIZE[name]) if case.key["part"] == MODELLED else counted(SMALL[name])


# By shape


class Shape(NamedTuple):
    """Sizes of a model's layers that decide its traffic; bytes are those of one example in float32."""

    flops: tuple[int, ...]  # of the forward
    parameters: tuple[int, ...]
    output_bytes: tuple[int, ...]  # what the layer hands on
    output_gradient_bytes: tuple[int, ...]  # what comes back for it: nothing for integers


def shape(name: str, options: Mapping[str, Any]) -> Shape:
    """The model's shape; nothing of its size is allocated. Whatever computes the attention, its operations
    are those of the written one.
    """
    from gpipe_bench.experiments.paper.full_size import FullSize

    written_out = {"attention": "explicit"} if name.startswith("transformer") else {}
    full = FullSize(name, {**options, **written_out})
    every = range(len(full.layers))
    return Shape(
        tuple(full.flops(1)),
        full.parameters,
        tuple(full.sent_bytes(layer, 1, "float32") for layer in every),
        tuple(full.returned_bytes(layer, 1, "float32") for layer in every),
    )


def pipeline_bytes(found: Shape, num_stages: int, costs: Sequence[float]) -> int:
    """Bytes for an example that the stage sends which sends most, with stages of equal costs as far as cuts
    allow. ValueError for more stages than layers.
    """
    ends = [stage.stop - 1 for stage in partition(costs, num_stages)[:-1]]
    forward = [found.output_bytes[end] for end in ends] + [0]  # the last stage sends no activations
    backward = [0] + [found.output_gradient_bytes[end] for end in ends]  # and the first no gradients
    return max(ahead + back for ahead, back in zip(forward, backward, strict=True))


def replica_bytes(gradients: int, replicas: int) -> int:
    """Bytes that each replica sends in a step: once round the ring for the sum, once for what it comes to."""
    return 2 * (replicas - 1) * gradients // replicas


def by_shape(work: Workload) -> Outcome:
    found = shape(work.model, work.options)
    # It is not stated which cost balances the stages; one stack's maps are twice as large as the next one's.
    cuts = {
        "operations": found.flops,
        "parameters": found.parameters,
        "layers": [1] * len(found.flops),
    }
    sent = {by: work.batch_size * pipeline_bytes(found, work.ranks, costs) for by, costs in cuts.items()}
    each = replica_bytes(4 * sum(found.parameters), work.ranks)
    ratios = {by: num_bytes / each for by, num_bytes in sent.items()}
    return _outcome(work, {"pp": [sent["operations"]], "dp": [each]}, {}, by_cut=ratios)


# Counted


def counted(work: Workload) -> Outcome:
    """Counts the bytes that left each process, beside those computed from shapes."""
    from gpipe_bench.experiments.paper.timed.steps import run_processes

    of_ranks = run_processes(count, work.ranks, work)
    sent = {way: [each[way] for each in of_ranks] for way in ("pp", "dp")}
    return _outcome(work, sent, {way: of_ranks[0][f"{way}, by shape"] for way in ("pp", "dp")})


def count(work: Workload) -> dict[str, int]:
    """Bytes that this process wrote in a step, as a stage and as a replica; every rank of a case runs it."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from gpipe_bench.models import MODELS, example_batch, loss_fn
    from gpipe_bench.pipeline import Pipeline

    ranks, found = dist.get_world_size(), dict[str, int]()
    loss = loss_fn(work.model, **work.options)
    for way, sizes in (("pp", (1, ranks)), ("dp", (ranks, 1))):
        torch.manual_seed(0)
        layers = MODELS[work.model](**work.options)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp"))
        batch, target = example_batch(work.model, work.batch_size // sizes[0], **work.options)
        with Pipeline(layers, mesh=mesh, num_microbatches=MICROBATCHES, share_memory=False) as pipeline:
            counts = [_written_bytes()]
            for _ in range(2 + COUNTED_STEPS):
                pipeline.step(batch, target, loss)
                pipeline.zero_grad()
                counts.append(_written_bytes())
            # Before, connections are made and forms agreed upon.
            found[way] = sorted(map(int.__sub__, counts[3:], counts[2:-1]))[COUNTED_STEPS // 2]
            found[f"{way}, by shape"] = _expected_bytes(way, pipeline, batch)
    return found


def _written_bytes() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar:"))


def _expected_bytes(way: str, pipeline: Any, batch: Any) -> int:
    """Bytes from shapes: gradients in a ring for the rank that sends most, or this process's messages."""
    import torch
    from torch import distributed as dist

    from gpipe_bench.pipeline.memory.boundary import Boundary

    if way == "dp":
        gradients = sum(p.nbytes for p in pipeline.parameters() if p.requires_grad)
        return replica_bytes(gradients, dist.get_world_size())
    mine = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        with torch.no_grad():
            for layer in pipeline.stages[0].layers:
                batch = layer(batch)
        mine[0] = Boundary.of(batch).num_bytes
    dist.broadcast(mine, 0)
    return int(mine[0])


# Results and text


def _outcome(
    work: Workload, sent: Mapping[str, list[int]], expected: Mapping[str, int], **more: object
) -> Outcome:
    provenance: Any = "measured" if expected else "modelled"
    busiest = {way: max(ranks) for way, ranks in sent.items()}
    note = "of the rank that sends most, in a step"
    metrics = [
        *(
            Metric("bytes sent", n, "bytes", provenance, key={"way": way}, note=note)
            for way, n in busiest.items()
        ),
        *(Metric("bytes by shape", n, "bytes", "modelled", key={"way": way}) for way, n in expected.items()),
        Metric(RATIO, busiest["pp"] / busiest["dp"], "ratio", provenance),
    ]
    facts = {
        "column": work.column, "batch_size": work.batch_size, "ranks": work.ranks,
        "bytes_by_rank": {way: list(ranks) for way, ranks in sent.items()}, **more,
    }  # fmt: skip
    return Outcome(tuple(metrics), facts)


def cells(records: Sequence[Record]) -> list[Result]:
    return [
        Result(
            table="grid",
            row="bytes sent by a pipeline over data parallelism",
            column=str(record.details["column"]),
            source="others",
            question="as published" if part == MODELLED else "here",
            metric=record.metric(RATIO),
            spread=_over("balanced by", list(record.details.get("by_cut", {}).values())),
            record=record,
            note=f"Of the rank that sends most in a step, {how}.",
        )
        for part, how in ((MODELLED, "by shape"), (COUNTED, "as its process wrote them"))
        for record in of_case(records, "done", part=part)
    ]


def _over(what: str, values: Sequence[float]) -> Spread | None:
    """The range over what is not said; None where nothing is open."""
    if not values:
        return None
    part = Part(what=what, low=min(values), high=max(values))
    return Spread(low=part.low, high=part.high, parts=(part,), combinations=len(values))


def tables(records: Sequence[Record]) -> str:
    lines = []
    for part, how in ((MODELLED, "modelled"), (COUNTED, "measured")):
        for record in of_case(records, "done", part=part):
            found: dict[Any, Any] = {(each.name, *each.key.values()): each.value for each in record.metrics}
            shapes = [found.get(("bytes by shape", way)) for way in ("pp", "dp")]
            lines.append(
                [
                    str(record.details["column"]),
                    how,
                    *(f"{found['bytes sent', way] / 1e6:,.2f}" for way in ("pp", "dp")),
                    f"{found[RATIO,]:.3f}",
                    ", ".join("-" if each is None else f"{each / 1e6:,.2f}" for each in shapes),
                ]
            )
    title = (
        "MB that the rank that sends most sends in one step, float32\n"
        "  pipeline   activations forward and their gradients back\n"
        "  data par.  the sum of the gradients over as many replicas"
    )
    columns = ["", "provenance", "pipeline", "data par.", "ratio", "both by shape"]
    return numbers_text(title, columns, lines) if lines else ""


EXPERIMENT = Experiment(
    name="grid",
    title="What a pipeline and replicas send",
    source="beyond the paper; a web page's sentences on traffic",
    describe="Bytes that a pipeline and replicas send in a step, by shape and counted on two processes.",
    profiles={"smoke": "tiny models", "short": "everything", "full": "the same"},
    cases=cases,
    run=run,
    cells=cells,
    tables=tables,
    paper_tables=("grid",),
)

"""Compares the bytes that a pipeline and data parallelism send in a step, from shapes and counted.

Expected: a pipeline sends a small part of what replicas send for Transformers, but not for small AmoebaNets.

    python -m experiments run grid

From shapes, at the paper's sizes: boundary activations and their gradients; and all parameters' gradients
twice around a ring. Counted, on two processes with a small model: bytes written in a step (/proc/self/io).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Metric, Provenance, Record, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.verdict import Question, Result, Spread
from gpipe_bench.pipeline.plan.partition import partition

from ..paper.workloads import Workload

MODELLED, COUNTED = "traffic", "traffic, counted"
MICROBATCHES = 4
COUNTED_STEPS = 3  # after two steps that do not count
RATIO = "pipeline over data parallelism"
LANGUAGE, IMAGES = "transformer-lm", "amoebanet-d"


_LARGE_IMAGES = {"num_layers": 18, "num_filters": 256, "num_classes": 1000}
_SMALL_IMAGES = {"num_layers": 3, "num_filters": 32, "image_size": 67, "num_classes": 10, "aux_head": False}
_SMALL_LANGUAGE = {
    "num_layers": 6, "d_model": 128, "ffn_dim": 512, "num_heads": 4, "seq_len": 32, "vocab_size": 1000,
    "dropout": 0.0,
}  # fmt: skip
WORKLOADS = {
    (MODELLED, "Transformer-24"): Workload(
        "Transformer-24, 4 accelerators, 32 sequences", LANGUAGE, {"num_layers": 24}, 32
    ),
    (MODELLED, "AmoebaNet-D (18, 256)"): Workload(
        "AmoebaNet-D (18, 256), 4 accelerators, 128 images", IMAGES, _LARGE_IMAGES, 128
    ),
    (MODELLED, "AmoebaNet-D (3, 32)"): Workload(
        "AmoebaNet-D (3, 32), 4 accelerators, 32 images", IMAGES, _SMALL_IMAGES, 32
    ),
    (COUNTED, "Transformer-6"): Workload(
        "Transformer-6 of width 128, 2 processes", LANGUAGE, _SMALL_LANGUAGE, 16
    ),
    (COUNTED, "AmoebaNet-D (3, 32)"): Workload("AmoebaNet-D (3, 32), 2 processes", IMAGES, _SMALL_IMAGES, 8),
}
"""By part and model; titles are columns in results/paper.csv."""
RANKS = {MODELLED: 4, COUNTED: 2}
SMOKE = ((MODELLED, "AmoebaNet-D (3, 32)"), (COUNTED, "Transformer-6"))
SECONDS = {MODELLED: 2.0, COUNTED: 15.0}
ANSWERS: dict[str, tuple[Question, str]] = {
    MODELLED: ("as published", "by shape"),
    COUNTED: ("here", "as its process wrote them"),
}
"""By part: the question it answers, and how the bytes were found."""


def cases(options: RunOptions) -> list[Case]:
    chosen = SMOKE if options.profile == "smoke" else WORKLOADS
    return [Case({"part": part, "model": model}, SECONDS[part]) for part, model in chosen]


def run(case: Case, options: RunOptions) -> Outcome:
    work = WORKLOADS[str(case.key["part"]), str(case.key["model"])]
    return by_shape(work) if case.key["part"] == MODELLED else counted(work)


def by_shape(work: Workload) -> Outcome:
    """Computes bytes from shapes, without allocating the model. Operations are counted for explicit
    attention.
    """
    from ..paper.full_size import FullSize

    written_out = {"attention": "explicit"} if work.model == LANGUAGE else {}
    full = FullSize(work.model, {**work.options, **written_out})
    every = range(len(full.layers))
    ahead = [full.sent_bytes(layer, 1, "float32") for layer in every]
    back = [full.returned_bytes(layer, 1, "float32") for layer in every]
    # The page does not say what balances stages; maps of one stack are twice as large as the next one's.
    cuts = {"operations": full.flops(1), "parameters": full.parameters, "layers": [1 for _ in every]}
    sent = {
        by: work.batch_size * pipeline_bytes(ahead, back, RANKS[MODELLED], costs)
        for by, costs in cuts.items()
    }
    each = replica_bytes(4 * sum(full.parameters), RANKS[MODELLED])
    by_cut = {by: num_bytes / each for by, num_bytes in sent.items()}
    return _outcome(work, "modelled", {"pp": [sent["operations"]], "dp": [each]}, {}, by_cut=by_cut)


def pipeline_bytes(ahead: Sequence[int], back: Sequence[int], num_stages: int, costs: Sequence[float]) -> int:
    """Bytes per example of the stage that sends most, with stages balanced by `costs`; each layer sends
    `ahead` bytes on and gets `back` bytes back.
    """
    ends = [stage.stop - 1 for stage in partition(costs, num_stages)[:-1]]
    forward = [ahead[end] for end in ends] + [0]  # the last stage sends no activations
    backward = [0] + [back[end] for end in ends]  # and the first no gradients
    return max(map(int.__add__, forward, backward))


def replica_bytes(gradients: int, replicas: int) -> int:
    """Bytes that each replica sends in a step: once around the ring for the sum, once for its result."""
    return 2 * (replicas - 1) * gradients // replicas


def counted(work: Workload) -> Outcome:
    """Counts the bytes that each process wrote, beside those computed from shapes."""
    from ..paper.steps import run_processes

    of_ranks = run_processes(count, RANKS[COUNTED], work)
    sent = {way: [each[way] for each in of_ranks] for way in ("pp", "dp")}
    return _outcome(work, "measured", sent, {way: of_ranks[0][f"{way}, by shape"] for way in sent})


def count(work: Workload) -> dict[str, int]:
    """Bytes that this process writes in a step, as a stage and as a replica; every rank runs it."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from gpipe_bench.pipeline import Pipeline
    from gpipe_bench.pipeline.memory.trace import Boundary

    ranks, found = dist.get_world_size(), dict[str, int]()
    for way, sizes in (("pp", (1, ranks)), ("dp", (ranks, 1))):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp"))
        batch, target = work.example(work.batch_size // sizes[0])
        with Pipeline(work.build(), mesh=mesh, num_microbatches=MICROBATCHES, share_memory=False) as pipeline:
            counts = [_written_bytes()]
            for _ in range(2 + COUNTED_STEPS):
                pipeline.step(batch, target, work.loss())
                pipeline.zero_grad()
                counts.append(_written_bytes())
            # The first steps also connect processes and exchange shapes.
            found[way] = sorted(map(int.__sub__, counts[3:], counts[2:-1]))[COUNTED_STEPS // 2]
            expected = torch.zeros(1, dtype=torch.int64)
            if way == "dp":
                gradients = sum(p.nbytes for p in pipeline.parameters() if p.requires_grad)
                expected[0] = replica_bytes(gradients, ranks)
            elif dist.get_rank() == 0:
                with torch.no_grad():
                    for layer in pipeline.stages[0].layers:
                        batch = layer(batch)
                expected[0] = Boundary.of(batch).num_bytes
            dist.broadcast(expected, 0)
            found[f"{way}, by shape"] = int(expected)
    return found


def _written_bytes() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar:"))


# Results and text


def _outcome(
    work: Workload, provenance: Provenance, sent: Mapping[str, list[int]], expected: Mapping[str, int],
    **more: object,
) -> Outcome:  # fmt: skip
    busiest = {way: max(ranks) for way, ranks in sent.items()}
    note = "of the rank that sends most, in a step"
    metrics = [
        *(
            Metric("bytes sent", n, "bytes", provenance, key={"way": w}, note=note)
            for w, n in busiest.items()
        ),
        *(Metric("bytes by shape", n, "bytes", "modelled", key={"way": w}) for w, n in expected.items()),
        Metric(RATIO, busiest["pp"] / busiest["dp"], "ratio", provenance),
    ]
    facts = {"column": work.title, "batch_size": work.batch_size, "bytes_by_rank": dict(sent)}
    return Outcome(tuple(metrics), {**facts, **more})


def cells(records: Sequence[Record]) -> list[Result]:
    return [
        Result(
            table="grid",
            row="bytes sent by a pipeline over data parallelism",
            column=str(record.details["column"]),
            source="others",
            question=question,
            metric=record.metric(RATIO),
            spread=Spread.of("balanced by", record.details.get("by_cut", {}).values()),
            record=record,
            note=f"Of the rank that sends most in a step, {how}.",
        )
        for part, (question, how) in ANSWERS.items()
        for record in of_case(records, "done", part=part)
    ]


def tables(records: Sequence[Record]) -> str:
    def mb(record: Record, name: str, way: str) -> str:
        found = record.metric(name, way=way)
        return "-" if found is None or found.value is None else f"{found.value / 1e6:,.2f}"

    lines = []
    for record in (record for part in ANSWERS for record in of_case(records, "done", part=part)):
        ratio = record.metric(RATIO)
        assert ratio is not None
        sent, by_shape = (
            [mb(record, f"bytes {name}", way) for way in ("pp", "dp")] for name in ("sent", "by shape")
        )
        column = str(record.details["column"])
        lines.append([column, ratio.provenance, *sent, f"{ratio.value:.3f}", ", ".join(by_shape)])
    title = (
        "MB that the rank that sends most sends in one step, float32\n"
        "  pipeline   activations forward and their gradients back\n"
        "  data par.  the sum of the gradients over as many replicas"
    )
    return numbers_text(title, ["", "provenance", "pipeline", "data par.", "ratio", "both by shape"], lines)


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

"""Grids of processes on this machine: what each rank sends, and steps beside their replay.

Expected: a pipeline sends a small part of what replicas send for Transformers, and not for small AmoebaNets;
steps on this machine are those of the replay. The machine should have nothing else to do:

    python -m experiments run grid
    python -m experiments run grid --device cuda    steps of two GPUs alone

Traffic: bytes that a rank sends in a step, as a stage of a pipeline and as a replica. By shape at the
paper's sizes (`experiments/paper/figure2.py`: cuts of equal operations, and for the range those of equal
parameters and of as many layers; a ring for the sums). Counted on two processes of a small model: what each
of them wrote in a step (Linux counts it, in /proc/self/io), all messages over sockets. Whatever else is sent,
such as signs of life, is in the count.

Steps: on two processes a Transformer trains as two replicas, and as a pipeline of two stages. The replay gets
the actions of each step as they ran, and a link whose latency and bandwidth are those of two sums between the
same processes: replicas do not sum over what carries a pipeline's messages, which lie in memory that two
processes map, but through torch's collectives. It gets neither medians of a kind nor one replica alone:
processors sum with the cores that compute, so that the last backward, inside of which the sums are, takes
half as long again as the others; and a step is as long as that of the replica which is slower in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from gpipe_bench.experiments.beyond.side_by_side import lacks_gpus
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Metric, Provenance, Record, from_samples, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.verdict import Part, Result, Spread
from gpipe_bench.pipeline.plan.links import LINKS, Link
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.simulate import replay
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.planner.collectives import data_parallel

MODELLED, COUNTED = "traffic", "traffic, counted"
STEPS = "steps"
MICROBATCHES = 4  # of a replica
LANGUAGE, IMAGES = "transformer-lm", "amoebanet-d"
_IMAGE_67 = {"num_layers": 3, "num_filters": 32, "image_size": 67, "num_classes": 10, "aux_head": False}


class Subject(NamedTuple):
    """A model with its batch on so many ranks; `column` is its in results/paper.csv."""

    model: str
    options: Mapping[str, Any]
    batch_size: int
    ranks: int
    column: str


SUBJECTS = {
    "Transformer-24": Subject(
        LANGUAGE, {"num_layers": 24}, 32, 4, "Transformer-24, 4 accelerators, 32 sequences"
    ),
    "AmoebaNet-D (18, 256)": Subject(
        IMAGES, {"num_layers": 18, "num_filters": 256, "num_classes": 1000}, 128, 4,
        "AmoebaNet-D (18, 256), 4 accelerators, 128 images",
    ),
    "AmoebaNet-D (3, 32)": Subject(
        IMAGES, _IMAGE_67, 32, 4, "AmoebaNet-D (3, 32), 4 accelerators, 32 images"
    ),
}  # fmt: skip
"""Models at the sizes whose traffic is computed, by name and shape."""
SMALL = {
    "Transformer-6": Subject(
        LANGUAGE,
        {
            "num_layers": 6, "d_model": 128, "ffn_dim": 512, "num_heads": 4, "seq_len": 32,
            "vocab_size": 1000, "dropout": 0.0,
        },
        16, 2, "Transformer-6 of width 128, 2 processes",
    ),
    "AmoebaNet-D (3, 32)": Subject(IMAGES, _IMAGE_67, 8, 2, "AmoebaNet-D (3, 32), 2 processes"),
}  # fmt: skip
"""Counted."""
COUNTED_STEPS = 3  # two before them do not count

SIZES: dict[str, dict[str, Any]] = {
    "smoke": {
        "num_layers": 4, "d_model": 32, "ffn_dim": 128, "num_heads": 2, "vocab_size": 200, "seq_len": 16,
    },
    "short": {
        "num_layers": 6, "d_model": 256, "ffn_dim": 1024, "num_heads": 4, "vocab_size": 1000, "seq_len": 64,
    },
    "GPUs": {
        "num_layers": 12, "d_model": 2048, "ffn_dim": 8192, "num_heads": 32, "vocab_size": 32_000,
        "seq_len": 512,
    },
}  # fmt: skip
EXAMPLES = {"smoke": 8, "short": 16, "GPUs": 32}  # of all replicas
NUM_STEPS = {"smoke": 3, "short": 15, "GPUs": 15}
GPUS = 2  # of a grid
BEFORE = 3
BUCKET_BYTES = 4 * 2**20
SUM_BYTES = (2**16, 2**24)
"""A sum that is all latency, and one that is all bytes."""
NUM_SUMS = 9  # of which the first two do not count


def cases(options: RunOptions) -> list[Case]:
    """The cases of a profile. On GPUs only steps are timed, since bytes are the same on every device."""
    smoke, device = options.profile == "smoke", options.device
    if device == "cuda":
        grids = [(dp, GPUS // dp) for dp in (GPUS, 1)]
        return [Case({"part": STEPS, "dp": dp, "pp": pp, "device": device}, 60.0) for dp, pp in grids]
    shapes = ("AmoebaNet-D (3, 32)",) if smoke else tuple(SUBJECTS)
    counted = ("Transformer-6",) if smoke else tuple(SMALL)
    return [
        *(Case({"part": MODELLED, "model": name}, 2.0) for name in shapes),
        *(Case({"part": COUNTED, "model": name}, 15.0) for name in counted),
        *(Case({"part": STEPS, "dp": dp, "pp": 2 // dp}, 8.0 if smoke else 20.0) for dp in (2, 1)),
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    key: Mapping[str, Any] = case.key
    match key["part"]:
        case "traffic":
            return _modelled(SUBJECTS[key["model"]])
        case "traffic, counted":
            return _counted(SMALL[key["model"]])
    device, size = str(key.get("device", "cpu")), "smoke" if options.profile == "smoke" else "short"
    size = "GPUs" if (device, options.profile) == ("cuda", "full") else size
    return _steps(Job(key["dp"], key["pp"], size, options.seed, device))


def _modelled(subject: Subject) -> Outcome:
    from gpipe_bench.experiments.beyond.traffic import shape, traffic

    of_model = shape(subject.model, subject.options)
    # It is not stated which cost balances the stages; one stack's maps are twice as large as the next one's.
    cuts = {
        "operations": of_model.flops,
        "parameters": of_model.parameters,
        "layers": [1] * len(of_model.flops),
    }
    found = {by: traffic(of_model, subject.ranks, costs) for by, costs in cuts.items()}
    each = found["operations"].data_parallel_each
    sent = {by: one.pipeline_busiest * subject.batch_size for by, one in found.items()}
    ratios = {by: num / each for by, num in sent.items()}
    return _traffic(subject, {"pp": [sent["operations"]], "dp": [each]}, {}, by_cut=ratios)


def _counted(subject: Subject) -> Outcome:
    """Counts the bytes that left each process, beside those computed from shapes."""
    from gpipe_bench.experiments.paper.timed.steps import run_processes

    of_ranks = run_processes(count, subject.ranks, subject)
    sent = {way: [each[way] for each in of_ranks] for way in ("pp", "dp")}
    return _traffic(subject, sent, {way: of_ranks[0][f"{way}, by shape"] for way in ("pp", "dp")})


def _traffic(
    subject: Subject, sent: Mapping[str, list[int]], by_shape: Mapping[str, int], **more: object
) -> Outcome:
    by_rule: Provenance = "modelled"
    provenance: Provenance = "measured" if by_shape else by_rule
    busiest = {way: max(ranks) for way, ranks in sent.items()}
    metrics = [
        Metric(name, num_bytes, "bytes", how, key={"way": way}, note=note)
        for name, ways, how, note in (
            ("bytes sent", busiest, provenance, "of the rank that sends most, in a step"),
            ("bytes by shape", by_shape, by_rule, ""),
        )
        for way, num_bytes in ways.items()
    ]
    metrics.append(
        Metric("pipeline over data parallelism", busiest["pp"] / busiest["dp"], "ratio", provenance)
    )
    facts = {
        "column": subject.column, "batch_size": subject.batch_size, "ranks": subject.ranks,
        "bytes_by_rank": {way: list(ranks) for way, ranks in sent.items()}, **more,
    }  # fmt: skip
    return Outcome(tuple(metrics), facts)


def count(subject: Subject) -> dict[str, int]:
    """Bytes that this process wrote in a step, as a stage and as a replica; every rank of a case runs it."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from gpipe_bench.models import MODELS, example_batch, loss_fn
    from gpipe_bench.pipeline import Pipeline

    ranks, found = dist.get_world_size(), dict[str, int]()
    loss = loss_fn(subject.model, **subject.options)
    for way, shape in (("pp", (1, ranks)), ("dp", (ranks, 1))):
        torch.manual_seed(0)
        layers = MODELS[subject.model](**subject.options)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
        batch, target = example_batch(subject.model, subject.batch_size // shape[0], **subject.options)
        with Pipeline(layers, mesh=mesh, num_microbatches=MICROBATCHES, share_memory=False) as pipeline:
            counts = [_written_bytes()]
            for _ in range(2 + COUNTED_STEPS):
                pipeline.step(batch, target, loss)
                pipeline.zero_grad()
                counts.append(_written_bytes())
            # Before, connections are made, forms agreed upon, the order of gradients learnt.
            found[way] = sorted(map(int.__sub__, counts[3:], counts[2:-1]))[COUNTED_STEPS // 2]
            found[f"{way}, by shape"] = _by_shape(way, pipeline, batch)
    return found


def _written_bytes() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar:"))


def _by_shape(way: str, pipeline: Any, batch: Any) -> int:
    """Bytes from shapes: gradients in a ring for the rank that sends most, or this process's messages."""
    import torch
    from torch import distributed as dist

    from gpipe_bench.pipeline.memory.boundary import Boundary

    if way == "dp":
        gradients: int = sum(p.nbytes for p in pipeline.parameters() if p.requires_grad)
        ranks = dist.get_world_size()
        return round(2 * gradients * (ranks - 1) / ranks)  # once round for the sum, once for what it comes to
    mine = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        with torch.no_grad():
            for layer in pipeline.stages[0].layers:
                batch = layer(batch)
        mine[0] = Boundary.of(batch).num_bytes
    dist.broadcast(mine, 0)
    return int(mine[0])


class Job(NamedTuple):
    """One grid as its processes see it; `size` is a key of `SIZES`."""

    dp: int
    pp: int
    size: str
    seed: int
    device: str = "cpu"


class Ran(NamedTuple):
    """Findings of one process: seconds of steps (of the slowest process), of this pipeline's actions in each
    of them by stage, kind and micro-batch, bytes of the gradients of each stage's layers, and of a
    micro-batch over the boundary; and seconds of the sums.
    """

    steps_s: list[float]
    actions_s: list[dict[tuple[int, str, int], float]]
    gradient_bytes: list[list[list[int]]]
    boundary_bytes: int
    sums_s: Sequence[float]
    messages: Link = LINKS["loopback"]  # what carries those of a pipeline


def _steps(job: Job) -> Outcome:
    from gpipe_bench.experiments.paper.timed.steps import run_processes

    if reason := lacks_gpus(job.device, job.dp * job.pp):
        return Outcome(status="skipped", reason=reason)
    found: list[Ran] = run_processes(work, job.dp * job.pp, job, device=job.device)
    link = link_of(found[0].sums_s, "measured before the steps")
    measured = from_samples("step", [1e3 * each for each in found[0].steps_s], "ms")
    facts = {
        "sizes": SIZES[job.size], "batch_size": EXAMPLES[job.size], "num_microbatches": MICROBATCHES,
        "link": {"latency_s": link.latency_s, "bytes_per_s": link.bandwidth_bytes_per_s},
        "actions_ms": {
            f"{k}{kind}{m}": 1e3 * median(step[k, kind, m] for step in found[0].actions_s)
            for k, kind, m in found[0].actions_s[0]
        },
    }  # fmt: skip
    return Outcome(_beside(measured, 1e3 * laid_out_s(job, found, link)), facts)


def _beside(measured: Metric, replayed_ms: float) -> tuple[Metric, ...]:
    assert measured.value is not None
    return (
        measured,
        Metric("replayed step", replayed_ms, "ms", "replayed"),
        Metric("replayed over measured", replayed_ms / measured.value, "ratio", "replayed"),
    )


def laid_out_s(job: Job, found: Sequence[Ran], link: Link) -> float:
    """The step by the replay: the median of steps, each of which is as long as its slowest pipeline's."""

    def step_s(ran: Ran, actions_s: Mapping[tuple[int, str, int], float]) -> float:
        timeline = replay(
            gpipe(job.pp, MICROBATCHES, "never"),
            {(stage, Kind(kind), m): seconds for (stage, kind, m), seconds in actions_s.items()},
            ran.messages,
            activation_bytes=[ran.boundary_bytes] * (job.pp - 1),
            reductions=[
                data_parallel(sizes, job.dp, link, bucket_bytes=BUCKET_BYTES) for sizes in ran.gradient_bytes
            ],
        )
        return float(timeline.makespan_s)

    by_process = [[step_s(ran, actions_s) for actions_s in ran.actions_s] for ran in found]
    return float(median(map(max, zip(*by_process, strict=True))))


def timed_steps(
    pipeline: Any, batch: Any, target: Any, loss: Callable[..., Any]
) -> Iterator[tuple[float, Timeline]]:
    """Step after step on a grid, of which all ranks take as many: seconds from the common begin to the end on
    the slowest rank, and this replica's timeline.
    """
    import torch
    from torch import distributed as dist

    from gpipe_bench.planner.timing import time_step

    step, device = partial(pipeline.step, batch, target, loss), pipeline.stages[0].device
    while True:
        step_s = torch.tensor(time_step(step, [pipeline], device=device))
        dist.all_reduce(step_s, dist.ReduceOp.MAX)
        yield float(step_s), pipeline.gather_timeline()


def work(job: Job) -> Ran:
    """Runs in each process of a case."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from gpipe_bench.experiments.paper.timed.steps import measured_link
    from gpipe_bench.models import MODELS, example_batch, loss_fn
    from gpipe_bench.pipeline import Pipeline, devices
    from gpipe_bench.planner.timing import time_step

    torch.manual_seed(job.seed)
    options, device = SIZES[job.size], devices.current(job.device)
    layers = MODELS[LANGUAGE](**options).to(device)
    sizes = [[p.nbytes for p in layer.parameters()] for layer in layers]
    share = EXAMPLES[job.size] // job.dp
    batch, target = (each.to(device) for each in example_batch(LANGUAGE, share, **options))
    loss = loss_fn(LANGUAGE, **options)
    mesh = init_device_mesh(job.device, (job.dp, job.pp), mesh_dim_names=("dp", "pp"))
    pipeline = Pipeline(
        layers, mesh=mesh, num_microbatches=MICROBATCHES, remat="never", bucket_bytes=BUCKET_BYTES
    )
    sums_s = []
    for size in SUM_BYTES:
        summed = partial(dist.all_reduce, torch.zeros(size // 4, device=device))
        sums_s.append(median([time_step(summed, (), device=device) for _ in range(NUM_SUMS)][2:]))
    messages = LINKS["loopback"] if job.device == "cpu" else measured_link(device)
    steps_s, actions_s = list[float](), list[dict[tuple[int, str, int], float]]()
    steps = timed_steps(pipeline, batch, target, loss)
    for step_s, timeline in islice(steps, BEFORE, BEFORE + NUM_STEPS[job.size]):
        steps_s.append(step_s)
        events = [(event.action, event.duration_s) for event in timeline.events]
        actions_s.append({(a.stage, str(a.kind), a.microbatch): seconds for a, seconds in events})
    cut = pipeline.partition
    pipeline.close()
    gradient_bytes = [[sizes[layer] for layer in span] for span in cut]
    boundary_bytes = 4 * share // MICROBATCHES * options["seq_len"] * options["d_model"]
    return Ran(steps_s, actions_s, gradient_bytes, boundary_bytes, sums_s, messages)


def link_of(sums_s: Sequence[float], source: str) -> Link:
    """The link on which the ring of two takes as long as two sums did; both of its directions at a time."""
    (small, large), (short_s, long_s) = SUM_BYTES, sums_s
    per_byte_s = max(long_s - short_s, 1e-12) / (large - small)
    latency_s = max(short_s - small * per_byte_s, 0.0) / 2  # two hops
    return Link("sums of two processes", latency_s, 1 / per_byte_s, source=source)


# Results and text


def cells(records: Sequence[Record]) -> list[Result]:
    return [
        Result(
            table="grid",
            row="bytes sent by a pipeline over data parallelism",
            column=str(record.details["column"]),
            source="others",
            question="as published" if part == MODELLED else "here",
            metric=record.metric("pipeline over data parallelism"),
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
    low, high = min(values), max(values)
    part = Part(what=what, low=low, high=high)
    return Spread(low=low, high=high, parts=(part,), combinations=len(values))


def tables(records: Sequence[Record]) -> str:
    found = (_traffic_text(records), _steps_text(records))
    return "\n\n".join(numbers_text(*each) for each in found if each[-1])


def _values(record: Record) -> dict[Any, Any]:
    """Numbers by name, then the values of their keys."""
    return {(each.name, *each.key.values()): each.value for each in record.metrics}


def _traffic_text(records: Sequence[Record]) -> tuple[str, list[str], list[list[str]]]:
    lines = []
    for part, how in ((MODELLED, "modelled"), (COUNTED, "measured")):
        for record in of_case(records, "done", part=part):
            found = _values(record)
            shapes = [found.get(("bytes by shape", way)) for way in ("pp", "dp")]
            lines.append(
                [
                    str(record.details["column"]),
                    how,
                    *(f"{found['bytes sent', way] / 1e6:,.2f}" for way in ("pp", "dp")),
                    f"{found['pipeline over data parallelism',]:.3f}",
                    ", ".join("-" if each is None else f"{each / 1e6:,.2f}" for each in shapes),
                ]
            )
    title = (
        "MB that the rank that sends most sends in one step, float32\n"
        "  pipeline   activations forward and their gradients back\n"
        "  data par.  the sum of the gradients over as many replicas"
    )
    return title, ["", "provenance", "pipeline", "data par.", "ratio", "both by shape"], lines


def _steps_text(records: Sequence[Record]) -> tuple[str, list[str], list[list[str]]]:
    lines = []
    for record in of_case(records, "done", part=STEPS):
        found = _values(record)
        lines.append(
            [
                f"dp {record.case['dp']} x pp {record.case['pp']}" + " on GPUs" * ("device" in record.case),
                f"{found['step',]:.1f}",
                f"{found['replayed step',]:.1f}",
                f"{found['replayed over measured',]:.3f}",
            ]
        )
    title = "Steps of a Transformer on this machine in ms, beside their replay"
    return title, ["", "measured", "replayed", "ratio"], lines


EXPERIMENT = Experiment(
    name="grid",
    title="Grids of processes: pipelines and replicas together",
    source="beyond the paper; a web page's sentences on traffic",
    describe="Bytes that a pipeline and replicas send, counted and by shape; steps beside their replay.",
    profiles={
        "smoke": "tiny models",
        "short": "everything, 15 steps of each grid on this machine",
        "full": "the same",
    },
    cases=cases,
    run=run,
    cells=cells,
    tables=tables,
    paper_tables=("grid",),
    options=("seed",),
)

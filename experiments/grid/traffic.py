"""Bytes that a rank sends in a step, as a stage of a pipeline and as a replica: by shape, and counted.

By shape at the paper's sizes (`experiments/figure2/computed.py`: cuts of equal operations, and for the range
those of equal parameters and of as many layers; a ring for the sums). Counted on two processes of a small
model: what each of them wrote in a step (Linux counts it, in /proc/self/io), all messages over sockets.
Whatever else is sent, such as signs of life, is in the count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Provenance, Quantity, Scalar

if TYPE_CHECKING:
    from collections.abc import Callable

MODELLED, COUNTED = "traffic", "traffic, counted"
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
        "transformer-lm", {"num_layers": 24}, 32, 4, "Transformer-24, 4 accelerators, 32 sequences"
    ),
    "AmoebaNet-D (18, 256)": Subject(
        "amoebanet-d", {"num_layers": 18, "num_filters": 256, "num_classes": 1000}, 128, 4,
        "AmoebaNet-D (18, 256), 4 accelerators, 128 images",
    ),
    "AmoebaNet-D (3, 32)": Subject(
        "amoebanet-d", _IMAGE_67, 32, 4, "AmoebaNet-D (3, 32), 4 accelerators, 32 images"
    ),
}  # fmt: skip
SMALL = {
    "Transformer-6": Subject(
        "transformer-lm",
        {
            "num_layers": 6, "d_model": 128, "ffn_dim": 512, "num_heads": 4, "seq_len": 32,
            "vocab_size": 1000, "dropout": 0.0,
        },
        16, 2, "Transformer-6 of width 128, 2 processes",
    ),
    "AmoebaNet-D (3, 32)": Subject("amoebanet-d", _IMAGE_67, 8, 2, "AmoebaNet-D (3, 32), 2 processes"),
}  # fmt: skip
MICROBATCHES = 4
STEPS = 3  # that are counted; two before them do not count


def keys(smoke: bool) -> list[tuple[dict[str, Scalar], float]]:
    """The cases, and how long each takes."""
    found: list[tuple[dict[str, Scalar], float]] = [
        ({"part": MODELLED, "model": name}, 2.0)
        for name in SUBJECTS
        if not smoke or name == "AmoebaNet-D (3, 32)"
    ]
    return found + [
        ({"part": COUNTED, "model": name}, 15.0) for name in SMALL if not smoke or name == "Transformer-6"
    ]


def run(key: Mapping[str, Scalar]) -> Outcome:
    name = str(key["model"])
    return _counted(SMALL[name]) if key["part"] == COUNTED else _modelled(SUBJECTS[name])


def _modelled(subject: Subject) -> Outcome:
    from gpipe_bench.experiments.figure2.computed import shape, traffic

    of_model = shape(subject.model, subject.options)
    # What stages are balanced by is not said; a stack's maps are twice as large as those of the next.
    cuts = {
        "operations": of_model.flops,
        "parameters": of_model.parameters,
        "layers": [1] * len(of_model.flops),
    }
    found = {by: traffic(of_model, subject.ranks, costs) for by, costs in cuts.items()}
    each = found["operations"].data_parallel_each
    sent = {by: one.pipeline_busiest * subject.batch_size for by, one in found.items()}
    outcome = _outcome(subject, {"pp": [sent["operations"]], "dp": [each]}, {})
    return replace(
        outcome, details={**outcome.details, "by_cut": {by: num / each for by, num in sent.items()}}
    )


def _counted(subject: Subject) -> Outcome:
    """What really left each process, beside what shapes say."""
    from gpipe_bench.experiments.measuring.processes import run_processes

    of_ranks = run_processes(count, subject.ranks, subject)
    sent = {way: [each[way] for each in of_ranks] for way in ("pp", "dp")}
    modelled = {way: of_ranks[0][f"{way}, by shape"] for way in ("pp", "dp")}
    return _outcome(subject, sent, modelled)


def _outcome(subject: Subject, sent: Mapping[str, list[int]], by_shape: Mapping[str, int]) -> Outcome:
    provenance: Provenance = "measured" if by_shape else "modelled"
    busiest = {way: max(ranks) for way, ranks in sent.items()}
    quantities = [
        Quantity(
            name="bytes sent", key={"way": way}, value=busiest[way], unit="bytes", provenance=provenance,
            higher_is_better=False, note="of the rank that sends most, in a step",
        )
        for way in sent
    ]  # fmt: skip
    quantities += [
        Quantity(
            name="bytes by shape", key={"way": way}, value=num_bytes, unit="bytes", provenance="modelled",
            higher_is_better=False,
        )
        for way, num_bytes in by_shape.items()
    ]  # fmt: skip
    quantities.append(
        Quantity(
            name="pipeline over data parallelism", value=busiest["pp"] / busiest["dp"], unit="ratio",
            provenance=provenance, higher_is_better=False,
        )
    )  # fmt: skip
    facts = {
        "column": subject.column, "batch_size": subject.batch_size, "ranks": subject.ranks,
        "bytes_by_rank": {way: list(ranks) for way, ranks in sent.items()},
    }  # fmt: skip
    return Outcome(tuple(quantities), facts)


def count(subject: Subject) -> dict[str, int]:
    """What this process wrote in a step, as a stage and as a replica; every rank of a case runs it."""
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
        share = subject.batch_size // shape[0]
        batch, target = example_batch(subject.model, share, **subject.options)
        pipeline = Pipeline(layers, mesh=mesh, num_microbatches=MICROBATCHES, share_memory=False)

        def step(pipeline: Pipeline = pipeline, batch: Any = batch, target: Any = target) -> None:
            pipeline.step(batch, target, loss)
            pipeline.zero_grad()

        found[way] = _written_by(step)
        found[f"{way}, by shape"] = _by_shape(way, pipeline, batch)
        pipeline.close()
    return found


def _written_by(step: Callable[[], None]) -> int:
    for _ in range(2):  # connections are made, forms agreed upon, the order of gradients learnt
        step()
    counts = []
    for _ in range(STEPS):
        before = _written_bytes()
        step()
        counts.append(_written_bytes() - before)
    return sorted(counts)[len(counts) // 2]


def _written_bytes() -> int:
    with open("/proc/self/io", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar:"))


def _by_shape(way: str, pipeline: Any, batch: Any) -> int:
    """Of the rank that sends most: the gradients' share of a ring, or the messages at this process's ends."""
    import torch
    from torch import distributed as dist

    from gpipe_bench.pipeline.plan.collectives import all_reduce_sent_bytes

    if way == "dp":
        gradients = sum(p.nbytes for p in pipeline.parameters() if p.requires_grad)
        return round(all_reduce_sent_bytes(gradients, dist.get_world_size()))
    from gpipe_bench.pipeline.memory.boundary import Boundary

    mine = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        with torch.no_grad():
            value = batch
            for layer in pipeline.stages[0].layers:
                value = layer(value)
        mine[0] = Boundary.of(value).num_bytes
    dist.broadcast(mine, 0)
    return int(mine[0])

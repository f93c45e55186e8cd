"""Attention residuals in a pipeline: what stages send each other, and hold, with portals and without.

Every layer of the model (`models.attnres`, arXiv 2603.15031) reads the sums of all blocks before it, so each
stage needs all of them. Passed on from stage to stage a sum crosses every boundary behind it, and the last
boundary carries all; a portal takes each straight to the later stages, those of the same worker excepted.
Bytes are counted from the boundaries and the declared portals of the cut model, gradients not included, which
are as many again; peaks are modelled, in one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpipe_bench.experiments.schedules.beyond import evenly
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity, Record, Scalar, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.pipeline.plan.named import loop, named
from gpipe_bench.pipeline.plan.portals import edges_of

PART = "attention residuals"
SECONDS = 40.0
WORKERS = (2, 4, 8)
OPTIONS: dict[str, Any] = {
    "num_layers": 16, "layers_per_block": 2, "d_model": 1024, "ffn_dim": 2816, "num_heads": 16,
    "vocab_size": 32_000, "seq_len": 2048,
}  # fmt: skip
WAYS = ("passed on", "portals")
REMATS = ("never", "always")
MIB = 2**20


def run() -> Outcome:
    """Bytes of one micro-batch of one sequence over all ways between workers and over the busiest one, and
    the fullest worker under 1F1B with M = 2K.
    """
    import torch

    from gpipe_bench.models import MODELS, example_batch, loss_fn
    from gpipe_bench.pipeline.memory.boundary import Boundary
    from gpipe_bench.pipeline.memory.cut import portal_memory
    from gpipe_bench.pipeline.memory.profile import Profiler
    from gpipe_bench.pipeline.memory.workers import pipeline_memory
    from gpipe_bench.pipeline.stage.portals import declarations

    with torch.device("meta"):
        models = {way: MODELS["attnres"](**OPTIONS, portals=way == "portals") for way in WAYS}
    loss, ends = loss_fn("attnres"), example_batch("attnres", 1, device="meta", **OPTIONS)
    inputs, target = map(Boundary.of, ends)
    profiler = Profiler()
    layers, of_loss = profiler.model(models["passed on"], loss, inputs, target)
    declared = declarations(models["portals"])
    one = layers[0].outputs.num_bytes  # a sum is as large as the embedding
    quantities = []
    for workers in WORKERS:
        for turns in (1, 2):
            spans = evenly(len(layers), turns * workers)
            place = loop(workers, turns)
            sent: dict[str, Counter[tuple[int, int]]] = {way: Counter() for way in WAYS}
            for stage in range(len(spans) - 1):
                there = place[stage], place[stage + 1]
                sent["passed on"][there] += layers[spans[stage][-1]].outputs.num_bytes
                sent["portals"][there] += one
            for line in edges_of(declared, spans):
                sent["portals"][place[line.source], place[line.target]] += one * len(line.names)
            for way, ways in sent.items():
                between = [size for (source, end), size in ways.items() if source != end]
                key: dict[str, Scalar] = {"K": workers, "stages": turns, "way": way}
                for name, size in (("sent", sum(between)), ("busiest", max(between))):
                    quantities.append(
                        Quantity(name=name, key=key, value=size / MIB, unit="MiB", provenance="modelled")
                    )
        spans = evenly(len(layers), workers)
        for remat in REMATS:
            schedule = named("1f1b", workers, 2 * workers, remat=remat)
            peaks = {
                "passed on": pipeline_memory(layers, of_loss, spans, schedule, "adam", receive_ahead=None),
                "portals": portal_memory(
                    list(models["portals"]), loss, inputs, target, spans, schedule, "adam", profiler=profiler
                ),
            }
            for way, found in peaks.items():
                key = {"K": workers, "remat": remat, "way": way}
                peak = max(each.peak for each in found) / MIB
                quantities.append(
                    Quantity(name="peak memory", key=key, value=peak, unit="MiB", provenance="modelled")
                )
    return Outcome(tuple(quantities), {"options": OPTIONS})


def tables(records: Sequence[Record]) -> list[str]:
    """A line for each K."""
    found = []
    for record in of_case(records, "done", part=PART):
        values: dict[Any, Any] = {(q.name, *q.key.values()): q.value for q in record.quantities}
        pairs = [
            *((f"{name}, {turns} a worker", name, turns) for turns in (1, 2) for name in ("sent", "busiest")),
            *((f"peak, {remat}", "peak memory", remat) for remat in REMATS),
        ]
        columns = ["K", "", *(title for title, *_ in pairs)]
        lines = [
            [str(workers), way, *(f"{values[name, workers, which, way]:.0f}" for _, name, which in pairs)]
            for workers in WORKERS
            for way in WAYS
        ]
        options = record.details["options"]
        title = (
            f"Attention residuals, {options['num_layers']} layers in blocks of "
            f"{options['layers_per_block']}, one sequence of {options['seq_len']} tokens per "
            "micro-batch\n  MiB (modelled): activations sent per micro-batch with one stage a worker "
            "and with two in a loop, over all\n  ways and over the busiest; fullest worker under "
            "1F1B, M = 2K, Adam, by re-materialization"
        )
        found.append(numbers_text(title, columns, lines))
    return found

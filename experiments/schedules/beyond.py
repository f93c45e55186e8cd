"""What is laid out and not run: chunks of sequences (Seq1F1B), activations that wait with the host, and
attention residuals, by portals and without.

The engine's micro-batches do not see each other, as chunks of a sequence must, and nothing that it keeps
leaves the device. So steps are replayed at equal costs, and the memory is modelled.

Copies are measured by k of PipeOffload (arXiv 2503.01328): the time of a layer's activations to the host and
back over that of its forward and backward. Published is a formula for it, what 1F1B loses when everything
is copied, and of Seq1F1B and of the schedules in a V what they keep and how long they idle. Where a ratio is
given and not the numbers of micro-batches, stages or chunks with it, these are a range.

Every layer of a model with attention residuals (`models.attnres`, arXiv 2603.15031) reads the sums of all
blocks before it, so each stage needs all of them. Passed on from stage to stage a sum crosses every boundary
behind it, and the last boundary carries all; a portal takes each straight to the later stages, those of the
same worker excepted. Bytes are counted from the boundaries and the declared portals of the cut model,
gradients not included, which are as many again; peaks are modelled, in one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median_high
from typing import Any

from gpipe_bench.experiments.schedules.laid_out import alive_by_worker, in_slots, span
from gpipe_bench.experiments.timed.workloads import Workload
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Provenance, Quantity, Record, Scalar, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.pipeline.plan.links import at_once, away, longest
from gpipe_bench.pipeline.plan.links import in_slots as of_slots
from gpipe_bench.pipeline.plan.named import loop, named, seq1f1b
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.portals import edges_of
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline

PART, FORMULAS = "replayed only", "schedules-formulas"
SECONDS = 20.0
NUM_WORKERS, NUM_MICROBATCHES = 8, 32
CHUNKS = (2, 4, 8)
KS = (0.5, 1.0, 1.5)
COPIED = ("1f1b", "interleaved", "v-half")
MODEL = "llama-7b"
TOKENS = 2048
GIB, MIB = 2**30, 2**20

Row = tuple[str, str, float, str, str, Sequence[float]]
"""Row and column of results/paper.csv, our number, its unit, what it is, and all that it may be."""


# The published numbers

A100 = 220e12, 15e9
"""Operations and bytes to the host per second, as PipeOffload's figure 1 has them."""
LAYERS = tuple(product((4096, 5120), (4096, 8192, 16_384, 32_768)))
"""Hidden size and length of the sequence: the lines of that figure whose numbers its text gives in order."""
PRINTED_KS = (1.70, 1.46, 1.15, 0.80, 1.40, 1.23, 1.00, 0.72)
MODELLED = ("k on an A100", "seq1f1b over 1F1B, throughput", "seq1f1b over 1F1B, memory")
"""Rows that are evaluated in closed form."""
SIZES = tuple(product((4, 8, 16), (1, 2, 4, 8), CHUNKS))
"""Workers, micro-batches as their multiple, and chunks of a sequence, where a paper does not say."""
MINDSPEED = {"MindSpeed, Qwen3-4B, K=8, 4 chunks": 8, "MindSpeed, DeepSeek-V3 cut, K=4, 4 chunks": 4}


def formulas() -> Iterator[Row]:
    """What follows from a formula, by the schedule itself."""
    workers, number = NUM_WORKERS, NUM_MICROBATCHES
    column = f"p={workers}, m={number}"
    one, chunked = (made(name) for name in ("1f1b", "seq1f1b, 4 chunks"))
    idle = [replay(each, SLOTS).bubble for each in (one, chunked)]
    slots = [rate / (1 - rate) for rate in idle]
    what = "replayed with chunks of equal costs"
    yield "bubble of Seq1F1B over 1F1B's", f"{column}, 4 chunks", slots[1] / slots[0], "ratio", what, ()
    alive = alive_by_worker(chunked)[0] / 4 / alive_by_worker(one)[0]
    what = "counted on the first worker; what chunks keep of keys and values of earlier ones is not in it"
    yield "activations of Seq1F1B over 1F1B's", f"{column}, 4 chunks", alive, "ratio", what, ()
    for name, title in (("v-min", "V-Min"), ("v-half", "V-Half"), ("zb-v", "ZB-V")):
        schedule = made(name)
        kept = max(alive_by_worker(schedule)) / 2
        yield f"activations of {title}", column, kept, "micro-batches", "counted on the fullest worker", ()
        what = "the longest span of a worker, equal costs"
        rate = 1 - 3 * number / span(in_slots(schedule))
        yield f"bubble rate of {title}", column, rate, "ratio", what, ()
    kept = max(alive_by_worker(made("interleaved")))
    what = "counted on the fullest worker"
    yield "stages' micro-batches alive, 1F1B-I", f"{column}, v=2", kept, "micro-batches", what, ()
    for hidden, length in LAYERS:
        k = 10 / (3 * (6 * hidden + length)) * A100[0] / A100[1]
        what = "formula 1 with the figure's operations and bytes per second"
        yield "k on an A100", f"h={hidden}, s={length}", k, "ratio", what, ()


def of_others() -> Iterator[Row]:
    """What was measured with schedules that are not run here."""
    speeds, kept = zip(*(_chunked(*each) for each in SIZES), strict=True)
    column, what = "Seq1F1B, up to 64K tokens", "closed form; what is not stated is a range"
    yield "seq1f1b over 1F1B, throughput", column, median_high(speeds), "ratio", what, speeds
    what = "closed form: chunks alive on the first worker, over 1F1B's micro-batches"
    yield "seq1f1b over 1F1B, memory", column, median_high(kept), "ratio", what, kept
    for column, workers in MINDSPEED.items():
        speeds = tuple(_chunked(workers, times, 4)[0] for times in (1, 2, 4, 8))
        what = "closed form, over numbers of micro-batches"
        yield "seq1f1b over 1F1B, throughput", column, median_high(speeds), "ratio", what, speeds
    schedule = made("1f1b")
    plain_s = in_slots(schedule).makespan_s
    for (hidden, length), k in zip(LAYERS, PRINTED_KS, strict=True):
        lost = []
        for engines in (1, 2):
            copies = at_once(schedule, range(NUM_WORKERS), _copy_slots(schedule, k), engines)
            lost.append(100 * (1 - plain_s / in_slots(schedule, copies).makespan_s))
        what = "k as printed, all copied at once; one engine for both ways, or two"
        column = f"PipeOffload, h={hidden}, s={length}"
        yield "throughput lost by 1F1B, all copied", column, sum(lost) / 2, "%", what, lost


def _chunked(num_workers: int, times: int, chunks: int) -> tuple[float, float]:
    """Speed and chunks alive over 1F1B's: the closed forms of `seq1f1b`."""
    number = times * num_workers
    faster = (number + num_workers - 1) / (number + (num_workers - 1) / chunks)
    return faster, (num_workers - 1 + chunks) / (chunks * num_workers)


# The table


def made(name: str) -> Schedule:
    """A named schedule, or "seq1f1b, N chunks"."""
    if name.startswith("seq1f1b"):
        return seq1f1b(NUM_WORKERS, NUM_MICROBATCHES, int(name.split()[1]))
    return named(name, NUM_WORKERS, NUM_MICROBATCHES)


def _copy_slots(schedule: Schedule, k: float) -> list[float]:
    """One way, where a worker's share of the model takes three slots."""
    return [1.5 * k * schedule.num_workers / schedule.num_stages] * schedule.num_stages


def run() -> Outcome:
    """Steps in slots, graphs and GiB of the fullest worker: with chunks, and with copies by either rule."""
    quantities = []
    for chunks in (1, *CHUNKS):
        schedule = made(f"seq1f1b, {chunks} chunks")
        step = replay(schedule, {kind: slots / chunks for kind, slots in SLOTS.items()}).makespan_s
        alive = alive_by_worker(schedule)[0] / chunks
        quantities += _quantities({"schedule": "seq1f1b", "chunks": chunks}, step, alive)
    for name in COPIED:
        schedule, peak = made(name), _peaks(name)
        plain = in_slots(schedule)
        quantities += _of_copies({"schedule": name, "copied": "nothing"}, plain, peak)
        for k in KS:
            slots = _copy_slots(schedule, k)
            every = range(schedule.num_stages)
            ways = {
                "all, at once": at_once(schedule, every, slots),
                "all, in slots": of_slots(schedule, every, slots, plain),
            }
            if schedule.placement:
                ways["what waits longest, in slots"] = of_slots(schedule, longest(plain, 1), slots, plain)
            for way, copies in ways.items():
                key: dict[str, Scalar] = {"schedule": name, "copied": way, "k": k}
                quantities += _of_copies(key, in_slots(schedule, copies), peak)
    return Outcome(tuple(quantities), {"model": MODEL, "tokens": TOKENS})


def _of_copies(key: dict[str, Scalar], timeline: Timeline, peak: Any) -> list[Quantity]:
    workers, share = range(timeline.num_workers), timeline.num_workers / timeline.num_stages
    alive = share * max(n for worker in workers for _, n in timeline.worker_live_activations(worker))
    return _quantities(key, timeline.makespan_s, alive, None if peak is None else peak(timeline))


def _quantities(
    key: dict[str, Scalar], step: float, alive: float, gib: float | None = None
) -> list[Quantity]:
    found: list[tuple[str, float, str, Provenance]] = [
        ("step in slots", float(step), "number", "replayed"),
        ("graphs alive", float(alive), "number", "replayed"),
    ]
    if gib is not None:
        found.append(("peak memory", gib, "GiB", "modelled"))
    return [Quantity(name, value, unit, provenance, key=key) for name, value, unit, provenance in found]


def _peaks(name: str) -> Any:
    """GiB of the fullest worker that trains `MODEL`, by the timeline; None where backwards are split."""
    from gpipe_bench.models import SHAPES
    from gpipe_bench.pipeline.memory.boundary import Boundary
    from gpipe_bench.pipeline.memory.profile import Profiler
    from gpipe_bench.pipeline.memory.workers import bytes_of_stages, peak_bytes

    schedule = made(name)
    if any(action.kind == "I" for action in schedule):
        return None
    builder, options = SHAPES[MODEL]
    model = Workload(MODEL, builder, {**options, "seq_len": TOKENS}, 1)
    ends = map(Boundary.of, model.example(1, "meta"))
    layers, loss = Profiler().model(model.build("meta").bfloat16(), model.loss(), *ends)
    stages = bytes_of_stages(layers, loss, evenly(len(layers), schedule.num_stages))

    def peak(timeline: Timeline) -> float:
        return max(peak_bytes(stages, schedule, "adam", receive_ahead=1, away=away(timeline))) / GIB

    return peak


def evenly(num_layers: int, num_stages: int) -> Partition:
    """As many blocks for every stage; the embedding with the first, the output with the last."""
    each = (num_layers - 2) // num_stages
    ends = [0, *(1 + each * stage for stage in range(1, num_stages)), num_layers]
    return tuple(range(ends[stage], ends[stage + 1]) for stage in range(num_stages))


# Attention residuals

RESIDUALS, RESIDUALS_S = "attention residuals", 40.0
WORKERS = (2, 4, 8)
OPTIONS: dict[str, Any] = {
    "num_layers": 16, "layers_per_block": 2, "d_model": 1024, "ffn_dim": 2816, "num_heads": 16,
    "vocab_size": 32_000, "seq_len": 2048,
}  # fmt: skip
WAYS = ("passed on", "portals")
REMATS = ("never", "always")


def run_residuals() -> Outcome:
    """Bytes of one micro-batch of one sequence over all ways between workers and over the busiest one, and
    the fullest worker under 1F1B with M = 2K.
    """
    from gpipe_bench.pipeline.memory.boundary import Boundary
    from gpipe_bench.pipeline.memory.cut import portal_memory
    from gpipe_bench.pipeline.memory.profile import Profiler
    from gpipe_bench.pipeline.memory.workers import pipeline_memory
    from gpipe_bench.pipeline.stage.portals import declarations

    work = {way: Workload(RESIDUALS, "attnres", {**OPTIONS, "portals": way == "portals"}, 1) for way in WAYS}
    models, one = {way: each.build("meta") for way, each in work.items()}, work["passed on"]
    loss, (inputs, target) = one.loss(), map(Boundary.of, one.example(1, "meta"))
    profiler = Profiler()
    layers, of_loss = profiler.model(models["passed on"], loss, inputs, target)
    declared = declarations(models["portals"])
    one_bytes = layers[0].outputs.num_bytes  # a sum is as large as the embedding
    quantities = []
    for workers in WORKERS:
        for turns in (1, 2):
            spans = evenly(len(layers), turns * workers)
            place = loop(workers, turns)
            sent: dict[str, Counter[tuple[int, int]]] = {way: Counter() for way in WAYS}
            for stage in range(len(spans) - 1):
                there = place[stage], place[stage + 1]
                sent["passed on"][there] += layers[spans[stage][-1]].outputs.num_bytes
                sent["portals"][there] += one_bytes
            for line in edges_of(declared, spans):
                sent["portals"][place[line.source], place[line.target]] += one_bytes * len(line.names)
            for way, ways in sent.items():
                between = [size for (source, end), size in ways.items() if source != end]
                key: dict[str, Scalar] = {"K": workers, "stages": turns, "way": way}
                for name, size in (("sent", sum(between)), ("busiest", max(between))):
                    quantities.append(Quantity(name, size / MIB, "MiB", "modelled", key=key))
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
                quantities.append(Quantity("peak memory", peak, "MiB", "modelled", key=key))
    return Outcome(tuple(quantities), {"options": OPTIONS})


# All of it as text


def tables(records: Sequence[Record]) -> list[str]:
    """Chunks, then copies, then attention residuals, a line for each K."""
    found = []
    for record in of_case(records, "done", part=PART):
        values: dict[Any, Any] = {(q.name, *sorted(q.key.items())): q.value for q in record.quantities}

        def cells(key: dict[str, Scalar], *names: str, values: dict[Any, Any] = values) -> list[str]:
            found = [values.get((name, *sorted(key.items()))) for name in ("step in slots", *names)]
            return ["-" if each is None else f"{each:.4g}" for each in found]

        def copied(name: str, way: str, k: float | None = None) -> list[str]:
            key: dict[str, Scalar] = {"schedule": name, "copied": way} | ({} if k is None else {"k": k})
            return [name, way, "" if k is None else f"{k:g}", *cells(key, "graphs alive", "peak memory")]

        size = f"K = {NUM_WORKERS}, M = {NUM_MICROBATCHES}"
        found.append(
            numbers_text(
                f"Seq1F1B, {size}: chunks of sequences (replayed at equal costs; not run)",
                ["chunks", "slots", "graphs"],
                [
                    [str(n), *cells({"schedule": "seq1f1b", "chunks": n}, "graphs alive")]
                    for n in (1, *CHUNKS)
                ],
                "One chunk is 1F1B. Keys and values that later chunks need come on top.",
            )
        )
        lines = []
        for name in COPIED:
            ways = ["all, at once", "all, in slots", "what waits longest, in slots"]
            lines.append(copied(name, "nothing"))
            lines += [copied(name, way, k) for way in ways[: 3 if name != "1f1b" else 2] for k in KS]
        found.append(
            numbers_text(
                f"Activations with the host, {size} (replayed at equal costs; not run)",
                ["schedule", "copied", "k", "slots", "graphs", "GiB"],
                lines,
                "k: a layer's activations to the host and back over its forward and backward.",
                f"GiB: modelled, {record.details['model']} in bfloat16, {record.details['tokens']} "
                "tokens per micro-batch, Adam; the fullest worker.",
                "In slots nothing takes longer: what does not fit in between stays.",
            )
        )
    for record in of_case(records, "done", part=RESIDUALS):
        numbers: dict[Any, Any] = {(q.name, *q.key.values()): q.value for q in record.quantities}
        pairs = [
            *((f"{name}, {turns} a worker", name, turns) for turns in (1, 2) for name in ("sent", "busiest")),
            *((f"peak, {remat}", "peak memory", remat) for remat in REMATS),
        ]
        columns = ["K", "", *(title for title, *_ in pairs)]
        lines = [
            [str(workers), way, *(f"{numbers[name, workers, which, way]:.0f}" for _, name, which in pairs)]
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

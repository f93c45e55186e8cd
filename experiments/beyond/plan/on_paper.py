"""What others did and measured, beside our predictions of it; nothing here runs.

At scale: the best way that fits of each number of workers K and each size of tensor parallelism is what the
search of `plan` finds: replicas, shards, every schedule, every number of micro-batches. What others did is
predicted with the same costs, so that the two can be compared; what they measured stands beside it.

Published steps (results/published-steps.toml) are laid out as they were stated and not searched for: the cut
is even by the work of layers, and memory is not asked. A share of recomputation between none and all lies
between those two steps. In both cases layers are a roofline of the accelerator and links are nominal, so
every number is modelled and has the range of the share of the peak.

Elsewhere: configurations in the order of our predictions, since a plan needs no right number to be right,
only the right order. zero-bubble prints the seconds of its layers, so its settings are predicted as a
measured machine's would be; of torchtitan and Primus only the model and the workers are known, so their
layers are taken to be alike and a backward twice a forward; torchgpipe's settings are those of the roofline
of a P40 in the middle of what is unknown. What they measured is in results/paper.csv, or stands here with its
source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.experiments.beyond.plan.rules import rank_correlation
from gpipe_bench.experiments.beyond.published import load_rows
from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Metric
from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.planner.candidate import Grid, Prediction, Way
from gpipe_bench.planner.collectives import forward_kind
from gpipe_bench.planner.costs import Costs, SizeCosts
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.request import Request, link_named

if TYPE_CHECKING:
    from gpipe_bench.planner.model import Model
    from gpipe_bench.planner.search import Found, Search

AT_SCALE, PUBLISHED_STEPS, ELSEWHERE = "at scale", "published steps", "elsewhere"
STEP, THEIRS = "step", "step of what was done"
PATH = PUBLISHED / "published-steps.toml"
SECONDS = 130.0
"""That the case of published steps takes, about."""
ORDER_S = {"zero-bubble": 2.0, "torchtitan": 1.0, "Primus": 1.0, "torchgpipe": 25.0, "sweeps": 120.0}
"""By source of an order: how long its case takes."""
HOST = 8
"""Accelerators of a host, in all of them."""
WORKERS = 8
"""Of a pipeline whose layers are taken to be alike."""
ALIKE = dict.fromkeys("FGRIW", 1 / WORKERS) | {"B": 2 / WORKERS}
"""Seconds of a worker's layers there: a backward is twice a forward, each of its halves is one."""
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_8B = "torchtitan, issue 773: Llama 3 8B on 8 GPUs, pipeline of 8, mini-batch of 16, tokens per second"


def request_of(
    device_type: str, link: str, between: str, cards: int = HOST, per_host: int = HOST, **asked: Any
) -> Request:
    """As `plan` is asked, with so many network cards per host."""
    far = link_named(between, device_type) if between else None
    near, hosts = link_named(link, device_type), max(1, asked["accelerators"] // per_host)
    return Request(link=near, between=far, hosts=hosts, cards=cards, device_type=device_type, **asked)


def as_stated(costs: Costs, request: Request, way: Way, remat: str) -> Prediction:
    """A way, cut evenly by the work of layers."""
    seconds = costs.at(way.microbatch_size).layers_s
    ahead_s, back_s = seconds[forward_kind(seconds)], seconds["B"]
    cut = partition([a + b for a, b in zip(ahead_s, back_s, strict=True)], way.num_stages)
    candidate = way.candidate(cut, (remat,) * way.num_stages)
    return predict(candidate, replace(costs, profiles=None), request, parts=False)


class Done(NamedTuple):
    """What somebody did: workers K, shards (ZeRO-2), tensor parallelism, schedule, M, all recomputed.

    `measured_s` is 0 where no step was published.
    """

    name: str
    source: str
    num_workers: int
    shards: int
    tp: int
    schedule: str
    num_microbatches: int
    measured_s: float = 0.0


class Scale(NamedTuple):
    """A model on a machine: what is asked, sizes of tensor parallelism, seconds that the case takes, and what
    others did.
    """

    title: str
    request: Request
    tp: tuple[int, ...]
    seconds: float
    done: tuple[Done, ...]


SCALES: dict[str, Scale] = {
    "llama-405b": Scale(
        "Llama 3 of 405B parameters on 512 H100 of 89.4 GiB",
        request_of(
            "h100-500w", "nvlink", "infiniband", accelerators=512, memory_bytes=96 * 10**9, batch_size=256,
            precision="bfloat16", reserve_bytes=0,
        ),
        (1, 2, 4, 8), 1000.0,
        tuple(
            Done(
                f"torchtitan, {name}", f"{TITAN}, Table 5: {speed:g} tokens/s per GPU", 8, 8, 8,
                name.lower(), 32, 256 * 8192 / (512 * speed),
            )
            for name, speed in (("1F1B", 100.0), ("interleaved", 128.0))
        ),
    ),
    "transformer-1663": Scale(
        "Transformer of 1663 layers on 128 cores of TPUv3 of 16 GiB",
        request_of(
            "tpuv3", "free", "free", accelerators=128, memory_bytes=16 * 2**30, batch_size=32,
            optimizer="rmsprop", reserve_bytes=0,
        ),
        (1,), 80.0,
        (Done("GPipe, Table 1, pipeline-128", "arXiv 1811.06965, v5, Table 1", 128, 1, 1, "gpipe", 32),),
    ),
}  # fmt: skip
"""By the case's name. The paper names no interconnect, so messages of the Transformer take no time."""


def model_at_scale(name: str, batch_size: int) -> Model:
    """The paper's Transformer of so many layers, or a published shape."""
    from gpipe_bench.models.paper import HALVES
    from gpipe_bench.planner.model import built, model_of

    if not name.startswith("transformer-"):
        return model_of(name, batch_size)
    half = HALVES["transformer"]
    options = half.options | {"num_layers": int(name.removeprefix("transformer-"))}
    return built(name, half.model, options, batch_size)


def run_at_scale(name: str) -> Outcome:
    """The case of one model."""
    from gpipe_bench.planner.answer import predicted, search_for
    from gpipe_bench.planner.request import Space

    scale = SCALES[name]
    request = scale.request
    model = model_at_scale(name, request.batch_size)
    search = search_for(model, request, space=Space(tp=scale.tp, fewer=False))
    best = best_of_each_grid(search)
    rows = [_row(predicted(found, search), request, "") for found in best.values()]
    theirs = [
        _row(predicted(as_done(each, search), search), request, each.name)
        | {"source": each.source, "measured_s": each.measured_s}
        for each in scale.done
    ]
    metrics = [
        Metric(
            kind, row["step_s"], "s", "modelled",
            key={part: row[part] for part in ("name", "dp", "tp", "K") if row[part] != ""}, low=row["low_s"],
            high=row["high_s"],
        )
        for kind, some in ((STEP, rows), (THEIRS, theirs))
        for row in some
    ]  # fmt: skip
    details = {
        "title": scale.title,
        "num_parameters": model.num_parameters,
        "memory_bytes": request.memory_bytes,
        "batch_size": request.batch_size,
        "tried": search.tried,
        "skipped": search.skipped,
        "layers": search.costs.provenance["layers"],
        "grids": rows,
        "done": theirs,
    }
    return Outcome(tuple(metrics), details)


def best_of_each_grid(search: Search) -> dict[tuple[int, int], Found]:
    """The best way of each (K, tp) of those that fit."""
    found = search.run(None, of_each=lambda way: (way.grid.pp, way.grid.tp))
    return dict(sorted(((each.candidate.num_workers, each.candidate.tp), each) for each in found))


def as_done(done: Done, search: Search) -> Found:
    """What was done, cut evenly by the work of layers, everything recomputed."""
    from gpipe_bench.planner.cuts import Cut

    grid = Grid(done.num_workers, 1, done.shards, 2 if done.shards > 1 else 0, done.tp)
    size = search.request.batch_size // done.shards // done.num_microbatches
    per_worker = 2 if done.schedule == "interleaved" else 1
    way = Way(grid, done.schedule, per_worker, done.num_microbatches, size)
    times = search.times(way)
    work_s = [times.work_s(layer, layer + 1) for layer in range(times.num_layers)]
    return search.found(way, Cut(partition(work_s, way.num_stages), ("always",) * way.num_stages, 1.0))


def _row(prediction: Prediction, request: Request, name: str) -> dict[str, Any]:
    candidate = prediction.candidate
    return {
        "name": name,
        "dp": candidate.dp * candidate.fsdp,
        "fsdp": candidate.fsdp,
        "fsdp_level": candidate.fsdp_level,
        "tp": candidate.tp,
        "K": candidate.num_workers,
        "M": candidate.num_microbatches,
        "schedule": candidate.schedule,
        "recomputed": sum(each == "always" for each in candidate.remat),
        "stages": len(candidate.remat),
        "step_s": prediction.step_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "peak_bytes": prediction.peak,
        "fits": prediction.peak <= request.memory_bytes,
    }


@dataclass(frozen=True, kw_only=True)
class Step:
    """A row of the file, which says what each of them is."""

    name: str
    source: str
    device: str
    accelerators: int
    link: str
    batch_size: int
    recomputed: float
    attention: str
    differs: str
    shape: str = ""
    builder: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    between: str = ""
    cards: int = HOST
    per_host: int = HOST
    precision: str = "bfloat16"
    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    level: int = 0
    tp: int = 1
    schedule: str = "1f1b"
    stages_per_worker: int = 1
    num_microbatches: int = 1
    fuses: bool = False
    speed: float = 0.0
    step_s: float = 0.0

    @property
    def measured_s(self) -> float:
        """Of a step."""
        if self.step_s:
            return self.step_s
        return self.batch_size * int(self.model().inputs.tensors[0].shape[1]) / self.accelerators / self.speed

    def model(self) -> Model:
        """On the meta device, with the attention that it had."""
        from gpipe_bench.models import SHAPES
        from gpipe_bench.planner.model import built

        builder, options = SHAPES[self.shape] if self.shape else (self.builder, self.options)
        return replace(built(self.name, builder, options, self.batch_size), attention=self.attention)

    def predicted(self) -> tuple[float, float, float]:
        """Seconds of the step, and the ends of its range."""
        from gpipe_bench.planner.accelerators import accelerator
        from gpipe_bench.planner.roofline import by_roofline

        request = request_of(
            self.device, self.link, self.between, self.cards, self.per_host, accelerators=self.accelerators,
            memory_bytes=2**60, batch_size=self.batch_size, precision=self.precision,
        )  # fmt: skip
        size = self.batch_size // (self.dp * self.fsdp * self.num_microbatches)
        on = replace(accelerator(self.device, self.precision), fuses=self.fuses)
        costs = by_roofline(self.model(), request, (size,), on)
        grid = Grid(self.pp, self.dp, self.fsdp, self.level, self.tp)
        way = Way(grid, self.schedule, self.stages_per_worker, self.num_microbatches, size)
        none, every = (as_stated(costs, request, way, remat) for remat in ("never", "always"))
        middle, low, high = (
            (1 - self.recomputed) * getattr(none, end) + self.recomputed * getattr(every, end)
            for end in ("step_s", "low_s", "high_s")
        )
        return middle, low, high


@cache
def steps() -> tuple[Step, ...]:
    """Of the file."""
    return tuple(Step(**row) for row in tomllib.loads(PATH.read_text(encoding="utf-8"))["step"])


@cache
def sweeps() -> dict[str, tuple[Step, ...]]:
    """Of the file: ways of one cluster, by the sweep's name."""
    found = {}
    for row in tomllib.loads(PATH.read_text(encoding="utf-8"))["sweep"]:
        common = {key: value for key, value in row.items() if key != "ways"}
        found[row["name"]] = tuple(Step(**(common | way)) for way in row["ways"])
    return found


def of_sweep(name: str) -> Ordered:
    """Its ways in the order of our predictions, in examples per second."""
    steps = sweeps()[name]
    names = [f"pp {s.pp} dp {s.dp * s.fsdp} tp {s.tp} M {s.num_microbatches} {s.device}" for s in steps]
    predicted = [step.batch_size / step.predicted()[0] for step in steps]
    return Ordered(name, steps[0].source, names, [s.batch_size / s.measured_s for s in steps], predicted)


def run_published() -> Outcome:
    """The case of all published steps."""
    rows: list[dict[str, Any]] = [
        {"name": step.name, "source": step.source, "differs": step.differs, "measured_s": step.measured_s}
        | dict(zip(("step_s", "low_s", "high_s"), step.predicted(), strict=True))
        for step in steps()
    ]
    metrics = [
        Metric(
            STEP, row["step_s"], "s", "modelled", key={"name": row["name"]}, low=row["low_s"],
            high=row["high_s"],
        )
        for row in rows
    ]  # fmt: skip
    return Outcome(tuple(metrics), {"steps": rows})


class Ordered(NamedTuple):
    """Configurations of one source that can be compared with each other.

    `speeds` and `predicted` are in units of their own, larger is faster.
    """

    group: str
    source: str
    names: Sequence[str]
    speeds: Sequence[float]
    predicted: Sequence[float]

    @property
    def correlation(self) -> float:
        """Of the ranks."""
        return rank_correlation(self.speeds, self.predicted)

    @property
    def regret(self) -> float:
        """How much longer a step of the one predicted to be the fastest took there than of the fastest."""
        chosen = max(range(len(self.names)), key=self.predicted.__getitem__)
        return max(self.speeds) / self.speeds[chosen] - 1


def run_order(source: str) -> Outcome:
    """The case of one source."""
    orders = SOURCES[source]()
    metrics = [
        Metric(name, value, "ratio", "modelled", key={"group": each.group}, note=each.source)
        for each in orders
        for name, value in (("rank correlation", each.correlation), ("regret", each.regret))
    ]
    details = [each._asdict() | {"correlation": each.correlation, "regret": each.regret} for each in orders]
    return Outcome(tuple(metrics), {"orders": details})


def zero_bubble() -> list[Ordered]:
    """Table 4's settings: 1F1B, interleaved, and zero bubble within its memory and within twice as much."""
    speeds, found = _of_paper("zero-bubble-speed"), []
    for row in load_rows():
        if (row.table, row.row) != ("zero-bubble-speed", "throughput of 1F1B-I over 1F1B"):
            continue
        names = ("1F1B", "1F1B-I", "ZB-1p", "ZB-2p")
        turns = int(row.stages_per_worker)
        ways = (("1f1b", 1), ("interleaved", turns), ("zb-h1", 1), ("zb-h2", 1))
        times_s = {kind.value: ms / 1e3 for kind, ms in row.times_ms().items()}
        seconds = {"G": times_s["F"], **{kind: times_s[kind] for kind in "BIW"}}
        link = Link("their messages", float(row.message_ms) / 1e3)
        sizes = row.workers, int(row.num_microbatches)
        predicted = [_speed(seconds, turns, link, *sizes, *way, "never") for way in ways]
        source = "arXiv 2401.10241, Table 4; times of Table 5"
        measured = [1.0, *(speeds[f"throughput of {name} over 1F1B", row.column] for name in names[1:])]
        found.append(Ordered(f"zero bubble, {row.column}", source, names, measured, predicted))
    return found


def torchtitan() -> list[Ordered]:
    """Llama 3 405B on 512 GPUs, and 8B on eight."""
    ratio = _of_paper()["interleaved over 1F1B, throughput", "torchtitan, 405B, K=8"]
    # 126 layers on 8 workers; float8 and tensor parallelism change the seconds of all alike.
    large = [("1F1B", "1f1b", 1, "always", 1.0), ("interleaved", "interleaved", 2, "always", ratio)]
    small = [
        ("interleaved", "interleaved", 2, "never", 304.0),
        ("zero bubble, two stages per worker", "zb-v", 2, "never", 339.0),
        ("interleaved, recomputed", "interleaved", 2, "always", 243.0),
    ]
    return [
        _alike("torchtitan, 405B, K = 8", TITAN, 128, 32, large),
        _alike("torchtitan, 8B, K = 8", TITAN_8B, 32, 16, small),
    ]


def primus() -> list[Ordered]:
    """Llama 2 7B on eight GPUs, relative to 1F1B."""
    printed, column = _of_paper(), "Primus, Llama2-7B, K=8"
    ways = [("1F1B", "1f1b", 1, "never", 1.0)]
    ways += [
        (name, name, 2, "never", printed[f"{name} over 1F1B, throughput", column])
        for name in ("interleaved", "zb-v", "v-half", "v-min")
    ]
    source = "AMD, Primus-pipeline: Llama2-7B on 8 stages"
    return [_alike("Primus, 7B, K = 8", source, 32, 32, ways)]


def torchgpipe() -> list[Ordered]:
    """The speeds of its benchmarks, by the roofline of a P40."""
    from gpipe_bench.experiments.paper.predicted import torchgpipe as published

    measured = {cell.key: float(cell.value) for cell in load_paper() if cell.source == "torchgpipe"}
    found = []
    for model, settings in published.SETTINGS.items():
        found_there = published.predict(model)
        known = [each.cell for each in settings if each.cell in measured]
        if len(known) > 1:
            names = [f"{row.removesuffix(' throughput')} {column}" for _, row, column in known]
            speeds, predicted = (
                [measured[cell] for cell in known],
                [found_there[cell] for cell in known],
            )
            group = f"torchgpipe, {published.TITLES[model]}"
            found.append(Ordered(group, "torchgpipe documentation, benchmarks", names, speeds, predicted))
    return found


SOURCES: dict[str, Callable[[], list[Ordered]]] = {
    "zero-bubble": zero_bubble, "torchtitan": torchtitan, "Primus": primus, "torchgpipe": torchgpipe,
    "sweeps": lambda: [of_sweep(name) for name in sweeps()],
}  # fmt: skip


def _alike(
    group: str, source: str, layers: int, number: int, ways: Sequence[tuple[str, str, int, str, float]]
) -> Ordered:
    """Of layers that are alike on eight workers; ways are names, schedules, stages per worker,
    re-materialization and speeds.
    """
    each = layers // WORKERS
    predicted = [_speed(ALIKE, each, FREE, WORKERS, number, *way[1:4]) for way in ways]
    return Ordered(group, source, [way[0] for way in ways], [way[4] for way in ways], predicted)


def _speed(
    seconds: Mapping[str, float], each: int, link: Link, workers: int, number: int, *way: Any
) -> float:
    """Steps per second of workers with so many layers each, which together take these seconds by kind; `way`
    is schedule, stages per worker and re-materialization.
    """
    name, per_worker, remat = way
    size = SizeCosts(layers_s={kind: (all_s / each,) * each * workers for kind, all_s in seconds.items()})
    request = Request(accelerators=workers, memory_bytes=2**60, batch_size=number, link=link)
    laid_out = Way(Grid(workers), name, per_worker, number, 1)
    return 1 / as_stated(Costs(sizes={1: size}), request, laid_out, remat).step_s


def _of_paper(table: str = "") -> dict[Any, float]:
    """Numbers of others, by row and column."""
    cells = [cell for cell in load_paper() if cell.source == "others" and table in ("", cell.table)]
    return {(cell.row, cell.column): float(cell.value) for cell in cells}

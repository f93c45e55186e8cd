"""The largest grids on paper: the step over (dp, tp, K), beside what was done on such machines.

Nothing here runs: layers are a roofline of the accelerator, links are nominal, so every number is modelled
and has the range of the share of the peak. Of each number of workers K and each size of tensor parallelism
the best way that fits is what the search of `plan` finds: replicas, shards, every schedule, every number of
micro-batches. What others did is predicted with the same costs, so that the two can be compared; what they
measured stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity, Scalar

if TYPE_CHECKING:
    from gpipe_bench.planner.found import Found
    from gpipe_bench.planner.models import Model
    from gpipe_bench.planner.prediction import Prediction
    from gpipe_bench.planner.request import Request
    from gpipe_bench.planner.search import Search
    from gpipe_bench.planner.space import Way

PART = "at scale"
STEP = "step"
THEIRS = "step of what was done"
HOST = 8
"""Accelerators of a host."""

TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, Table 5: {speed} tokens/s per GPU"


@dataclass(frozen=True)
class Done:
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


@dataclass(frozen=True)
class Scale:
    """A model on a machine.

    Args:
        title: for tables
        accelerators, memory_bytes: how many, of how much each
        device_type, link, between: as `plan` has them; `link` inside a host
        batch_size: examples
        tp: sizes of tensor parallelism
        optimizer, precision: as `plan` has them
        seconds: that the case takes, about
        done: what others did
    """

    title: str
    accelerators: int
    memory_bytes: int
    device_type: str
    link: str
    between: str
    batch_size: int
    tp: tuple[int, ...]
    optimizer: str
    precision: str
    seconds: float
    done: tuple[Done, ...]


def _titan(name: str, schedule: str, speed: float) -> Done:
    measured_s = 256 * 8192 / (512 * speed)
    return Done(name, TITAN.format(speed=f"{speed:g}"), 8, 8, 8, schedule, 32, measured_s)


SCALES: dict[str, Scale] = {
    "llama-405b": Scale(
        title="Llama 3 of 405B parameters on 512 H100 of 89.4 GiB",
        accelerators=512, memory_bytes=96 * 10**9, device_type="h100-500w", link="nvlink",
        between="infiniband", batch_size=256, tp=(1, 2, 4, 8), optimizer="adam",
        precision="bfloat16", seconds=1000.0,
        done=(
            _titan("torchtitan, 1F1B", "1f1b", 100.0),
            _titan("torchtitan, interleaved", "interleaved", 128.0),
        ),
    ),
    "transformer-1663": Scale(
        title="Transformer of 1663 layers on 128 cores of TPUv3 of 16 GiB",
        accelerators=128, memory_bytes=16 * 2**30, device_type="tpuv3", link="free", between="free",
        batch_size=32, tp=(1,), optimizer="rmsprop", precision="float32", seconds=80.0,
        done=(Done("GPipe, Table 1, pipeline-128", "arXiv 1811.06965, v5, Table 1", 128, 1, 1, "gpipe", 32),),
    ),
}  # fmt: skip
"""By the case's name. The paper names no interconnect, so messages of the Transformer take no time."""


def run(key: dict[str, Scalar]) -> Outcome:
    """The case of one model."""
    from gpipe_bench.planner.answer import predicted, search_for
    from gpipe_bench.planner.space import Space

    name = str(key["model"])
    scale = SCALES[name]
    model, request = _model(name, scale), request_of(scale)
    search = search_for(model, request, space=Space(tp=scale.tp, fewer=False))
    best = best_of_each_grid(search)
    rows = [_row(predicted(found, search), request, "") for found in best.values()]
    theirs = [
        _row(prediction, request, each.name) | {"source": each.source, "measured_s": each.measured_s}
        for each in scale.done
        for prediction in (predicted(as_done(each, search), search),)
    ]
    quantities = [
        Quantity(
            name=kind,
            key={part: row[part] for part in ("name", "dp", "tp", "K") if row[part] != ""},
            value=row["step_s"], unit="s", provenance="modelled", low=row["low_s"], high=row["high_s"],
        )
        for kind, some in ((STEP, rows), (THEIRS, theirs))
        for row in some
    ]  # fmt: skip
    details = {
        "title": scale.title,
        "num_parameters": model.num_parameters,
        "memory_bytes": scale.memory_bytes,
        "batch_size": scale.batch_size,
        "tried": search.tried,
        "skipped": search.skipped,
        "layers": search.costs.provenance["layers"],
        "grids": rows,
        "done": theirs,
    }
    return Outcome(tuple(quantities), details)


def request_of(scale: Scale) -> Request:
    """As `plan` is asked."""
    from gpipe_bench.planner.links import link_named
    from gpipe_bench.planner.request import Request

    return Request(
        accelerators=scale.accelerators, memory_bytes=scale.memory_bytes, batch_size=scale.batch_size,
        link=link_named(scale.link, scale.device_type), between=link_named(scale.between, scale.device_type),
        hosts=max(1, scale.accelerators // HOST), optimizer=scale.optimizer, precision=scale.precision,
        device_type=scale.device_type, reserve_bytes=0,
    )  # fmt: skip


def best_of_each_grid(search: Search) -> dict[tuple[int, int], Found]:
    """The best way of each (K, tp) of those that fit."""
    found = search.run(None, of_each=lambda way: (way.grid.pp, way.grid.tp))
    return dict(sorted(((each.candidate.num_workers, each.candidate.tp), each) for each in found))


def as_done(done: Done, search: Search) -> Found:
    """What was done, cut evenly by the work of layers, everything recomputed."""
    from gpipe_bench.pipeline.plan.cutting.best import Cut
    from gpipe_bench.pipeline.plan.partition import partition
    from gpipe_bench.planner.grids import Grid
    from gpipe_bench.planner.space import Way

    stages_per_worker = 2 if done.schedule == "interleaved" else 1
    grid = Grid(done.num_workers, 1, done.shards, 2 if done.shards > 1 else 0, done.tp)
    size = search.request.batch_size // done.shards // done.num_microbatches
    way: Way = Way(grid, done.schedule, stages_per_worker, done.num_microbatches, size)
    times = search.parts.times(way)
    work_s = [times.least_s(layer, layer + 1) for layer in range(times.num_layers)]
    cut = partition(work_s, way.num_stages)
    return search.found(way, Cut(cut, ("always",) * way.num_stages, 1.0, 0.0))


def _model(name: str, scale: Scale) -> Model:
    from gpipe_bench.models.paper import HALVES
    from gpipe_bench.planner.models import built, model_of

    if name.startswith("transformer-"):
        half = HALVES["transformer"]
        options = half.options | {"num_layers": int(name.removeprefix("transformer-"))}
        return built(name, half.model, options, scale.batch_size)
    return model_of(name, scale.batch_size)


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

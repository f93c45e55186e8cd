"""The largest models on paper: what is planned for them beside what others did, and published steps.

Nothing here runs: layers are a roofline of the accelerator, links are nominal, so every number is modelled
and has the range of the share of the peak.

At scale, the best way that fits of each number of workers K and each size of tensor parallelism is what the
search of `plan` finds: replicas, shards, every schedule, every number of micro-batches. What others did is
predicted with the same costs, so that the two can be compared; what they measured stands beside it.

Published steps (results/published-steps.toml) are laid out as they were stated and not searched for: the cut
is even by the work of layers, and memory is not asked. A share of recomputation between none and all lies
between those two steps.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.places import PUBLISHED
from gpipe_bench.harness.record import Quantity

if TYPE_CHECKING:
    from gpipe_bench.planner.candidate import Prediction
    from gpipe_bench.planner.model import Model
    from gpipe_bench.planner.request import Request
    from gpipe_bench.planner.search import Found, Search

AT_SCALE, PUBLISHED_STEPS = "at scale", "published steps"
STEP, THEIRS = "step", "step of what was done"
PATH = PUBLISHED / "published-steps.toml"
SECONDS = 130.0
"""That the case of published steps takes, about."""
HOST = 8
"""Accelerators of a host, in all of them."""
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

    def request(self) -> Request:
        """As `plan` is asked."""
        from gpipe_bench.planner.request import Request
        from gpipe_bench.planner.topology import link_named

        link, between = (link_named(name, self.device_type) for name in (self.link, self.between))
        return Request(
            accelerators=self.accelerators, memory_bytes=self.memory_bytes, batch_size=self.batch_size,
            link=link, between=between, hosts=max(1, self.accelerators // HOST), optimizer=self.optimizer,
            precision=self.precision, device_type=self.device_type, reserve_bytes=0,
        )  # fmt: skip

    def model(self, name: str) -> Model:
        """The paper's Transformer of so many layers, or a published shape."""
        from gpipe_bench.models.paper import HALVES
        from gpipe_bench.planner.model import built, model_of

        if not name.startswith("transformer-"):
            return model_of(name, self.batch_size)
        half = HALVES["transformer"]
        options = half.options | {"num_layers": int(name.removeprefix("transformer-"))}
        return built(name, half.model, options, self.batch_size)


SCALES: dict[str, Scale] = {
    "llama-405b": Scale(
        title="Llama 3 of 405B parameters on 512 H100 of 89.4 GiB",
        accelerators=512, memory_bytes=96 * 10**9, device_type="h100-500w", link="nvlink",
        between="infiniband", batch_size=256, tp=(1, 2, 4, 8), optimizer="adam",
        precision="bfloat16", seconds=1000.0,
        done=tuple(
            Done(
                f"torchtitan, {name}", TITAN.format(speed=f"{speed:g}"), 8, 8, 8, name.lower(), 32,
                256 * 8192 / (512 * speed),
            )
            for name, speed in (("1F1B", 100.0), ("interleaved", 128.0))
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


def run_at_scale(name: str) -> Outcome:
    """The case of one model."""
    from gpipe_bench.planner.answer import predicted, search_for
    from gpipe_bench.planner.space import Space

    scale = SCALES[name]
    model, request = scale.model(name), scale.request()
    search = search_for(model, request, space=Space(tp=scale.tp, fewer=False))
    best = best_of_each_grid(search)
    rows = [_row(predicted(found, search), request, "") for found in best.values()]
    theirs = [
        _row(predicted(as_done(each, search), search), request, each.name)
        | {"source": each.source, "measured_s": each.measured_s}
        for each in scale.done
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


def best_of_each_grid(search: Search) -> dict[tuple[int, int], Found]:
    """The best way of each (K, tp) of those that fit."""
    found = search.run(None, of_each=lambda way: (way.grid.pp, way.grid.tp))
    return dict(sorted(((each.candidate.num_workers, each.candidate.tp), each) for each in found))


def as_done(done: Done, search: Search) -> Found:
    """What was done, cut evenly by the work of layers, everything recomputed."""
    from gpipe_bench.pipeline.plan.partition import partition
    from gpipe_bench.planner.candidate import Grid, Way
    from gpipe_bench.planner.cuts import Cut

    stages_per_worker = 2 if done.schedule == "interleaved" else 1
    grid = Grid(done.num_workers, 1, done.shards, 2 if done.shards > 1 else 0, done.tp)
    size = search.request.batch_size // done.shards // done.num_microbatches
    way = Way(grid, done.schedule, stages_per_worker, done.num_microbatches, size)
    times = search.times(way)
    work_s = [times.least_s(layer, layer + 1) for layer in range(times.num_layers)]
    cut = partition(work_s, way.num_stages)
    return search.found(way, Cut(cut, ("always",) * way.num_stages, 1.0, 0.0))


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
    cards: float = 1.0
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

    def request(self) -> Request:
        """As `plan` is asked."""
        from gpipe_bench.pipeline.plan.links import LINKS
        from gpipe_bench.planner.request import Request

        far = LINKS[self.between] if self.between else None
        if far is not None:
            far = replace(far, bandwidth_bytes_per_s=self.cards * far.bandwidth_bytes_per_s)
        return Request(
            accelerators=self.accelerators, memory_bytes=2**60, batch_size=self.batch_size,
            link=LINKS[self.link], between=far, hosts=self.accelerators // HOST, precision="bfloat16",
            device_type=self.device,
        )  # fmt: skip

    def predicted(self) -> tuple[float, float, float]:
        """Seconds of the step, and the ends of its range."""
        none, every = (_laid_out(self, remat) for remat in ("never", "always"))
        middle, low, high = (
            (1 - self.recomputed) * getattr(none, end) + self.recomputed * getattr(every, end)
            for end in ("step_s", "low_s", "high_s")
        )
        return middle, low, high


@cache
def steps() -> tuple[Step, ...]:
    """Of the file."""
    return tuple(Step(**row) for row in tomllib.loads(PATH.read_text(encoding="utf-8"))["step"])


def _laid_out(step: Step, remat: str) -> Prediction:
    from gpipe_bench.pipeline.plan.partition import partition
    from gpipe_bench.planner.accelerators import accelerator
    from gpipe_bench.planner.candidate import Candidate
    from gpipe_bench.planner.predict import predict
    from gpipe_bench.planner.roofline import by_roofline

    request = step.request()
    size = step.batch_size // (step.dp * step.fsdp * step.num_microbatches)
    on = replace(accelerator(step.device, "bfloat16"), fuses=step.fuses)
    costs = by_roofline(step.model(), request, (size,), on)
    seconds = costs.at(size).layers_s
    stages = step.pp * step.stages_per_worker
    candidate = Candidate(
        cut=partition([f + b for f, b in zip(seconds["F"], seconds["B"], strict=True)], stages),
        schedule=step.schedule, num_microbatches=step.num_microbatches, remat=(remat,) * stages,
        num_workers=step.pp, stages_per_worker=step.stages_per_worker, dp=step.dp, fsdp=step.fsdp,
        fsdp_level=step.level, tp=step.tp,
    )  # fmt: skip
    return predict(candidate, replace(costs, profiles=None), request)


def run_published() -> Outcome:
    """The case of all published steps."""
    rows: list[dict[str, Any]] = [
        {"name": step.name, "source": step.source, "differs": step.differs, "measured_s": step.measured_s}
        | dict(zip(("step_s", "low_s", "high_s"), step.predicted(), strict=True))
        for step in steps()
    ]
    quantities = [
        Quantity(
            name=STEP, key={"name": row["name"]}, value=row["step_s"], unit="s", provenance="modelled",
            low=row["low_s"], high=row["high_s"],
        )
        for row in rows
    ]  # fmt: skip
    return Outcome(tuple(quantities), {"steps": rows})

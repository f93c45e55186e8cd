"""The smallest peak there is, where it is, and what would help where that is still too much.

Whoever's model does not fit wants to know by how much, and what to change; and whoever asks how a model fits
(`size`) wants the same cut. So for each grid the cut is searched whose fullest worker is smallest, at the
smallest micro-batches; and the same for what could be asked instead. No layer has to be timed for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpipe_bench.experiments.planning.models import Model
from gpipe_bench.experiments.planning.request import Request
from gpipe_bench.experiments.planning.searching.footprints import Footprints
from gpipe_bench.experiments.planning.searching.grids import Grid
from gpipe_bench.experiments.planning.searching.room import Room, Rules
from gpipe_bench.experiments.planning.searching.space import Space, grids, splits
from gpipe_bench.pipeline.memory.stages.peaks import OPTIMIZERS, StageMemory
from gpipe_bench.pipeline.plan.cutting.by_cost import leanest, partition_by
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.remat import Choice, Remat, choice_of, to_text
from gpipe_bench.pipeline.plan.schedules.known import named

GIB = 2**30
MOST_LAYERS = 256
"""Of a model whose cuts are searched by their peaks; longer ones are cut by what their layers hold."""
MOST_UNEQUAL = 64
"""Of one whose stages are searched for apart, where each of them holds another number of micro-batches."""


@dataclass(frozen=True)
class Manner:
    """How a model is to run whose peak is asked for.

    Args:
        schedules: of which the one with the smaller peak counts
        remat: what is recomputed; choices per stage go with a single schedule and grid
        in_one: whether all accelerators are one pipeline, and stay one where there are more of them
    """

    schedules: tuple[str, ...] = ("gpipe", "1f1b")
    remat: Remat = "always"
    in_one: bool = False


LEANEST = Manner()
"""What needs least memory: with one stage per worker and everything recomputed."""


@dataclass(frozen=True)
class Smallest:
    """The grid and cut with the smallest peak; the stages of each worker are those of `homes`."""

    grid: Grid
    schedule: str
    remat: Remat
    homes: tuple[tuple[int, ...], ...]
    cut: Partition
    num_microbatches: int
    memory: tuple[StageMemory, ...]

    @property
    def peak(self) -> int:
        return max(each.peak for each in self.memory)

    def layers_of(self, worker: int) -> str:
        """`0-3`, or `0-3 8-11` where the worker has two stages."""
        spans = [self.cut[stage] for stage in self.homes[worker]]
        return " ".join(f"{span.start}-{span.stop - 1}" for span in spans)

    def where(self) -> str:
        """The stage that is fullest, and when."""
        worst = max(range(len(self.memory)), key=lambda worker: self.memory[worker].peak)
        home = "stage" if len(self.homes[worst]) == 1 else "worker"
        again = "everything" if self.remat == "always" else to_text(self.remat)
        again = "nothing" if self.remat == "never" else again
        return (
            f"on {home} {worst} (layers {self.layers_of(worst)}) at {self.memory[worst].when}, with "
            f"{self.grid}, {self.schedule}, {self.num_microbatches} micro-batches and {again} recomputed"
        )


def smallest(
    model: Model, request: Request, space: Space, enough: int = 0, manner: Manner = LEANEST
) -> Smallest | None:
    """The smallest peak of all grids, or the first of at most `enough` bytes; None where there is no grid."""
    found: Smallest | None = None
    known: dict[tuple[int, bool], Footprints] = {}
    for grid in sorted(grids(request, space), key=lambda grid: (-grid.pp, -grid.fsdp)):
        share, rest = divmod(request.batch_size, grid.replicas)
        if rest or grid.pp > len(model.layers):
            continue
        counts = [m for m in space.microbatches or (share,) if m <= share and share % m == 0]
        if not counts:
            continue
        size = share // max(counts)
        for schedule in manner.schedules[-1:] if grid.pp == 1 else manner.schedules:
            split = splits(schedule)
            if (size, split) not in known:
                known[size, split] = Footprints(
                    model.profile_of(size, request.precision, compiled=request.compiled, split_backward=split)
                )
            if named(schedule, grid.pp, 1).num_stages > len(model.layers):
                continue
            rules = Rules(request.optimizer, grid, model.ties)
            each = _least(known[size, split], rules, schedule, max(counts), manner.remat, enough)
            if found is None or each.peak < found.peak:
                found = each
            if found.peak <= enough:
                return found
    return found


def _least(
    footprints: Footprints, rules: Rules, name: str, count: int, remat: Remat, enough: int
) -> Smallest:
    """The cut of one grid whose fullest worker is smallest, or an even one if that takes `enough` at most.

    Where a worker has several stages the cut is even.
    """
    schedule, layers = named(name, rules.grid.pp, count), footprints.profile.layers
    room, workers = Room(footprints, schedule, rules), schedule.num_workers
    homes = tuple(schedule.stages_of(worker) for worker in range(workers))

    def choices(stages: tuple[int, ...]) -> tuple[Choice, ...]:
        return tuple(choice_of(remat, stage) for stage in stages)

    def found(cut: Partition) -> Smallest:
        memory = tuple(
            room.memory(worker, tuple(cut[stage] for stage in mine), choices(mine))
            for worker, mine in enumerate(homes)
        )
        return Smallest(rules.grid, name, remat, homes, cut, count, memory)

    def peak(stage: int, start: int, stop: int) -> int:
        return room.memory(stage, (range(start, stop),), choices((stage,))).peak

    held = [4 * layer.parameter_bytes + layer.first.kept_inside + layer.outputs.num_bytes for layer in layers]
    even = found(partition(held, schedule.num_stages))
    only = schedule.num_stages == len(layers)
    if only or even.peak <= enough or len(layers) > MOST_LAYERS or schedule.placement:
        return even
    if (name != "gpipe" or not isinstance(remat, str)) and len(layers) <= MOST_UNEQUAL:
        return found(leanest(peak, len(layers), workers))
    cut = partition_by(
        lambda start, stop: peak(0 if start == 0 else min(1, workers - 1), start, stop),
        len(layers), workers, cap=2**62, floor=_floor(footprints, rules),
    )  # fmt: skip
    return even if cut is None else min(even, found(cut), key=lambda each: each.peak)


def _floor(footprints: Footprints, rules: Rules) -> list[int]:
    """Bytes that each layer adds to any stage: its parameters and their state; a tied one's may be there."""
    tied = {layer for tie in rules.ties for layer in tie.layers}
    state, shares = OPTIMIZERS[rules.optimizer].state, rules.grid.fsdp * rules.grid.tp
    return [
        0 if index in tied else (layer.parameter_bytes + state * sum(layer.trained_sizes)) // shares
        for index, layer in enumerate(footprints.profile.layers)
    ]


def nothing_fits(
    model: Model, request: Request, space: Space, least: Smallest, manner: Manner = LEANEST
) -> str:
    """One line: the smallest peak, where it is, and what would do."""
    helps = [
        *_remedies(model, request, space, manner),
        f"--memory-gib {math.ceil(least.peak / GIB * 100) / 100:g}",
    ]
    return (
        f"{model.name} does not fit: the smallest peak is {least.peak / GIB:.2f} GiB, {least.where()}; there "
        f"are {request.memory_bytes / GIB:g} GiB. What would do: " + ", or ".join(helps)
    )


def _remedies(model: Model, request: Request, space: Space, manner: Manner) -> Iterator[str]:
    """What fits when it alone is changed, as options of the command line."""

    def fits(changed: Request, within: Space = space, other: Manner = manner) -> bool:
        least = smallest(model, changed, within, changed.memory_bytes, other)
        return least is not None and least.peak <= changed.memory_bytes

    if space.microbatches is not None and fits(request, replace(space, microbatches=None)):
        yield "no --num-microbatches"
    if manner.remat != "always" and fits(request, other=replace(manner, remat="always")):
        yield "--remat always"
    for times in (2, 4, 8) if isinstance(manner.remat, str) else ():
        more = replace(request, accelerators=request.accelerators * times)
        if fits(more, replace(space, pp=(more.accelerators,)) if manner.in_one else space):
            yield f"--accelerators {more.accelerators}"
            break
    if request.precision == "float32" and fits(replace(request, precision="bfloat16")):
        yield "--precision bfloat16"
    if request.optimizer != "sgd" and fits(replace(request, optimizer="sgd")):
        yield "--optimizer sgd"

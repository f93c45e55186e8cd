"""Where nothing fits: the smallest peak there is, where it is, and what would help.

Whoever's model does not fit wants to know by how much, and what to change. So for each grid the cut is
searched whose fullest worker is smallest, at the smallest micro-batches and with everything recomputed; and
the same for what could be asked instead. No layer has to be timed for that.
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
from gpipe_bench.experiments.planning.searching.space import Space, grids
from gpipe_bench.pipeline.memory.stages.peaks import StageMemory
from gpipe_bench.pipeline.plan.partition import Partition, partition, partition_by
from gpipe_bench.pipeline.plan.schedules.known import named

GIB = 2**30
MOST_LAYERS = 256
"""Of a model whose cuts are searched by their peaks; longer ones are cut by what their layers hold."""


@dataclass(frozen=True)
class Smallest:
    """The grid and cut with the smallest peak."""

    grid: Grid
    cut: Partition
    num_microbatches: int
    memory: tuple[StageMemory, ...]

    @property
    def peak(self) -> int:
        return max(each.peak for each in self.memory)

    def where(self) -> str:
        """The stage that is fullest, and when."""
        worst = max(range(len(self.memory)), key=lambda worker: self.memory[worker].peak)
        layers = self.cut[worst]
        return (
            f"on stage {worst} (layers {layers.start}-{layers.stop - 1}) at {self.memory[worst].when}, with "
            f"{self.grid}, {self.num_microbatches} micro-batches and everything recomputed"
        )


def smallest(model: Model, request: Request, space: Space, enough: int = 0) -> Smallest | None:
    """The smallest peak of all grids, or the first of at most `enough` bytes; None where there is no grid."""
    found: Smallest | None = None
    known: dict[int, Footprints] = {}
    for grid in sorted(grids(request, space), key=lambda grid: (-grid.pp, -grid.fsdp)):
        share, rest = divmod(request.batch_size, grid.replicas)
        if rest or grid.pp > len(model.layers):
            continue
        counts = [m for m in space.microbatches or (share,) if m <= share and share % m == 0]
        if not counts:
            continue
        size = share // max(counts)
        if size not in known:
            known[size] = Footprints(model.profile_of(size, request.precision, compiled=request.compiled))
        for schedule in ("gpipe", "1f1b")[grid.pp == 1 :]:
            each = _least(known[size], grid, schedule, max(counts), model, request, space, enough)
            if found is None or each.peak < found.peak:
                found = each
            if found.peak <= enough:
                return found
    return found


def _least(
    footprints: Footprints,
    grid: Grid,
    schedule: str,
    count: int,
    model: Model,
    request: Request,
    space: Space,
    enough: int,
) -> Smallest:
    """The cut of one grid whose fullest worker is smallest, or an even one if that takes `enough` at most."""
    room = Room(footprints, named(schedule, grid.pp, count), Rules(request.optimizer, grid, model.ties))
    remat = (space.remats[-1],)

    def peak(start: int, stop: int) -> int:
        return room.memory(0 if start == 0 else min(1, grid.pp - 1), (range(start, stop),), remat).peak

    layers = footprints.profile.layers

    def found(cut: Partition) -> Smallest:
        memory = tuple(room.memory(worker, (stage,), remat) for worker, stage in enumerate(cut))
        return Smallest(grid, cut, count, memory)

    held = [4 * layer.parameter_bytes + layer.first.kept_inside + layer.outputs.num_bytes for layer in layers]
    even = found(partition(held, grid.pp))
    if even.peak <= enough or len(layers) > MOST_LAYERS:
        return even
    cut = partition_by(peak, len(layers), grid.pp, cap=2**62)
    return even if cut is None else found(cut)


def nothing_fits(model: Model, request: Request, space: Space, least: Smallest) -> str:
    """One line: the smallest peak, where it is, and what would do."""
    helps = [*_remedies(model, request, space), f"--memory-gib {math.ceil(least.peak / GIB * 100) / 100:g}"]
    return (
        f"{model.name} does not fit: the smallest peak is {least.peak / GIB:.2f} GiB, {least.where()}; there "
        f"are {request.memory_bytes / GIB:g} GiB. What would do: " + ", or ".join(helps)
    )


def _remedies(model: Model, request: Request, space: Space) -> Iterator[str]:
    """What fits when it alone is changed, as options of the command line."""

    def fits(changed: Request, within: Space = space) -> bool:
        least = smallest(model, changed, within, changed.memory_bytes)
        return least is not None and least.peak <= changed.memory_bytes

    if space.microbatches is not None and fits(request, replace(space, microbatches=None)):
        yield "no --num-microbatches"
    for times in (2, 4, 8):
        more = replace(request, accelerators=request.accelerators * times)
        if fits(more):
            yield f"--accelerators {more.accelerators}"
            break
    if request.precision == "float32" and fits(replace(request, precision="bfloat16")):
        yield "--precision bfloat16"
    if request.optimizer != "sgd" and fits(replace(request, optimizer="sgd")):
        yield "--optimizer sgd"

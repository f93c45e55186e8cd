"""The smallest peak there is, where it is, and what would help where that is still too much.

For a model that does not fit, the message says by how much and what to change; `plan --bytes` needs the
same cut. So for each grid the search finds the cut whose fullest worker is smallest, at the smallest
micro-batches, and does the same for other requests. No layer has to be timed for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from gpipe_bench.pipeline.memory.peaks import StageMemory
from gpipe_bench.pipeline.plan.partition import Partition, leanest, partition, partition_by
from gpipe_bench.pipeline.plan.schedule import Remat, remat_of, to_text
from gpipe_bench.planner.candidate import Way
from gpipe_bench.planner.memory import Footprints, Room, Rows
from gpipe_bench.planner.model import Model
from gpipe_bench.planner.request import Request, Space, ways

GIB = 2**30
MOST_LAYERS = 256
"""Longest model whose cuts are searched by their peaks; longer ones are cut by what their layers hold."""
MOST_UNEQUAL = 64
"""Longest model whose cuts are searched where stages hold different numbers of micro-batches."""
LOOKED_AT = 6
"""Number of ways, those with the smallest peaks when cut evenly, whose cuts are searched further."""
MOST_CHOICES = 8
"""Most stages for which a message lists the recomputation of each."""


@dataclass(frozen=True)
class Smallest:
    """The way and cut with the smallest peak; `homes` has the stages of each worker, `choices` what each one
    recomputes.
    """

    way: Way
    remat: Remat
    choices: tuple[str, ...]
    homes: tuple[tuple[int, ...], ...]
    cut: Partition
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
        again = to_text(self.remat)
        again = {"always": "everything", "never": "nothing"}.get(again, again)
        if len(self.choices) > MOST_CHOICES and not isinstance(self.remat, str):
            again = "some"
        return (
            f"on {home} {worst} (layers {self.layers_of(worst)}) at {self.memory[worst].when}, with "
            f"{self.way.grid}, {self.way.schedule}, {self.way.num_microbatches} micro-batches and {again} "
            "recomputed"
        )


def on_engine(model: Model, request: Request, space: Space) -> Space:
    """Returns the space without what cannot be run: by this engine, if it is to run the plan, else by any.
    `ValueError` for tensor parallelism that the engine does not have.
    """
    if not _is_here(request):
        return replace(space, sharded_stages=space.sharded_stages and not model.ties)
    ranks = max(space.tp or (1,))
    if ranks > 1 and model.by_megatron:
        raise ValueError(
            f"--tp {ranks}: this engine divides no layer of {model.name}; leave --tp out, or name an "
            "accelerator with --device-type and give --format megatron"
        )
    return replace(space, sharded=space.sharded and not model.ties)


def _is_here(request: Request) -> bool:
    """Whether this engine is to run the plan: formats of other engines are for named accelerators."""
    return not request.accelerated or request.autocast


def smallest(
    model: Model, request: Request, space: Space, enough: int = 0, remat: Remat | None = None
) -> Smallest | None:
    """The smallest peak of all ways, each with its smallest micro-batches, or the first of at most `enough`
    bytes; None where there is no way.

    Bytes are those that `plan` counts. Each way is cut evenly, the LOOKED_AT with the smallest peaks then
    better. `remat` is what is recomputed; choices per stage go with a single schedule and grid. None is what
    needs least of what the space allows, worker by worker.
    """
    space = on_engine(model, request, space)

    @cache
    def footprints(size: int, split: bool, tp: int, sharded: bool) -> Footprints:
        return Footprints(
            lambda remat: model.profile_of(
                size, request.precision, split_backward=split, tp=tp, remat=remat, sharded=sharded
            )
        )

    def room_of(way: Way) -> Room:
        sharded = request.gathers_half(way.grid.fsdp)
        known, share = (
            footprints(way.microbatch_size, way.splits, way.grid.tp, sharded),
            request.gathered_share,
        )
        ties = model.ties_over(way.grid.tp)
        return Room(known, Rows(way.rows()), way.grid, request.optimizer, ties, gathered_share=share)

    last = {(w.grid, w.schedule, w.stages_per_worker): w for w in ways(request, space, len(model.layers))}
    least = {way.grid: room_of(way).least_bytes() for way in last.values()}
    evens: list[_Cuts] = []
    # What holds least between steps comes first, and of its schedules those that need few graphs.
    order = sorted(last.values(), key=lambda way: (least[way.grid], -way.grid.pp, way.schedule != "1f1b"))
    for way in order:
        if evens and least[way.grid] >= min(each.fullest for each in evens):
            continue
        evens.append(_Cuts(room_of(way), way, request, space, remat))
        if evens[-1].fullest <= enough and (found := evens[-1].found()).peak <= enough:
            return found
    looked_at = sorted(evens, key=lambda each: each.fullest)[:LOOKED_AT]
    for each in looked_at:
        each.improve()
    best: Smallest | None = None
    for each in sorted(looked_at, key=lambda each: each.fullest):
        if best is None or each.fullest < best.peak:
            best = min(filter(None, (best, each.found())), key=lambda found: found.peak)
    return best


class _Cuts:
    """The cuts of one way by their peaks: an even one, and better ones. Messages are counted of the last one
    alone, which takes longer than all the rest.
    """

    def __init__(self, room: Room, way: Way, request: Request, space: Space, remat: Remat | None) -> None:
        self.room, self.way, self.request, self.remats, self.remat = room, way, request, space.remats, remat
        self.homes = tuple(room.schedule.stages_of(worker) for worker in range(way.grid.pp))
        held = [
            4 * layer.parameter_bytes + layer.first.kept_inside + layer.outputs.num_bytes
            for layer in room.layers
        ]
        self.cut = partition(held, room.schedule.num_stages)

    def choices(self, worker: int, stages: tuple[range, ...]) -> tuple[str, ...]:
        """Returns the recomputation of each of a worker's stages: as requested, else with least memory."""
        if self.remat is not None:
            return tuple(remat_of(self.remat, stage) for stage in self.homes[worker])
        every = [(each,) * len(stages) for each in self.remats]
        return min(every, key=lambda each: self.room.memory(worker, stages, each).peak)

    def peak(self, worker: int, stages: tuple[range, ...]) -> int:
        return self.room.memory(worker, stages, self.choices(worker, stages)).peak

    def peaks(self, cut: Partition) -> list[int]:
        return [self.peak(worker, tuple(cut[s] for s in mine)) for worker, mine in enumerate(self.homes)]

    @property
    def fullest(self) -> int:
        return max(self.peaks(self.cut))

    def found(self) -> Smallest:
        """The cut, with its messages."""
        remat: list[str] = ["never"] * len(self.cut)
        for worker, mine in enumerate(self.homes):
            found = self.choices(worker, tuple(self.cut[stage] for stage in mine))
            for stage, choice in zip(mine, found, strict=True):
                remat[stage] = choice
        given: Remat = tuple(remat)
        if all(each == remat[0] for each in remat):
            given = remat[0]
        memory = self.room.counted(self.cut, remat, self.request.accelerated)
        return Smallest(self.way, self.remat or given, tuple(remat), self.homes, self.cut, memory)

    def improve(self) -> None:
        """The cut whose fullest worker is smallest; where a worker has several stages, layers are moved over
        one boundary at a time while the fullest worker gets less full.
        """
        layers, workers = len(self.room.layers), self.way.grid.pp
        if len(self.cut) == layers or layers > MOST_LAYERS:
            return
        if self.room.schedule.placement:
            while (moved := self._moved()) is not None:
                self.cut = moved
            return
        alike = self.way.schedule == "gpipe" and (self.remat is None or isinstance(self.remat, str))
        if not alike and layers <= MOST_UNEQUAL:
            cut = leanest(lambda stage, start, stop: self.peak(stage, (range(start, stop),)), layers, workers)
        else:
            ends = min(1, workers - 1)
            found = partition_by(
                lambda start, stop: self.peak(0 if start == 0 else ends, (range(start, stop),)),
                layers,
                workers,
                cap=2**62,
                floor=self.room.floor(),
            )
            cut = found or self.cut
        self.cut = min(self.cut, cut, key=lambda each: max(self.peaks(each)))

    def _moved(self) -> Partition | None:
        peaks = self.peaks(self.cut)
        worst, most = peaks.index(max(peaks)), max(peaks)
        others = []
        for boundary, by in [move for stage in self.homes[worst] for move in ((stage, 1), (stage + 1, -1))]:
            ends = [stage.start for stage in self.cut] + [len(self.room.layers)]
            if 0 < boundary < len(self.cut) and ends[boundary - 1] < ends[boundary] + by < ends[boundary + 1]:
                ends[boundary] += by
                others.append(tuple(range(a, b) for a, b in pairwise(ends)))
        best = min(others, key=lambda each: max(self.peaks(each)), default=self.cut)
        return best if max(self.peaks(best)) < most else None


def nothing_fits(
    model: Model, request: Request, space: Space, least: Smallest, remat: Remat | None = None
) -> str:
    """One line: the smallest peak, where it is, and what would do. With `remat` all accelerators are one
    pipeline, and stay one where there are more of them.
    """
    needed = least.peak + request.held_back_bytes
    helps = [
        *_remedies(model, request, space, remat),
        f"--memory-gib {math.ceil(needed / GIB * 100) / 100:g}",
    ]
    there = f"{request.memory_bytes / GIB:g} GiB"
    if request.held_back_bytes:
        there += f", {request.held_back_bytes / GIB:g} of them held back (--reserve-gib)"
    return (
        f"{model.name} does not fit: the smallest peak is {least.peak / GIB:.2f} GiB, {least.where()}; there "
        f"are {there}. What would do: " + ", or ".join(helps)
    )


def _remedies(model: Model, request: Request, space: Space, remat: Remat | None) -> Iterator[str]:
    """Yields single changes that make the model fit, as command-line options; given options come first."""

    def fits(remat: Remat | None = remat, within: Space = space, **changes: Any) -> bool:
        changed = replace(request, **changes)
        least = smallest(model, changed, within, changed.usable_bytes, remat)
        return least is not None and least.peak <= changed.usable_bytes

    every, one = Space(), remat is not None
    given: dict[str, dict[str, Any]] = {"--num-microbatches": {"microbatches": None}}
    if not one:
        given |= {
            "--no-fsdp": {"sharded": True},
            "--pp": {"pp": None},
            "--schedule": {"schedules": every.schedules},
            "--tp": {"tp": every.tp},
        }
    for option, change in given.items():
        within = replace(space, **change)
        if within != space and fits(within=within):
            yield f"no {option}"
    divides = not (_is_here(request) and model.by_megatron)
    for ranks in (2, 4, 8) if space.tp == every.tp and divides and not one else ():
        if model.is_divisible(ranks) and fits(within=replace(space, tp=(ranks,))):
            yield f"--tp {ranks}"
            break
    if remat not in (None, "always") and fits("always"):
        yield "--remat always"
    for times in (2, 4, 8) if not isinstance(remat, tuple) else ():
        more = request.accelerators * times
        if fits(within=replace(space, pp=(more,)) if one else space, accelerators=more):
            yield f"--accelerators {more}"
            break
    if request.precision == "float32" and fits(precision="bfloat16"):
        yield "--precision bfloat16"
    if request.optimizer != "sgd" and fits(optimizer="sgd"):
        yield "--optimizer sgd"

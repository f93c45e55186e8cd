"""The smallest peak there is, where it is, and what would help where that is still too much.

For a model that does not fit, the message says by how much and what to change; `plan --bytes` needs the
same cut. So for each grid the search finds the cut whose fullest worker is smallest, at the smallest
micro-batches, and does the same for other requests. No layer has to be timed for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.planner.candidate import Way
from gpipe_bench.planner.memory import Room, Rooms
from gpipe_bench.planner.model import Model
from gpipe_bench.planner.request import Request, Space, splits_some, ways
from gpipe_bench.planner.search import Found, filled

GIB = 2**30
MOST_LAYERS = 256
"""Longest model whose cuts are searched by their peaks; longer ones are cut by what their layers hold."""
LOOKED_AT = 6
"""Number of ways, those with the smallest peaks when cut evenly, whose cuts are searched further."""


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


def smallest(model: Model, request: Request, space: Space, enough: int = 0) -> Found | None:
    """The smallest peak of all ways, each with its smallest micro-batches, or the first of at most `enough`
    bytes; None where there is no way.

    Bytes are those that `plan` counts. Each way is cut evenly, the LOOKED_AT with the smallest peaks then
    better. Each worker recomputes what needs least of what the space allows.
    """
    space = on_engine(model, request, space)
    profiles = partial(model.profile_of, precision=request.precision)
    room = Rooms(profiles, request, model.ties_over, split=splits_some(request, space))
    last = {(w.grid, w.schedule, w.stages_per_worker): w for w in ways(request, space, len(model.layers))}
    least = {way.grid: room(way).least_bytes() for way in last.values()}
    evens: list[_Cuts] = []
    # What holds least between steps comes first, and of its schedules those that need few graphs.
    order = sorted(last.values(), key=lambda way: (least[way.grid], -way.grid.pp, way.schedule != "1f1b"))
    for way in order:
        if evens and least[way.grid] >= min(each.fullest for each in evens):
            continue
        evens.append(_Cuts(room(way), way, space.remats))
        if evens[-1].fullest <= enough and (found := evens[-1].found()).peak <= enough:
            return found
    looked_at = sorted(evens, key=lambda each: each.fullest)[:LOOKED_AT]
    for each in looked_at:
        each.improve()
    best: Found | None = None
    for each in sorted(looked_at, key=lambda each: each.fullest):
        if best is None or each.fullest < best.peak:
            best = min(filter(None, (best, each.found())), key=lambda found: found.peak)
    return best


class _Cuts:
    """The cuts of one way by their peaks: an even one, and better ones. Messages are counted of the last one
    alone, which takes longer than all the rest.
    """

    def __init__(self, room: Room, way: Way, remats: tuple[str, ...]) -> None:
        self.room, self.way, self.remats = room, way, remats
        self.homes = tuple(room.schedule.stages_of(worker) for worker in range(way.grid.pp))
        held = [
            4 * layer.parameter_bytes + layer.first.kept_inside + layer.outputs.num_bytes
            for layer in room.layers
        ]
        self.cut = partition(held, room.schedule.num_stages)

    def remat(self, worker: int, stages: tuple[range, ...]) -> str:
        """Returns the recomputation with which a worker with these stages holds least."""
        every = ((each, self.room.memory(worker, stages, (each,) * len(stages)).peak) for each in self.remats)
        return min(every, key=lambda each: each[1])[0]

    def peak(self, worker: int, stages: tuple[range, ...]) -> int:
        remat = self.remat(worker, stages)
        return self.room.memory(worker, stages, (remat,) * len(stages)).peak

    def peaks(self, cut: Partition) -> list[int]:
        return [self.peak(worker, tuple(cut[s] for s in mine)) for worker, mine in enumerate(self.homes)]

    @property
    def fullest(self) -> int:
        return max(self.peaks(self.cut))

    def found(self) -> Found:
        """The cut, with its messages."""
        remat = ["never"] * len(self.cut)
        for worker, mine in enumerate(self.homes):
            again = self.remat(worker, tuple(self.cut[stage] for stage in mine))
            for stage in mine:
                remat[stage] = again
        memory = self.room.counted(self.cut, remat)
        return Found(self.way, self.way.candidate(self.cut, tuple(remat)), memory)

    def improve(self) -> None:
        """The cut whose fullest worker is smallest; where a worker has several stages, layers are moved over
        one boundary at a time while the fullest worker gets less full.
        """
        layers = len(self.room.layers)
        if len(self.cut) == layers or layers > MOST_LAYERS:
            return
        if self.room.schedule.placement:
            while (moved := self._moved()) is not None:
                self.cut = moved
            return
        cut = filled(
            lambda stage, start, stop: self.peak(stage, (range(start, stop),)), layers, len(self.cut), 1e-9
        )
        self.cut = min(self.cut, cut or self.cut, key=lambda each: max(self.peaks(each)))

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


def nothing_fits(model: Model, request: Request, space: Space, least: Found, *, as_one: bool = False) -> str:
    """One line: the smallest peak, where it is, and what would do. With `as_one` all accelerators are one
    pipeline, and stay one where there are more of them.
    """
    needed = least.peak + request.held_back_bytes
    helps = [
        *_remedies(model, request, space, as_one),
        f"--memory-gib {math.ceil(needed / GIB * 100) / 100:g}",
    ]
    there = f"{request.memory_bytes / GIB:g} GiB"
    if request.held_back_bytes:
        there += f", {request.held_back_bytes / GIB:g} of them held back (--reserve-gib)"
    return (
        f"{model.name} does not fit: the smallest peak is {least.peak / GIB:.2f} GiB, {least.where()}; there "
        f"are {there}. What would do: " + ", or ".join(helps)
    )


def _remedies(model: Model, request: Request, space: Space, as_one: bool) -> Iterator[str]:
    """Yields single changes that make the model fit, as command-line options; given options come first."""

    def fits(within: Space = space, **changes: Any) -> bool:
        changed = replace(request, **changes)
        least = smallest(model, changed, within, changed.usable_bytes)
        return least is not None and least.peak <= changed.usable_bytes

    every = Space()
    given: dict[str, dict[str, Any]] = {"--num-microbatches": {"microbatches": None}}
    if not as_one:
        given |= {
            "--no-fsdp": {"sharded": True},
            "--pp": {"pp": None},
            "--schedule": {"schedules": every.schedules},
            "--tp": {"tp": every.tp},
        }
    for option, change in given.items():
        within = replace(space, **change)
        if within != space and fits(within):
            yield f"no {option}"
    divides = not (_is_here(request) and model.by_megatron)
    for ranks in (2, 4, 8) if space.tp == every.tp and divides and not as_one else ():
        if model.is_divisible(ranks) and fits(replace(space, tp=(ranks,))):
            yield f"--tp {ranks}"
            break
    if as_one and "always" not in space.remats and fits(replace(space, remats=("always",))):
        yield "--remat always"
    for more in (2 * request.accelerators, 4 * request.accelerators, 8 * request.accelerators):
        if fits(replace(space, pp=(more,)) if as_one else space, accelerators=more):
            yield f"--accelerators {more}"
            break
    if request.precision == "float32" and fits(precision="bfloat16"):
        yield "--precision bfloat16"
    if request.optimizer != "sgd" and fits(optimizer="sgd"):
        yield "--optimizer sgd"

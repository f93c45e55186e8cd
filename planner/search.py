"""The best ways to train: every grid, schedule and number of micro-batches, each with a good cut for it.

Of each group of ways, such as those of one grid and schedule, the best is kept, and its cut improved at the
end. Most ways are never cut, because a bound says that no cut of theirs takes less than the steps that are
kept: the work divided evenly and what stands around it (`about_s`), and how many of the model's blocks each
worker has room and time for (`may_beat`). Ways that promise most are taken first. Step times are those of
`steps`; `predict` gives ranges, parts and jitter for the few ways that are found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import inf
from operator import itemgetter
from typing import NamedTuple

from gpipe_bench.pipeline.memory.peaks import StageMemory
from gpipe_bench.pipeline.memory.workers import SharedWeight
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.simulate import no_collections

from .candidate import REMATS, Candidate, Grid, Way
from .costs import Costs
from .memory import LATELY, Room, Rooms
from .request import Request, Space, Topology, splits_some, ways
from .steps import Cut, LayerTimes, LongSteps, best_cut, recomputed, times_on

KEPT = 8
"""Number of ways that are kept; fewer are printed."""
ABOUT = 0.97
"""Share of a way's estimated step time that bounds the step times of all its cuts from below."""
ROOMY = 1.05
"""What a block's bytes are taken to be less than, since those of many follow from those of three."""
LOOKS = 60
"""Cuts that are tried for each kept way, beyond the first."""
CUTS_ANEW = 4
"""Most cuts of a way until its messages fit, too; each cut leaves room for the messages of the last one."""


@dataclass(frozen=True)
class Found:
    """A candidate, the bytes of each worker, and the seconds of a step where they are known."""

    candidate: Candidate
    memory: tuple[StageMemory, ...]
    step_s: float = inf

    @property
    def peak(self) -> int:
        return max(each.peak for each in self.memory)

    @property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each worker."""
        rows = self.candidate.rows(1, recomputes=False)
        return tuple(tuple(rows.stages_of(worker)) for worker in range(len(self.memory)))

    def layers_of(self, worker: int) -> str:
        """`0-3`, or `0-3 8-11` where the worker has two stages."""
        spans = [self.candidate.cut[stage] for stage in self.homes[worker]]
        return " ".join(f"{span.start}-{span.stop - 1}" for span in spans)

    def where(self) -> str:
        """The fullest worker, its layers, and the action at its peak."""
        way, worst = self.candidate, max(range(len(self.memory)), key=lambda worker: self.memory[worker].peak)
        home = "stage" if len(self.homes[worst]) == 1 else "worker"
        kinds = {*way.remat}
        again = kinds.pop() if len(kinds) == 1 else "some"
        again = {"always": "everything", "never": "nothing"}.get(again, again)
        count = f"{way.num_microbatches} micro-batch{'es' * (way.num_microbatches > 1)}"
        return (
            f"on {home} {worst} (layers {self.layers_of(worst)}) at {self.memory[worst].when}, with "
            f"{way.grid}, {way.schedule}, {count} and {again} recomputed"
        )


class BlockKind(NamedTuple):
    """A block with one recomputation: bytes of a worker beside all blocks, of each, of each per micro-batch
    under way; the seconds of a micro-batch.
    """

    base_bytes: float
    held_bytes: float
    kept_bytes: float
    takes_s: float

    def most(self, cap: int, live: int) -> float:
        """Most blocks for which a worker has room with so many micro-batches under way."""
        return (ROOMY * cap - self.base_bytes) / max(1.0, self.held_bytes + live * self.kept_bytes)


class Block(NamedTuple):
    """The layers that most of a model are: their number, each one's kinds, the least seconds to pass one."""

    number: int
    kinds: tuple[BlockKind, ...]
    passed_s: float


def grid_and_schedule(way: Way) -> Hashable:
    """Ways that differ in micro-batches alone are one group, or the answer would be one way with many."""
    return way.grid, way.schedule, way.stages_per_worker


@dataclass
class Search:
    """One search, and what it knows of single ways.

    Args:
        costs: of the layers, at every size that a way has
        request, space: what is given, what may be chosen
        ties_over: the model's, of one of so many ranks that compute a layer together
        progress: told how many ways are done, of how many
        tried, skipped: ways that were cut, and those that take about as long as none that is kept
    """

    costs: Costs
    request: Request
    space: Space
    ties_over: Callable[[int], tuple[SharedWeight, ...]] = lambda tp: ()
    progress: Callable[[int, int], None] = lambda done, total: None
    tried: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        self.cap, split = self.request.usable_bytes, splits_some(self.request, self.space)
        self.room = Rooms(self.costs.profiles, self.request, self.ties_over, split=split)
        self._steps, self._times = lru_cache(LATELY)(self._steps_of), cache(self._times_of)
        self._boundaries, self._live = cache(self._links_of), cache(self._live_of)
        self._blocks, self._block_bytes = cache(self._block_of), cache(self._block_bytes_of)

    @no_collections()  # of what a search makes only few things are in cycles
    def run(
        self, kept: int | None = KEPT, of_each: Callable[[Way], Hashable] = grid_and_schedule
    ) -> tuple[Found, ...]:
        """The best of each group of ways, the fastest first, so many of them; none where nothing fits.

        Args:
            kept: groups of which the best is wanted; None for every group that has a way that fits
            of_each: the group of a way
        """
        possible = ways(self.request, self.space, self.costs.num_layers)
        every = [(*self._promised_s(w), w) for w in possible if w.microbatch_size in self.costs.sizes]
        best: dict[Hashable, Found] = {}
        limit_s = inf
        for number, (_, about_s, way) in enumerate(sorted(every, key=itemgetter(0, 1))):
            self.progress(number, len(every))
            group = of_each(way)
            below_s = min(limit_s, best[group].step_s if group in best else inf)
            if about_s >= below_s or not self.may_beat(way, below_s):
                continue
            found = self.best_of(way, below_s=below_s)
            self.tried += 1
            if found is not None and found.step_s < below_s:
                best[group] = found
                if kept is not None and len(best) >= kept:
                    limit_s = sorted(each.step_s for each in best.values())[kept - 1]
        self.skipped = len(every) - self.tried
        leading = sorted(best.values(), key=lambda each: each.step_s)[:kept]
        again = [self.best_of(each.candidate, LOOKS) or each for each in leading]
        return tuple(sorted(again, key=lambda found: found.step_s))

    def about_s(self, way: Way) -> float:
        """Seconds of a step about, whatever the memory, and rather less.

        A micro-batch goes through all stages and back. All work is done by the workers, the sums of gradients
        begin with a last backward, and the optimizer follows. A stage begins when a micro-batch has been
        through all before it, and ends as long before the end: with one stage per worker and whole backwards
        the k-th may take (1 - 1/M)^k of what the first may, and a step takes all the work of one micro-batch
        / (1 - (1 - 1/M)^K).
        """
        times, count, workers = self.times(way), way.num_microbatches, way.grid.pp
        whole = times.stage(0, times.num_layers)
        once_s = whole.microbatch_s("never")
        sums_s = sum(bucket.takes_s for bucket in whole.buckets)
        ends_s = max(0.0, sums_s - max(whole.backward_s, whole.weights_s)) + whole.after_s
        back_s = min(whole.backward_s, whole.inputs_s)
        found_s = max((once_s * count + ends_s) / workers, whole.forward_s + back_s)
        if way.stages_per_worker == 1 and not way.splits and count > 1:
            found_s = max(found_s, once_s / (1 - (1 - 1 / count) ** workers))
        return ABOUT * found_s

    def _promised_s(self, way: Way) -> tuple[float, float]:
        """What a way is taken by: its step with what its blocks have to recompute about."""
        about_s, block, workers, count = self.about_s(way), self.block(way), way.grid.pp, way.num_microbatches
        if block is None:
            return about_s, about_s
        live = count if way.schedule in ("gpipe", "breadth-first") else min(count, workers)
        share = block.number / workers
        takes_s = [each.takes_s for each in block.kinds if each.most(self.cap, live) >= share]
        filled_s = 1 + (workers - 1) / count
        return min((share * count * each * filled_s for each in takes_s), default=inf), about_s

    def may_beat(self, way: Way, below_s: float) -> bool:
        """Whether workers, which begin when a micro-batch has passed earlier ones, can hold all blocks."""
        block = self.block(way)
        if block is None:
            return True
        waits = way.stages_per_worker == 1
        done = 0
        few = min(way.num_microbatches, 4 * way.grid.pp)
        for under_way in self._live(way.schedule, way.grid.pp, way.stages_per_worker, few):
            live = way.num_microbatches if under_way == few else under_way
            left_s = (below_s / ABOUT - waits * done * block.passed_s) / way.num_microbatches
            most = (min(each.most(self.cap, live), left_s / each.takes_s) for each in block.kinds)
            done += max(0, int(max(most, default=0.0)))
        return done >= block.number

    def block(self, way: Way) -> Block | None:
        """One of the layers that most of the model's are; None where no four in a row are alike."""
        return self._blocks(way.grid, way.microbatch_size, way.num_microbatches, way.splits)

    def _block_of(self, grid: Grid, size: int, count: int, split: bool) -> Block | None:
        way, times = Way(grid, "1f1b", 1, count, size), self._times(grid, size, split)
        bytes_of = self._block_bytes(grid.fsdp, min(grid.dp, 2), grid.fsdp_level, grid.tp)
        if bytes_of is None:
            return None
        first, number, by_remat = bytes_of

        def takes_s(remat: str, blocks: int) -> tuple[float, float]:
            """Seconds of a micro-batch on so many blocks, and until it has passed them."""
            takes = times.stage(first, first + blocks, remat)
            again_s = takes.again_s * recomputed(remat, count) / count
            passed_s = takes.forward_s + takes.backward_s * (not split)
            return takes.microbatch_s("never") + again_s, passed_s

        kinds = []
        for remat in self.remats(way):
            base, held, kept = by_remat[remat]
            one_s = takes_s(remat, 3)[0] - takes_s(remat, 2)[0]
            kinds.append(BlockKind(base, held, size * kept, max(one_s, 1e-12)))
        passed_s = takes_s("never", 3)[1] - takes_s("never", 2)[1]
        return Block(number, tuple(kinds), ABOUT * passed_s)

    def _block_bytes_of(
        self, fsdp: int, dp: int, level: int, tp: int
    ) -> tuple[int, int, dict[str, tuple[float, float, float]]] | None:
        """Where blocks begin, their number, and bytes by recomputation as in `BlockKind`, per example."""
        grid, size = Grid(1, dp, fsdp, level, tp), min(self.costs.sizes)
        room = self.room(Way(grid, "gpipe", 1, 1, size))
        alike = [id(layer) for layer in room.layers]
        start = next((i for i in range(len(alike) - 3) if len({*alike[i : i + 4]}) == 1), None)
        if start is None:
            return None
        found, rooms = {}, [room, self.room(Way(grid, "gpipe", 1, 2, size))]
        for remat in REMATS:
            (few, more), (twice_few, twice) = (
                [room.memory(0, (range(start, start + number),), (remat,)).peak for number in (2, 3)]
                for room in rooms
            )
            kept = max(0, (twice - twice_few) - (more - few))
            found[remat] = float(more - 3 * (more - few)), float(more - few - kept), kept / size
        return start, alike.count(alike[start]), found

    def _live_of(self, name: str, workers: int, per_worker: int, count: int) -> tuple[int, ...]:
        """Micro-batches of which each worker has all blocks under way at once; as many in a longer schedule,
        but for all of them.
        """
        found = []
        for row in named(name, workers, count, stages_per_worker=per_worker).actions:
            under_way, most = dict.fromkeys((action.stage for action in row), 0), 0
            for action in (action for action in row if action.kind is not Kind.W):
                under_way[action.stage] += 1 if action.kind is Kind.F else -1
                most = max(most, min(under_way.values()))
            found.append(most)
        return tuple(found)

    def best_of(self, way: Way, looks: int = 0, below_s: float = inf) -> Found | None:
        """A good cut of a way that fits, whose step takes less than `below_s`; None where none was found.

        What the transport holds beyond one receive ahead is known of a whole cut only: where it is too much,
        the way is cut anew, and every worker has as much less room as the last cut's messages take.
        """
        room = self.room(way)
        if room.least_bytes() > self.cap:
            return None
        caps = [self.cap] * way.grid.pp
        for _ in range(CUTS_ANEW):
            cut = best_cut(
                room.schedule, self.times(way), self._steps(way).makespan_s,
                fits=partial(room.fits, caps), remats=self.remats(way), looks=looks, below_s=below_s,
            )  # fmt: skip
            if cut is None or cut.step_s >= below_s:
                break
            found = self.found(way, cut, room)
            if found.peak <= self.cap:
                return found
            alone = room.alone(cut.stages, cut.remat)
            more = [each.peak - less.peak for each, less in zip(found.memory, alone, strict=True)]
            caps = [min(before, self.cap - each) for before, each in zip(caps, more, strict=True)]
        return None

    def remats(self, way: Way) -> tuple[str, ...]:
        """The recomputations of the way's stages, the fastest first; with one worker none of whole stages."""
        known = [each for each in self.space.remats if each in self.costs.at(way.microbatch_size).remats]
        if way.grid.pp == 1 and "blocks" in known:
            return tuple(each for each in known if each not in ("except_last", "always"))
        if way.grid.fsdp_level == 3:  # where every pass gathers, R gathers once more
            return tuple(sorted(known, key=("never", "selective", "blocks").__contains__, reverse=True))
        return tuple(known)

    def found(self, way: Way, cut: Cut, room: Room | None = None) -> Found:
        """The candidate of a way with this cut, and its bytes."""
        memory = (room or self.room(way)).counted(cut.stages, cut.remat)
        return Found(way.candidate(cut.stages, cut.remat), memory, cut.step_s)

    def step_s(self, candidate: Candidate) -> float:
        """Seconds of a step."""
        times, cut, remat = self.times(candidate), candidate.cut, candidate.remat
        takes = [times.stage(span.start, span.stop, each) for span, each in zip(cut, remat, strict=True)]
        messages = [times.message(span.start) for span in cut[1:]]
        return self._steps(candidate).makespan_s(takes, remat, messages)

    def times(self, way: Way) -> LayerTimes:
        """Returns the times of the layers in this way."""
        return self._times(way.grid, way.microbatch_size, way.splits)

    def _steps_of(self, way: Way) -> LongSteps:
        links = self._boundaries(way.grid, way.schedule, way.stages_per_worker)
        return LongSteps(lambda count: self.room.rows(way, count).schedule, way.num_microbatches, links)

    def _links_of(self, grid: Grid, name: str, per_worker: int) -> tuple[Link, ...]:
        small = named(name, grid.pp, 1, stages_per_worker=per_worker)
        return Topology(self.request, grid).boundaries([small.worker(k) for k in range(small.num_stages)])

    def _times_of(self, grid: Grid, size: int, split: bool) -> LayerTimes:
        return times_on(grid, self.costs, size, self.request, split=split)

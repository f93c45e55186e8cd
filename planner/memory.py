"""Whether stages fit: the bytes of every worker, for the thousands of cuts that a search looks at.

The model is `pipeline.memory`: a worker's row walked with what its stages hold, and what a grid adds to it or
shares out. Here each stage's footprint, each row and each answer is made once, whichever cut asks. A tied
weight has one state where one worker has all its layers; until a step ends a gradient of each of its uses is
counted, which is more than there is, and where others have some, for a moment their gradient, too.

A cut is looked for with one receive ahead (`alone`), and what a grid adds to the first forward or the last
backward counted at every moment of a step. What messages take is only known of all stages together: then the
whole cut is `counted`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate

from gpipe_bench.pipeline.memory.grids import HeldStage, Sharing, grid_peak_bytes, shared_stage
from gpipe_bench.pipeline.memory.peaks import (
    NOWHERE,
    Moment,
    Optimizer,
    Place,
    Placed,
    StageMemory,
    Worker,
    row_moments,
    steps,
)
from gpipe_bench.pipeline.memory.profile import ModelProfile
from gpipe_bench.pipeline.memory.stage_bytes import StageBytes, stage_bytes
from gpipe_bench.pipeline.memory.workers import SharedWeight, Transport, places, summing, without
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, recomputes

from .candidate import WRAPPED, Grid, Way, by_schedule
from .request import Request

Stages = tuple[range, ...]
Ties = tuple[SharedWeight, ...]
LATELY = 64
"""Number of long schedules whose rows are cached; many ways use them in turn, and all are too many."""


class Footprints:
    """Memory of the stages of one model at one micro-batch size; those of the same layers with the same
    recomputation inside, by which `profile_of` gives profiles, share a number.
    """

    def __init__(self, profile_of: Callable[[str], ModelProfile]) -> None:
        self._profile_of = cache(profile_of)
        self.profile = self._profile_of("never")
        self._stages: list[tuple[range, ModelProfile]] = []  # the first of each number
        self._numbers: dict[tuple[object, ...], int] = {}
        self.number, self.between_steps = cache(self._number), cache(self._between_steps)
        self._whole = cache(self._whole_of)
        self.held = cache(lambda number, sharing: shared_stage(self._whole(number), sharing))

    def _number(self, stage: range, remat: str) -> int:
        profile = self._profile_of(remat if remat in WRAPPED else "never")
        content = (*map(id, profile.layers[stage.start : stage.stop]), stage.stop == len(profile.layers))
        number = self._numbers.setdefault(content, len(self._stages))
        if number == len(self._stages):
            self._stages.append((stage, profile))
        return number

    def _whole_of(self, number: int) -> StageBytes:
        stage, (layers, loss) = self._stages[number]
        return stage_bytes(layers[stage.start : stage.stop], loss if stage.stop == len(layers) else None)

    def _between_steps(self, sharing: Sharing, optimizer: str) -> list[int]:
        """Bytes of weights, gradients and the optimizer's state of all layers before each, and of all."""
        rule, held = Optimizer.named(optimizer), list[int]()
        for layer in self.profile.layers:
            trained = sum(map(sharing.part, layer.trained_sizes))
            counts = 4 * len(layer.trained_sizes) * rule.counts_steps
            held.append(sum(map(sharing.part, layer.parameter_sizes)) + (1 + rule.state) * trained + counts)
        return list(accumulate(held, initial=0))


class Room:
    """Bytes of the workers of one schedule, without recomputation, on one grid."""

    def __init__(self, footprints: Footprints, rows: Rows, grid: Grid, request: Request, ties: Ties) -> None:
        self._footprints, self._rows = footprints, rows
        self._optimizer, self._rule = request.optimizer, Optimizer.named(request.optimizer)
        self._transport = Transport(request.accelerated)
        self._every_tie = ties
        self.layers, self.schedule = footprints.profile.layers, rows.schedule
        dp, level = min(grid.dp, 2), grid.fsdp_level or 2  # how many replicas there are does not matter
        self._sharing = Sharing(dp, grid.fsdp, level, gathered_share=request.gathered_share)
        self._between_steps = footprints.between_steps(self._sharing, request.optimizer)
        self._all_ties = sum(map(self._beside, ties))
        # Peaks by worker, recomputation, the numbers of its stages and its ties.
        self._known: dict[tuple[object, ...], StageMemory] = {}

    def memory(self, worker: int, stages: Stages, remat: Sequence[str]) -> StageMemory:
        """Returns the peak of a worker with stages of these layers."""
        ties = self._ties(stages)
        numbers = tuple(map(self._footprints.number, stages, remat))
        key = (worker, tuple(remat), numbers, ties)
        if key not in self._known:
            held = self._once(stages, remat, ties)
            found = self._fullest(worker, held, tuple(remat))
            if received := self._received_bytes(stages):
                found = max(found, self._summing(worker, held, received), key=lambda each: each.peak)
            self._known[key] = found
        return self._known[key]

    def counted(self, stages: Sequence[range], remat: Sequence[str]) -> tuple[StageMemory, ...]:
        """Returns each worker's peak by the model's own walk over the whole schedule, with its messages."""
        held: dict[int, HeldStage] = {}
        for mine in self._rows.homes:
            spans = tuple(stages[stage] for stage in mine)
            own = self._once(spans, [remat[stage] for stage in mine], self._ties(spans))
            held |= zip(mine, own, strict=True)
        every, whole = [held[stage] for stage in range(len(stages))], self._rows.recomputed(remat)
        peaks = grid_peak_bytes(every, whole, self._optimizer, receive_ahead=self._transport)
        where = places([each.rest for each in every], whole, self._transport)
        found = []
        for worker, (alone, peak) in enumerate(zip(self.alone(stages, remat), peaks, strict=True)):
            mine = self._rows.homes[worker]
            if received := self._received_bytes(tuple(stages[stage] for stage in mine)):
                resting = [every[stage] for stage in mine]
                sums = self._summing(worker, resting, received, [where[stage] for stage in mine])
                peak = max(peak, sums.peak)
            more = peak - alone.peak  # messages, less what a grid adds to other moments
            part = "boundary" if more >= 0 else "transients"
            found.append(replace(alone, **{part: getattr(alone, part) + more}))
        return tuple(found)

    def alone(self, stages: Sequence[range], remat: Sequence[str]) -> list[StageMemory]:
        """Returns each worker's peak with one receive ahead."""
        own = ((tuple(stages[s] for s in mine), tuple(remat[s] for s in mine)) for mine in self._rows.homes)
        return [self.memory(worker, *each) for worker, each in enumerate(own)]

    def fits(self, caps: Sequence[int], worker: int, stages: Stages, remat: Sequence[str]) -> bool:
        """Whether a worker, whose bytes are in `caps`, has room for stages that recompute so much."""
        held = self._between_steps
        least = sum(held[stage.stop] - held[stage.start] for stage in stages) - self._all_ties
        return least <= caps[worker] and self.memory(worker, stages, remat).peak <= caps[worker]

    def least_bytes(self) -> int:
        """Lower bound of the fullest worker's bytes between steps, for any cut: an equal share."""
        return (self._between_steps[-1] - self._all_ties) // self.schedule.num_workers

    def _fullest(self, worker: int, held: Sequence[HeldStage], remat: tuple[str, ...]) -> StageMemory:
        moments = self._rows.moments(worker, tuple(["never" if each in WRAPPED else each for each in remat]))
        again = {moment.step.action.stage for moment in moments if moment.step.recomputed}
        more = max(max((*each.first, *each.last)) for each in held)
        mine = [*zip(self._rows.homes[worker], held, strict=True)]
        placed = Worker(
            {stage: self._placed(stage, each.step, stage in again) for stage, each in mine},
            {stage: self._placed(stage, each.rest, stage in again) for stage, each in mine},
        )
        if len(held) == 1:
            return placed.fullest(moments, more)
        found = placed.fullest(moments)
        return replace(found, transients=found.transients + more)

    def _placed(
        self, stage: int, held: StageBytes, recomputes: bool = False, place: Place = NOWHERE
    ) -> Placed:
        return Placed(
            held, self._rule, self.schedule.num_microbatches, is_first=stage == 0, recomputes=recomputes,
            stays=self._rows.ahead > 0, place=place,
        )  # fmt: skip

    def _summing(
        self, worker: int, held: Sequence[HeldStage], received: int, where: Sequence[Place] | None = None
    ) -> StageMemory:
        """A worker that has the gradients of all its uses of tied weights, and one from another owner."""
        mine = zip(self._rows.homes[worker], held, where or [NOWHERE] * len(held), strict=True)
        placed = {stage: self._placed(stage, each.rest, place=place) for stage, each, place in mine}
        summed = sum(each.rest.summed_gradient_bytes for each in held)
        return summing(Worker(placed), summed, self._sharing.part(received))

    def _received_bytes(self, stages: Stages) -> int:
        """The largest gradient that a worker with these stages is sent of a weight that others have, too."""
        found = [0]
        for tie in self._every_tie:
            mine = [any(layer in stage for stage in stages) for layer in tie.layers]
            found += [tie.num_bytes] * (tie.trained and any(mine) and not all(mine))
        return max(found)

    def _beside(self, tie: SharedWeight) -> int:
        """Bytes saved between steps where one worker has all layers of a tied weight: all copies but one."""
        size, rule = self._sharing.part(tie.num_bytes), self._rule
        copies = size + tie.trained * ((1 + rule.state) * size + 4 * rule.counts_steps)
        return copies * (len(tie.layers) - 1)

    def _ties(self, stages: Stages) -> Ties:
        """Returns the ties that include a layer of the worker, reduced to the worker's layers."""
        return tuple(
            replace(tie, layers=mine)
            for tie in self._every_tie
            if (mine := tuple(layer for layer in tie.layers if any(layer in stage for stage in stages)))
        )

    def _once(self, stages: Stages, remat: Sequence[str], ties: Ties) -> list[HeldStage]:
        """The stages without the weights and states that the worker has already with an earlier layer."""
        numbers = map(self._footprints.number, stages, remat)
        found = [self._footprints.held(number, self._sharing) for number in numbers]
        for tie in ties:
            for layer in tie.layers[1:]:
                stage = next(index for index, each in enumerate(stages) if layer in each)
                size, held = self._sharing.part(tie.num_bytes), found[stage]
                both = (held.step, held.rest)  # unless a weight is trained nobody has its gradient
                step, rest = (without(each, size, size in each.trained_sizes) for each in both)
                found[stage] = replace(held, step=step, rest=rest)
        return found


class Rooms:
    """The rooms of a request's ways: `rooms(way)`. Profiles and rows are made once.

    Args:
        profiles: of the layers, as `Model.profile_of` gives them for a micro-batch size
        request: what is asked
        ties_over: the model's, of one of so many ranks that compute a layer together
        split: whether some way has I and W, which then all profiles know of
    """

    def __init__(
        self,
        profiles: Callable[..., ModelProfile],
        request: Request,
        ties_over: Callable[[int], Ties],
        *,
        split: bool,
    ) -> None:
        self._profiles, self._request, self._ties_over, self._split = profiles, request, ties_over, split
        self._footprints, self._rows = cache(self._footprints_of), lru_cache(LATELY)(self._rows_of)

    def __call__(self, way: Way) -> Room:
        sharded, tp = self._request.gathers_half(way.grid.fsdp), way.grid.tp
        footprints = self._footprints(way.microbatch_size, tp, sharded)
        return Room(footprints, self.rows(way), way.grid, self._request, self._ties_over(tp))

    def rows(self, way: Way, num_microbatches: int | None = None) -> Rows:
        """The rows of the way's schedule, also for another number of micro-batches."""
        count = num_microbatches or way.num_microbatches
        return self._rows(way.schedule, way.grid.pp, way.stages_per_worker, count)

    def _rows_of(self, name: str, workers: int, per_worker: int, count: int) -> Rows:
        return Rows(named(name, workers, count, stages_per_worker=per_worker))

    def _footprints_of(self, size: int, tp: int, sharded: bool) -> Footprints:
        return Footprints(
            lambda remat: self._profiles(
                size, split_backward=self._split, tp=tp, remat=remat, sharded=sharded
            )
        )


class Rows:
    """The rows of one schedule without recomputation, walked once; receives are posted one ahead."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ahead = 1 if schedule.num_workers > 1 else 0
        self.homes = [schedule.stages_of(worker) for worker in range(schedule.num_workers)]
        self._moments: dict[tuple[int, tuple[str, ...]], tuple[Moment, ...]] = {}

    def recomputed(self, remat: Sequence[str]) -> Schedule:
        """The whole schedule with R before each backward of what its stages recompute."""
        rows = [self._row(worker, [remat[stage] for stage in mine]) for worker, mine in enumerate(self.homes)]
        return replace(self.schedule, remat=by_schedule(remat), actions=tuple(rows))

    def _row(self, worker: int, remat: Sequence[str]) -> tuple[Action, ...]:
        count = self.schedule.num_microbatches
        again = dict(zip(self.homes[worker], remat, strict=True))
        row: list[Action] = []
        for action in self.schedule.actions[worker]:
            if action.kind in (Kind.B, Kind.I) and recomputes(again[action.stage], action.microbatch, count):
                row.append(Action(action.stage, Kind.R, action.microbatch))
            row.append(action)
        return tuple(row)

    def moments(self, worker: int, remat: tuple[str, ...]) -> tuple[Moment, ...]:
        """The different moments of one worker; in a long row hundreds of actions find the same numbers."""
        if (worker, remat) not in self._moments:
            self._moments[worker, remat] = self._moments_of(worker, remat)
        return self._moments[worker, remat]

    def _moments_of(self, worker: int, remat: tuple[str, ...]) -> tuple[Moment, ...]:
        row = self._row(worker, remat)
        if len(remat) == 1:
            return tuple(map(Moment, steps(row, self.ahead)))
        found: dict[tuple[object, ...], Moment] = {}
        for moment in row_moments(row, self.ahead):
            action, _, counts = moment.step
            key = (action.stage, moment.step.alike, counts, moment.others, moment.waiting)
            found.setdefault(key, moment)
        return tuple(found.values())

"""Whether stages fit: the bytes of every worker, for the thousands of cuts that a search looks at.

The model is `pipeline.memory`: a worker's row walked with what its stages hold, and what a grid adds to it or
shares out. Here each stage's footprint, each row and each answer is made once, whichever cut asks; equal
layers in a row are one content wherever they stand. Two things are only known here:

    tp               all that a layer holds is divided; what passes between layers is whole
    a tied weight    one, with one gradient and one state, where one worker has all its layers

What a grid adds to the first forward or the last backward alone is counted at every moment of a step: a cut
that fits here fits, and `grid_peak_bytes` says to the byte how much is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpipe_bench.experiments.planning.models import Tie
from gpipe_bench.experiments.planning.searching.footprints import Footprints
from gpipe_bench.experiments.planning.searching.grids import Grid
from gpipe_bench.pipeline.memory.stages.copies import with_shadows
from gpipe_bench.pipeline.memory.stages.demands import Demand, demands
from gpipe_bench.pipeline.memory.stages.grids import HeldStage, Sharing, held_stage
from gpipe_bench.pipeline.memory.stages.peaks import (
    OPTIMIZERS,
    StageMemory,
    memory_at,
    optimizer_state,
    rule_of,
)
from gpipe_bench.pipeline.memory.stages.rows.searched import (
    WorkerMoment,
    worker_memory,
    worker_moments,
)
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule


@dataclass(frozen=True)
class Rules:
    """What stands around a search for cuts: the optimizer, the grid, the ties of the model."""

    optimizer: str
    grid: Grid
    ties: tuple[Tie, ...] = ()


@dataclass(frozen=True)
class Walked:
    """The rows of one schedule, walked: the same on every grid and at every micro-batch size."""

    demands: dict[tuple[int, str], tuple[Demand, ...]] = field(default_factory=dict)
    moments: dict[tuple[int, tuple[str, ...]], tuple[WorkerMoment, ...]] = field(default_factory=dict)


class Room:
    """Bytes of the workers of one schedule, which is without recomputation, on one grid.

    `walked` is shared by all rooms of that schedule; one's own if not given.
    """

    def __init__(
        self, footprints: Footprints, schedule: Schedule, rules: Rules, walked: Walked | None = None
    ) -> None:
        self._footprints, self._schedule, self._rules = footprints, schedule, rules
        self._walked = walked or Walked()
        self._ahead = 1 if schedule.num_workers > 1 else 0
        grid = rules.grid
        self._sharing = Sharing(grid.dp, grid.fsdp, grid.fsdp_level or 2)
        copies = 2 + OPTIMIZERS[rules.optimizer].state  # of a weight: itself, its gradient, its state
        twice = sum(tie.num_bytes * (len(tie.layers) - 1) for tie in rules.ties)
        self._all_ties = copies * -(-twice // grid.fsdp)
        self._known: dict[tuple[object, ...], StageMemory] = {}

    def memory(self, worker: int, stages: tuple[range, ...], remat: Sequence[str]) -> StageMemory:
        """A worker with stages of these layers at its fullest."""
        ties = self._ties(stages)
        contents = tuple(map(self._footprints.key, stages))
        key = (worker, tuple(remat), contents, stages[0].start == 0, ties)
        if key not in self._known:
            held = [self._footprints.of(stage, self._sharing) for stage in stages]
            found = self._alone(worker, held[0], remat[0]) if len(held) == 1 else None
            self._known[key] = self._less(found or self._together(worker, held, remat), ties)
        return self._known[key]

    def fits(self, worker: int, stages: tuple[range, ...], remat: Sequence[str], cap: int) -> bool:
        """Whether a worker has room for stages of these layers, which recompute so much."""
        held = self._between_steps()
        least = sum(held[stage.stop] - held[stage.start] for stage in stages) - self._all_ties
        return least <= cap * self._rules.grid.tp and self.memory(worker, stages, remat).peak <= cap

    def least_bytes(self) -> int:
        """What the fullest worker holds between steps at least, however the model is cut: an equal share."""
        shared_out = self._rules.grid.tp * self._schedule.num_workers
        return (self._between_steps()[-1] - self._all_ties) // shared_out

    def _between_steps(self) -> list[int]:
        """Weights, gradients and the optimizer's state of all layers before each one, ties counted twice."""
        return self._footprints.between_steps(self._sharing, self._rules.optimizer)

    def _alone(self, worker: int, held: HeldStage, remat: str) -> StageMemory:
        key = (worker, remat)
        if key not in self._walked.demands:
            row = _with_recomputation(self._schedule, worker, (remat,))
            self._walked.demands[key] = demands(row, self._ahead)
        rule, count = rule_of(self._rules.optimizer), self._schedule.num_microbatches
        state, more = optimizer_state(held.rest, rule), max((*held.first, *held.last))
        rest, step = (with_shadows(each, self._walked.demands[key]) for each in (held.rest, held.step))
        fullest = memory_at(rest, None, rule, state, count, is_first=worker == 0)
        for demand in self._walked.demands[key]:
            other = memory_at(step, demand, rule, state, count, is_first=worker == 0)
            if other.peak + more > fullest.peak:
                fullest = replace(other, transients=other.transients + more)
        return fullest

    def _together(self, worker: int, held: Sequence[HeldStage], remat: Sequence[str]) -> StageMemory:
        key = (worker, tuple(remat))
        if key not in self._walked.moments:
            row = _with_recomputation(self._schedule, worker, remat)
            self._walked.moments[key] = worker_moments(self._schedule, worker, row, self._ahead)
        mine = self._schedule.stages_of(worker)
        found = worker_memory(
            self._walked.moments[key],
            dict(zip(mine, [each.step for each in held], strict=True)),
            dict(zip(mine, [each.rest for each in held], strict=True)),
            self._schedule.num_microbatches,
            self._rules.optimizer,
        )
        more = max(max((*each.first, *each.last)) for each in held)
        return replace(found, transients=found.transients + more)

    def _ties(self, stages: tuple[range, ...]) -> tuple[Tie, ...]:
        """Those whose layers the worker has more than one of, with that many of them."""
        found = []
        for tie in self._rules.ties:
            mine = tuple(layer for layer in tie.layers if any(layer in stage for stage in stages))
            if len(mine) > 1:
                found.append(replace(tie, layers=mine))
        return tuple(found)

    def _less(self, memory: StageMemory, ties: tuple[Tie, ...]) -> StageMemory:
        """Without what is counted twice, and what others hold that compute the same layers."""
        shards = self._rules.grid.fsdp
        twice = -(-sum(tie.num_bytes * (len(tie.layers) - 1) for tie in ties) // shards)
        state, tp = OPTIMIZERS[self._rules.optimizer].state * twice, self._rules.grid.tp
        return replace(
            memory,
            parameters=-(-(memory.parameters - twice) // tp),
            gradients=-(-max(0, memory.gradients - twice) // tp) if memory.gradients else 0,
            optimizer_state=-(-(memory.optimizer_state - state) // tp),
            activations=-(-memory.activations // tp),
            transients=-(-memory.transients // tp),
        )


def _with_recomputation(schedule: Schedule, worker: int, remat: Sequence[str]) -> tuple[Action, ...]:
    """The worker's row with R before each backward of what its stages recompute."""
    count = schedule.num_microbatches
    again = {
        stage: {"never": 0, "always": count, "except_last": count - 1}[what]
        for stage, what in zip(schedule.stages_of(worker), remat, strict=True)
    }
    row: list[Action] = []
    for action in schedule.actions[worker]:
        if action.kind in (Kind.B, Kind.I) and action.microbatch < again[action.stage]:
            row.append(Action(action.stage, Kind.R, action.microbatch))
        row.append(action)
    return tuple(row)

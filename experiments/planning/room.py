"""Whether stages fit: the bytes of every worker, for the thousands of cuts that a search looks at.

The model is `pipeline.memory`: a worker's row walked with what its stages hold. Here each stage's footprint,
each row and each answer is made once, whichever cut asks; equal layers in a row are one content wherever they
stand. What a grid shares out is taken off, and what is gathered or held by two layers of one worker counted
as it is:

    fsdp, level 2    gradients and optimizer state are divided
    fsdp, level 3    parameters too, beside the two largest layers, which are gathered
    tp               all that a layer holds is divided; what passes between layers is whole
    a tied weight    one, with one gradient and one state, where one worker has all its layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpipe_bench.experiments.planning.grids import Grid
from gpipe_bench.experiments.planning.models import Tie
from gpipe_bench.experiments.table1.model_costs import ModelProfile
from gpipe_bench.pipeline.memory.stages.demands import Demand, demands
from gpipe_bench.pipeline.memory.stages.footprint import Footprint, footprint
from gpipe_bench.pipeline.memory.stages.peaks import OPTIMIZERS, StageMemory, fullest_moment
from gpipe_bench.pipeline.memory.stages.workers import worker_memory
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule


class Footprints:
    """Of the stages of one model at one micro-batch size; stages of the same layers are one."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self._known: dict[tuple[object, ...], Footprint] = {}

    def key(self, stage: range) -> tuple[object, ...]:
        """Equal for stages that hold the same."""
        layers = self.profile.layers
        return (*map(id, layers[stage.start : stage.stop]), stage.stop == len(layers))

    def of(self, stage: range) -> Footprint:
        key = self.key(stage)
        if key not in self._known:
            layers = self.profile.layers
            loss = self.profile.loss if stage.stop == len(layers) else None
            self._known[key] = footprint(layers[stage.start : stage.stop], loss)
        return self._known[key]


@dataclass(frozen=True)
class Rules:
    """What stands around a search for cuts: the optimizer, the grid, the ties of the model."""

    optimizer: str
    grid: Grid
    ties: tuple[Tie, ...] = ()


class Room:
    """Bytes of the workers of one schedule, which is without recomputation, on one grid."""

    def __init__(self, footprints: Footprints, schedule: Schedule, rules: Rules) -> None:
        self._footprints, self._schedule, self._rules = footprints, schedule, rules
        self._ahead = 1 if schedule.num_workers > 1 else 0
        self._demands: dict[tuple[int, str], tuple[Demand, ...]] = {}
        self._known: dict[tuple[object, ...], StageMemory] = {}

    def memory(self, worker: int, stages: tuple[range, ...], remat: Sequence[str]) -> StageMemory:
        """A worker with stages of these layers at its fullest."""
        key = (worker, tuple(remat), tuple(map(self._footprints.key, stages)), stages[0].start == 0)
        ties = self._ties(stages)
        if ties:
            key = (*key, ties)
        if key not in self._known:
            found = self._alone if len(stages) == 1 else self._together
            self._known[key] = self._on_grid(found(worker, stages, remat), stages, ties)
        return self._known[key]

    def _alone(self, worker: int, stages: tuple[range, ...], remat: Sequence[str]) -> StageMemory:
        key = (worker, remat[0])
        if key not in self._demands:
            row = _with_recomputation(self._schedule, worker, remat)
            self._demands[key] = demands(row, self._ahead)
        return fullest_moment(
            self._footprints.of(stages[0]), self._demands[key], self._schedule.num_microbatches,
            self._rules.optimizer, is_first=worker == 0,
        )  # fmt: skip

    def _together(self, worker: int, stages: tuple[range, ...], remat: Sequence[str]) -> StageMemory:
        row = _with_recomputation(self._schedule, worker, remat)
        rows = tuple(row if index == worker else each for index, each in enumerate(self._schedule.actions))
        held = dict(
            zip(
                self._schedule.stages_of(worker),
                [self._footprints.of(stage) for stage in stages],
                strict=True,
            )
        )
        return worker_memory(
            worker, held, replace(self._schedule, actions=rows), self._rules.optimizer, self._ahead
        )

    def _ties(self, stages: tuple[range, ...]) -> tuple[Tie, ...]:
        """Those whose layers the worker has more than one of, with that many of them."""
        found = []
        for tie in self._rules.ties:
            mine = tuple(layer for layer in tie.layers if any(layer in stage for stage in stages))
            if len(mine) > 1:
                found.append(replace(tie, layers=mine))
        return tuple(found)

    def _on_grid(self, memory: StageMemory, stages: tuple[range, ...], ties: tuple[Tie, ...]) -> StageMemory:
        grid, state = self._rules.grid, OPTIMIZERS[self._rules.optimizer].state
        twice = sum(tie.num_bytes * (len(tie.layers) - 1) for tie in ties)
        parameters, gradients = memory.parameters - twice, memory.gradients
        if gradients:
            gradients = max(0, gradients - twice)
        optimizer_state = memory.optimizer_state - state * twice
        if grid == Grid(grid.pp, grid.dp):
            return replace(
                memory, parameters=parameters, gradients=gradients, optimizer_state=optimizer_state
            )
        tp, shards = grid.tp, grid.tp * grid.fsdp
        layers = self._footprints.profile.layers
        sizes = sorted(layers[index].parameter_bytes for stage in stages for index in stage)
        gathered = -(-sum(sizes[-2:]) // tp) if grid.fsdp > 1 else 0  # as gradients, or as parameters
        whole = gathered if grid.fsdp_level == 3 else 0
        return replace(
            memory,
            parameters=-(-parameters // (shards if grid.fsdp_level == 3 else tp)) + whole,
            gradients=-(-gradients // shards) + (gathered if gradients else 0),
            optimizer_state=-(-optimizer_state // shards),
            buffers=memory.buffers,
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

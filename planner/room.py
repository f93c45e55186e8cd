"""Whether stages fit: the bytes of every worker, for the thousands of cuts that a search looks at.

The model is `pipeline.memory`: a worker's row walked with what its stages hold, and what a grid adds to it or
shares out. Here each stage's footprint, each row and each answer is made once, whichever cut asks; equal
layers in a row are one content wherever they stand. One thing is only known here:

    a tied weight    one with one state where one worker has all its layers, but a gradient of each of its
                     uses until a step ends; where others have some, for a moment their gradient, too

What a grid adds to the first forward or the last backward alone is counted at every moment of a step. What
messages take is only known of all stages together: a cut is looked for with one receive ahead, `messages`
then says what the transport holds beyond that, and a cut that fits with it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpipe_bench.pipeline.memory.stages.copies import with_shadows
from gpipe_bench.pipeline.memory.stages.demands import Demand, demands
from gpipe_bench.pipeline.memory.stages.footprint import Footprint
from gpipe_bench.pipeline.memory.stages.grids import HeldStage, Sharing, grid_peak_bytes
from gpipe_bench.pipeline.memory.stages.peaks import (
    StageMemory,
    memory_at,
    optimizer_state,
    rule_of,
)
from gpipe_bench.pipeline.memory.stages.rows.messages import Ahead, Transport, all_received_apart
from gpipe_bench.pipeline.plan.remat import Choice
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.planner.footprints import Footprints
from gpipe_bench.planner.grids import Grid
from gpipe_bench.planner.models import Tie
from gpipe_bench.planner.rows import most_graphs, with_recomputation
from gpipe_bench.planner.searched import (
    WorkerMoment,
    worker_memory,
    worker_moments,
)


@dataclass(frozen=True)
class Rules:
    """What stands around a search for cuts: the optimizer, the grid, the ties of the model."""

    optimizer: str
    grid: Grid
    ties: tuple[Tie, ...] = ()


@dataclass(frozen=True)
class Walked:
    """The rows of one schedule, walked: the same on every grid and at every micro-batch size."""

    demands: dict[tuple[int, Choice], tuple[Demand, ...]] = field(default_factory=dict)
    moments: dict[tuple[int, tuple[Choice, ...]], tuple[WorkerMoment, ...]] = field(default_factory=dict)
    graphs: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


class Room:
    """Bytes of the workers of one schedule, which is without recomputation, on one grid.

    `walked` is shared by all rooms of that schedule; one's own if not given.
    """

    def __init__(
        self, footprints: Footprints, schedule: Schedule, rules: Rules, walked: Walked | None = None
    ) -> None:
        self._footprints, self.schedule, self._rules = footprints, schedule, rules
        self.layers = footprints.profile.layers
        self._walked = walked or Walked()
        self._ahead = 1 if schedule.num_workers > 1 else 0
        grid = rules.grid
        self._sharing = Sharing(grid.dp, grid.fsdp, grid.fsdp_level or 2)
        self._all_ties = sum(self._beside(tie) for tie in rules.ties)
        self._known: dict[tuple[object, ...], StageMemory] = {}

    def memory(self, worker: int, stages: tuple[range, ...], remat: Sequence[Choice]) -> StageMemory:
        """A worker with stages of these layers at its fullest."""
        ties = self._ties(stages)
        contents = tuple(map(self._footprints.key, stages))
        key = (worker, tuple(remat), contents, stages[0].start == 0, ties)
        if key not in self._known:
            held = self._once([self._footprints.of(stage, self._sharing) for stage in stages], stages, ties)
            found = self._alone(worker, held[0], remat[0]) if len(held) == 1 else None
            found = found or self._together(worker, held, remat)
            received = self._received_bytes(stages)
            if received:
                found = max(found, self._summing(worker, held, received), key=lambda each: each.peak)
            self._known[key] = found
        return self._known[key]

    def counted(
        self, stages: Sequence[range], remat: Sequence[Choice], accelerated: bool
    ) -> tuple[StageMemory, ...]:
        """All workers at their fullest, with what their messages take."""
        schedule = self.schedule
        homes = [schedule.stages_of(worker) for worker in range(schedule.num_workers)]
        alone = [
            self.memory(worker, tuple(stages[s] for s in mine), tuple(remat[s] for s in mine))
            for worker, mine in enumerate(homes)
        ]
        more = self.messages(stages, remat, accelerated)
        return tuple(replace(e, boundary=e.boundary + m) for e, m in zip(alone, more, strict=True))

    def messages(self, stages: Sequence[range], remat: Sequence[Choice], accelerated: bool) -> list[int]:
        """What rings of buffers and messages on their way make of each worker's fullest moment, beyond what
        `memory` counts, which may be less than nothing.
        """
        schedule = self.schedule
        workers = range(schedule.num_workers)
        if len(workers) == 1:
            return [0]
        held: dict[int, HeldStage] = {}
        rows = []
        for worker in workers:
            mine = schedule.stages_of(worker)
            spans = tuple(stages[stage] for stage in mine)
            alone = [self._footprints.of(span, self._sharing) for span in spans]
            held |= zip(mine, self._once(alone, spans, self._ties(spans)), strict=True)
            rows.append(with_recomputation(schedule, worker, [remat[stage] for stage in mine]))
        whole = replace(schedule, remat=tuple(remat), actions=tuple(rows))
        counted, supposed = (
            self._all_together([held[stage] for stage in range(len(stages))], stages, whole, ahead)
            for ahead in (Transport(accelerated), self._ahead)
        )
        return [more - less for more, less in zip(counted, supposed, strict=True)]

    def _all_together(
        self, held: Sequence[HeldStage], stages: Sequence[range], whole: Schedule, ahead: Ahead
    ) -> list[int]:
        """The peaks of all workers by the model's own walk, with the sums of tied weights."""
        found = list(grid_peak_bytes(held, whole, self._rules.optimizer, receive_ahead=ahead))
        rests = all_received_apart([each.rest for each in held], whole, ahead)
        for worker in range(whole.num_workers):
            mine = whole.stages_of(worker)
            received = self._received_bytes(tuple(stages[stage] for stage in mine))
            if received:
                resting = [replace(held[stage], rest=rests[stage]) for stage in mine]
                found[worker] = max(found[worker], self._summing(worker, resting, received).peak)
        return found

    def _received_bytes(self, stages: tuple[range, ...]) -> int:
        """The largest gradient that a worker with these stages is sent of a tied weight."""
        return max((tie.num_bytes for tie in self._rules.ties if _is_split(tie, stages)), default=0)

    def fits(self, worker: int, stages: tuple[range, ...], remat: Sequence[Choice], cap: int) -> bool:
        """Whether a worker has room for stages of these layers, which recompute so much."""
        held = self._between_steps()
        least = sum(held[stage.stop] - held[stage.start] for stage in stages) - self._all_ties
        if least > cap or (len(stages) > 1 and self._with_graphs(worker, stages, remat) > cap):
            return False
        return self.memory(worker, stages, remat).peak <= cap

    def _with_graphs(self, worker: int, stages: tuple[range, ...], remat: Sequence[Choice]) -> int:
        """What several stages hold at least before their gradients are made: weights, state and the graphs of
        those that recompute nothing. It takes no walk of the row for each choice of what is recomputed.
        """
        held = [self._footprints.of(stage, self._sharing) for stage in stages]
        rule = rule_of(self._rules.optimizer)
        always = sum(each.step.parameter_bytes + optimizer_state(each.rest, rule) for each in held)
        saved = [each.step.saved_bytes * (what == "never") for each, what in zip(held, remat, strict=True)]
        if worker not in self._walked.graphs:
            self._walked.graphs[worker] = most_graphs(
                self.schedule.actions[worker], self.schedule.stages_of(worker)
            )
        graphs = max(
            sum(count * size for count, size in zip(counts, saved, strict=True))
            for counts in self._walked.graphs[worker]
        )
        return always + graphs - self._all_ties

    def least_bytes(self) -> int:
        """What the fullest worker holds between steps at least, however the model is cut: an equal share."""
        return (self._between_steps()[-1] - self._all_ties) // self.schedule.num_workers

    def floor(self) -> list[int]:
        """Bytes that each layer adds to any stage: its parameters, their state; a tied one's may be there."""
        tied = {layer for tie in self._rules.ties for layer in tie.layers}
        state, shards = rule_of(self._rules.optimizer).state, self._rules.grid.fsdp
        return [
            0 if index in tied else (layer.parameter_bytes + state * sum(layer.trained_sizes)) // shards
            for index, layer in enumerate(self.layers)
        ]

    def _between_steps(self) -> list[int]:
        """Weights, gradients and the optimizer's state of all layers before each one, ties counted twice."""
        return self._footprints.between_steps(self._sharing, self._rules.optimizer)

    def _beside(self, tie: Tie) -> int:
        """What of a tied weight is not there between steps, where one worker has it: all but one of each."""
        rule = rule_of(self._rules.optimizer)
        copies = (2 + rule.state) * self._sharing.part(tie.num_bytes) + 4 * rule.counts_steps
        return copies * (len(tie.layers) - 1)

    def _alone(self, worker: int, held: HeldStage, remat: Choice) -> StageMemory:
        key = (worker, remat)
        if key not in self._walked.demands:
            row = with_recomputation(self.schedule, worker, (remat,))
            self._walked.demands[key] = demands(row, self._ahead)
        rule, count = rule_of(self._rules.optimizer), self.schedule.num_microbatches
        state, more = optimizer_state(held.rest, rule), max((*held.first, *held.last))
        rest, step = (with_shadows(each, self._walked.demands[key]) for each in (held.rest, held.step))
        fullest = memory_at(rest, None, rule, state, count, is_first=worker == 0)
        for demand in self._walked.demands[key]:
            other = memory_at(step, demand, rule, state, count, is_first=worker == 0)
            if other.peak + more > fullest.peak:
                fullest = replace(other, transients=other.transients + more)
        return fullest

    def _together(self, worker: int, held: Sequence[HeldStage], remat: Sequence[Choice]) -> StageMemory:
        key = (worker, tuple(remat))
        if key not in self._walked.moments:
            row = with_recomputation(self.schedule, worker, remat)
            self._walked.moments[key] = worker_moments(self.schedule, worker, row, self._ahead)
        mine = self.schedule.stages_of(worker)
        found = worker_memory(
            self._walked.moments[key],
            dict(zip(mine, [each.step for each in held], strict=True)),
            dict(zip(mine, [each.rest for each in held], strict=True)),
            self.schedule.num_microbatches,
            self._rules.optimizer,
        )
        more = max(max((*each.first, *each.last)) for each in held)
        return replace(found, transients=found.transients + more)

    def _at_rest(self, worker: int, held: HeldStage) -> StageMemory:
        """A stage in the optimizer's step."""
        rule = rule_of(self._rules.optimizer)
        return memory_at(
            held.rest, None, rule, optimizer_state(held.rest, rule), self.schedule.num_microbatches,
            is_first=worker == 0,
        )  # fmt: skip

    def _summing(self, worker: int, held: Sequence[HeldStage], received: int) -> StageMemory:
        """A worker that has the gradients of all its uses of tied weights, and one from another owner."""
        mine = self.schedule.stages_of(worker)
        rests = [self._at_rest(stage, each) for stage, each in zip(mine, held, strict=True)]
        names = ("parameters", "buffers", "gradients", "optimizer_state", "boundary")
        parts = {name: sum(getattr(rest, name) for rest in rests) for name in names}
        parts["gradients"] += sum(each.rest.summed_gradient_bytes for each in held)
        return StageMemory(**parts, activations=0, transients=self._sharing.part(received), when="ties")

    def _ties(self, stages: tuple[range, ...]) -> tuple[Tie, ...]:
        """Those of which the worker has a layer, with its layers alone."""
        return tuple(
            replace(tie, layers=mine)
            for tie in self._rules.ties
            if (mine := tuple(layer for layer in tie.layers if any(layer in stage for stage in stages)))
        )

    def _once(
        self, held: Sequence[HeldStage], stages: tuple[range, ...], ties: tuple[Tie, ...]
    ) -> list[HeldStage]:
        """The stages without the weights and states that the worker has already with an earlier layer."""
        found = list(held)
        for tie in ties:
            for layer in tie.layers[1:]:
                stage = next(index for index, each in enumerate(stages) if layer in each)
                found[stage] = _without(found[stage], self._sharing.part(tie.num_bytes))
        return found


def _is_split(tie: Tie, stages: tuple[range, ...]) -> bool:
    """Whether a worker with these stages has some of a tie's layers and another one has the others."""
    mine = [any(layer in stage for stage in stages) for layer in tie.layers]
    return any(mine) and not all(mine)


def _without(held: HeldStage, num_bytes: int) -> HeldStage:
    """A stage without one of its weights, whose gradient it has until the step's end all the same."""

    def less(stage: Footprint) -> Footprint:
        sizes = list(stage.trained_sizes)
        if num_bytes not in sizes:  # nobody trains it
            return replace(stage, parameter_bytes=stage.parameter_bytes - num_bytes)
        sizes.remove(num_bytes)
        return replace(
            stage,
            parameter_bytes=stage.parameter_bytes - num_bytes,
            trained_sizes=tuple(sizes),
            summed_gradient_bytes=stage.summed_gradient_bytes + num_bytes,
        )

    return replace(held, step=less(held.step), rest=less(held.rest))

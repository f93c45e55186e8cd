"""The memory of a pipeline with portals: what its stages keep of them, and what waits on the way.

A stage holds a portal as it holds its other inputs and outputs. So its layers are profiled as if what is
carried past them were part of what they pass, from the stash or the stage's beginning to the last pop or the
stage's end. Between two stages a portal waits with the one that pops, from the forward that made it, and its
gradient with the one that stashed, which may be many actions later (`Waits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gpipe_bench.pipeline.memory.boundary import Boundary, TensorSpec
from gpipe_bench.pipeline.memory.passing import beside, passing
from gpipe_bench.pipeline.memory.profile import Profiler
from gpipe_bench.pipeline.memory.stages.footprint import Footprint, footprint
from gpipe_bench.pipeline.memory.stages.peaks import StageMemory
from gpipe_bench.pipeline.memory.stages.workers import memories
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.portals import arriving, edges_of, leaving
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.stage.portals import declarations


@dataclass(frozen=True)
class Waits:
    """Bytes of the portals of each line, and of their gradients, for one micro-batch.

    `output_gradients` are the bytes of what comes back to each stage for its output alone.
    """

    lines: tuple[Edge, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    output_gradients: tuple[int, ...]

    def received(self, stage: int, num_bytes: int, *, gradients: bool) -> int:
        """All that a stage has been sent for an action, whose message is `num_bytes` with its portals."""
        main = self.main(stage, num_bytes, gradients=gradients)
        return main + sum(self._of_stage(stage, gradients=gradients))

    def main(self, stage: int, num_bytes: int, *, gradients: bool) -> int:
        """What of it comes from the stage beside it."""
        if gradients:
            return self.output_gradients[stage]
        return num_bytes - sum(self._of_stage(stage, gradients=False))

    def sent(self, stage: int, *, gradients: bool) -> Iterator[tuple[int, int]]:
        """Where an action of a stage sends portals or their gradients, and how many bytes."""
        sizes = self.backward if gradients else self.forward
        for line, num_bytes in zip(self.lines, sizes, strict=True):
            source, target = (line.target, line.source) if gradients else (line.source, line.target)
            if source == stage:
                yield target, num_bytes

    def _of_stage(self, stage: int, *, gradients: bool) -> list[int]:
        sizes = self.backward if gradients else self.forward
        ends = [line.source if gradients else line.target for line in self.lines]
        return [num_bytes for end, num_bytes in zip(ends, sizes, strict=True) if end == stage]


def portal_memory(
    layers: Sequence[nn.Module],
    loss_fn: Callable[[Any, Tensor], Tensor],
    inputs: Boundary,
    target: Boundary,
    stages: Sequence[range],
    schedule: Schedule,
    optimizer: str = "rmsprop",
    *,
    profiler: Profiler | None = None,
    receive_ahead: int | None = None,
) -> tuple[StageMemory, ...]:
    """The fullest moment of each worker in one process, of layers with portals.

    Args:
        layers: the model; portals lead between layers that pass tensors or tuples of them.
        loss_fn: as for `Pipeline.step`.
        inputs, target: a micro-batch and its target, the larger one where sizes differ.
        stages: the layers of each stage.
        schedule: any that `validate` accepts.
        optimizer: "sgd", "rmsprop" or "adam".
        profiler: `Profiler(split_backward=True)` for schedules that split backwards.
        receive_ahead: as of `workers.peak_bytes`, of which only None, one process, is known of portals.

    Raises:
        ValueError: another `receive_ahead`, layers that pass another pytree beside portals, or as of
            `workers.peak_bytes`.
    """
    if receive_ahead is not None:
        raise ValueError(
            f"receive_ahead is {receive_ahead}, but the memory of portals is modelled in one process alone: "
            "over processes they wait in buffers of their own; leave it None, or profile the layers with "
            "Profiler.model, which passes portals on from stage to stage"
        )
    profiler = profiler or Profiler()
    modules = list(layers)
    declared = declarations(modules)
    lines = edges_of(declared, stages)
    specs: dict[str, TensorSpec] = {}
    footprints: list[Footprint] = []
    output_gradients: list[int] = []
    for stage, span in enumerate(stages):
        comes, goes = arriving(lines, stage), leaving(lines, stage)
        arrived = tuple([specs[name] for name in comes])
        if arrived:
            if inputs.nested is not None:
                raise beside(repr(inputs.nested))
            inputs = inputs.join(Boundary(arrived, tuple(range(len(arrived))), True))
        mine = passing([modules[i] for i in span], [declared[i] for i in span], comes, goes)
        profiles, loss = profiler.chain(mine, inputs), None
        if stage == len(stages) - 1:
            loss = profiler.loss(loss_fn, profiles[-1].outputs, target)
            if loss.first.without_gradient:
                profiles = profiler.chain(mine, inputs, loss.first.without_gradient)
        footprints.append(footprint(profiles, loss))
        outputs = profiles[-1].outputs
        count = len(outputs.tensors) - len(goes)
        specs.update(zip(goes, outputs.tensors[count:], strict=True))
        inputs = outputs
        if goes:
            inputs = Boundary(outputs.tensors[:count], outputs.same_as[:count], count > 1)
        trained = [i for i in inputs.distinct if inputs.tensors[i].requires_grad]
        output_gradients.append(sum(inputs.tensors[i].num_bytes for i in trained) if loss is None else 0)
    waits = Waits(
        lines,
        tuple([sum(specs[name].num_bytes for name in line.names) for line in lines]),
        tuple(
            [sum(specs[name].num_bytes * specs[name].requires_grad for name in line.names) for line in lines]
        ),
        tuple(output_gradients),
    )
    return memories(footprints, schedule, optimizer, None, waits)

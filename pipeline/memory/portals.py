"""The memory of a pipeline with portals: what its stages keep of them, and what waits on the way.

A stage holds a portal as it holds its other inputs and outputs. So its layers are profiled as if what is
carried past them were part of what they pass, from the stash or the stage's beginning to the last pop or the
stage's end. Between two stages a portal waits with the one that pops, from the forward that made it, and its
gradient with the one that stashed, which may be many actions later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from gpipe_bench.pipeline.memory.boundary import Boundary, TensorSpec
from gpipe_bench.pipeline.memory.counts import Way
from gpipe_bench.pipeline.memory.peaks import StageMemory
from gpipe_bench.pipeline.memory.profile import Profiler, beside, passing
from gpipe_bench.pipeline.memory.stage_bytes import StageBytes, stage_bytes
from gpipe_bench.pipeline.memory.workers import memories
from gpipe_bench.pipeline.plan.portals import arriving, edges_of, leaving
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.stage.portals import declarations


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
    found: list[StageBytes] = []
    messages: dict[Way, int] = {}
    for stage, span in enumerate(stages):
        comes, goes = arriving(lines, stage), leaving(lines, stage)
        messages[stage, False, -1] = inputs.num_bytes
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
        found.append(stage_bytes(profiles, loss))
        outputs = profiles[-1].outputs
        count = len(outputs.tensors) - len(goes)
        specs.update(zip(goes, outputs.tensors[count:], strict=True))
        inputs = outputs
        if goes:
            inputs = Boundary(outputs.tensors[:count], outputs.same_as[:count], count > 1)
        trained = [i for i in inputs.distinct if inputs.tensors[i].requires_grad]
        messages[stage, True, -1] = sum([inputs.tensors[i].num_bytes for i in trained])
    for line in lines:
        each = [specs[name] for name in line.names]
        messages[line.target, False, line.number] = sum([spec.num_bytes for spec in each])
        messages[line.source, True, line.number] = sum(
            [spec.num_bytes for spec in each if spec.requires_grad]
        )
    return memories(found, schedule, optimizer, None, lines, messages)

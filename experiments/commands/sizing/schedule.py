"""`size --schedule`: what each worker holds of a given model under any schedule, and what fills it.

The search of `size` itself cuts by peaks, which is exact where all stages hold alike, as under gpipe. Here
the layers are cut by what they hold, evenly, and each worker's peak follows from the schedule's rows. Where
that does not fit and each worker has one stage, the cut is searched whose fullest worker is smallest.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.table1.paper_models import GIB, HALVES
from gpipe_bench.harness.report.grid import Grid

if TYPE_CHECKING:
    from gpipe_bench.experiments.table1.model_costs import ModelProfile
    from gpipe_bench.pipeline.memory.stages.peaks import StageMemory
    from gpipe_bench.pipeline.plan.partition import Partition
    from gpipe_bench.pipeline.plan.schedule import Schedule

MOST_LAYERS = 64
"""Of a model whose cuts are searched for a schedule under which every stage holds something else."""

PARTS = ("parameters", "optimizer_state", "gradients", "boundary", "activations", "transients", "buffers")


def describe(arguments: argparse.Namespace, half_name: str) -> dict[str, Any]:
    """The workers of the model that was asked for, as it is printed and as JSON, in bytes.

    Raises ValueError, naming value and remedy, for what is no such model or does not fit.
    """
    from gpipe_bench.experiments.table1.model_costs import given_profile

    half, number = HALVES[half_name], arguments.num_microbatches
    if arguments.num_layers is None or number is None:
        raise ValueError("--schedule needs --num-layers L and --num-microbatches M")
    if number < 1 or half.batch_size % number:
        raise ValueError(
            f"--num-microbatches {number} does not divide the mini-batch of {half.batch_size}; use a divisor"
        )
    profile = given_profile(
        half_name,
        arguments.num_layers,
        arguments.num_filters or 0,
        half.batch_size // number,
        arguments.precision,
    )
    return describe_model(arguments, profile, arguments.optimizer or "rmsprop")


def describe_model(arguments: argparse.Namespace, profile: ModelProfile, optimizer: str) -> dict[str, Any]:
    """The same of any model, whose profile is of one of `arguments.num_microbatches` micro-batches."""
    from gpipe_bench.pipeline.memory.stages.workers import pipeline_memory
    from gpipe_bench.pipeline.plan.partition import partition
    from gpipe_bench.pipeline.plan.remat import from_text, to_text
    from gpipe_bench.pipeline.plan.schedules.known import named
    from gpipe_bench.pipeline.plan.validate import validate

    number = arguments.num_microbatches
    if arguments.compiled:
        raise ValueError("--compiled does not go with --schedule: compiled graphs are not split")
    schedule = named(
        arguments.schedule, arguments.num_stages, number, remat=from_text(arguments.remat or "never")
    )
    validate(schedule)
    costs = [
        4 * layer.parameter_bytes + layer.first.kept_inside + layer.outputs.num_bytes
        for layer in profile.layers
    ]
    cut = partition(costs, schedule.num_stages)
    found = pipeline_memory(
        profile.layers, profile.loss, cut, schedule, optimizer,
        receive_ahead=1 if arguments.num_stages > 1 else 0,
    )  # fmt: skip
    cap = arguments.cap_gib * GIB
    if max(each.peak for each in found) > cap and not schedule.placement and len(costs) <= MOST_LAYERS:
        cut = _leanest(profile, schedule, optimizer)
        found = pipeline_memory(
            profile.layers, profile.loss, cut, schedule, optimizer,
            receive_ahead=1 if arguments.num_stages > 1 else 0,
        )  # fmt: skip
    worst = max(range(len(found)), key=lambda worker: found[worker].peak)
    peak = found[worst].peak
    if peak > arguments.cap_gib * GIB:
        raise ValueError(
            f"{arguments.model} of this size needs {peak / GIB:.2f} GiB on its fullest accelerator, worker "
            f"{worst} at {found[worst].when}, under {schedule.name} with {number} micro-batches, the cap is "
            f"{arguments.cap_gib:g} GiB: use more stages, more micro-batches, --remat always or a smaller "
            "model"
        )
    return {
        "num_parameters": profile.num_parameters,
        "schedule": schedule.name,
        "remat": to_text(schedule.remat),
        "optimizer": optimizer,
        "num_microbatches": number,
        "layers_per_stage": [len(stage) for stage in cut],
        "workers": [
            {"stages": list(schedule.stages_of(worker)), "peak": memory.peak, **asdict(memory)}
            for worker, memory in enumerate(found)
        ],
    }


def _leanest(profile: ModelProfile, schedule: Schedule, optimizer: str) -> Partition:
    """The cut whose fullest worker is smallest, where each has one stage and holds something else."""
    from gpipe_bench.pipeline.memory.stages.footprint import Footprint, footprint
    from gpipe_bench.pipeline.memory.stages.peaks import stage_memory
    from gpipe_bench.pipeline.plan.partition import leanest

    known: dict[tuple[object, ...], Footprint] = {}

    def peak(stage: int, start: int, stop: int) -> int:
        parts = profile.layers[start:stop]
        is_last = stop == len(profile.layers)
        key = (*map(id, parts), is_last)
        if key not in known:
            known[key] = footprint(parts, profile.loss if is_last else None)
        return stage_memory(
            known[key], schedule.row(stage), optimizer, is_first=stage == 0,
            receive_ahead=1 if schedule.num_workers > 1 else 0,
        ).peak  # fmt: skip

    return leanest(peak, len(profile.layers), schedule.num_stages)


def text(arguments: argparse.Namespace, facts: dict[str, Any]) -> str:
    """The same as a table."""
    columns = ["worker", "stages", "peak GiB", "at", *(part.replace("_", " ") for part in PARTS)]
    lines = [
        [
            index, " ".join(map(str, worker["stages"])), f"{worker['peak'] / GIB:.2f}", worker["when"],
            *(f"{worker[part] / GIB:.2f}" for part in PARTS),
        ]
        for index, worker in enumerate(facts["workers"])
    ]  # fmt: skip
    title = (
        f"{arguments.model}: {facts['num_parameters']:,} parameters under {facts['schedule']} on "
        f"{arguments.num_stages} x {arguments.cap_gib:g} GiB (modelled)\n{arguments.precision}, "
        f"{facts['optimizer']}, {facts['num_microbatches']} micro-batches, re-materialization "
        f"{facts['remat']}"
    )
    return Grid(title=title, columns=columns, lines=lines).text()


def stage_table(title: str, cut: Partition, stages: Sequence[StageMemory]) -> str:
    """What fills every stage, in GiB."""
    lines = [
        [
            index, f"{layers.start}-{layers.stop - 1}", f"{memory.peak / GIB:.2f}", memory.when,
            *(f"{getattr(memory, part) / GIB:.2f}" for part in PARTS),
        ]
        for index, (layers, memory) in enumerate(zip(cut, stages, strict=True))
    ]  # fmt: skip
    headers = ["stage", "layers", "peak GiB", "at", *(part.replace("_", " ") for part in PARTS)]
    return Grid(title=title, columns=headers, lines=lines).text()

"""What fills each accelerator, as a table and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.pipeline.plan.remat import to_text

if TYPE_CHECKING:
    from gpipe_bench.pipeline.memory.stages.peaks import StageMemory
    from gpipe_bench.planner.infeasible import Smallest
    from gpipe_bench.planner.model import Model
    from gpipe_bench.planner.request import Request

GIB = 2**30
PARTS = ("parameters", "optimizer_state", "gradients", "boundary", "activations", "transients", "buffers")


def text(model: Model, request: Request, found: Smallest) -> str:
    """Of a model that was given, for a terminal."""
    again = {"always": "every one recomputed", "never": "nothing recomputed"}
    what = again.get(str(found.remat), f"re-materialization {to_text(found.remat)}")
    title = (
        f"{model.name}: {model.num_parameters:,} parameters under {found.way.schedule} on "
        f"{request.accelerators} x {request.memory_bytes / GIB:g} GiB (modelled)\n{request.precision}, "
        f"{request.optimizer}, mini-batch {request.batch_size} in {found.way.num_microbatches} micro-batches"
        f", {what}"
        + (", layers compiled" if request.compiled else "")
        + (f", {model.attention} attention" if model.attention != "cpu" else "")
        + (f", {request.held_back_bytes / GIB:g} GiB held back" if request.held_back_bytes else "")
    )
    lines = [
        (" ".join(map(str, stages)), found.layers_of(worker), memory)
        for worker, (stages, memory) in enumerate(zip(found.homes, found.memory, strict=True))
    ]
    return table(title, lines)


def table(title: str, workers: Sequence[tuple[str, str, StageMemory]]) -> str:
    """Of workers by their stages and layers: the parts of each one's fullest moment, in GiB."""
    lines = [
        [
            index, stages, layers, memory.when, f"{memory.peak / GIB:.2f}",
            *(f"{getattr(memory, part) / GIB:.2f}" for part in PARTS),
        ]
        for index, (stages, layers, memory) in enumerate(workers)
    ]  # fmt: skip
    headers = ["worker", "stages", "layers", "at", "peak GiB", *(part.replace("_", " ") for part in PARTS)]
    if all(stages == str(index) for index, (stages, *_) in enumerate(workers)):
        headers = ["stage", *headers[2:]]
        lines = [[line[0], *line[2:]] for line in lines]
    first = headers.index("peak GiB")
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers) - set(range(first))).text()


def facts(model: Model, request: Request, found: Smallest) -> dict[str, Any]:
    """The same as plain data, in bytes."""
    return {
        "model": model.name,
        "num_parameters": model.num_parameters,
        "accelerators": request.accelerators,
        "memory_bytes": request.memory_bytes,
        "reserve_bytes": request.held_back_bytes,
        "batch_size": request.batch_size,
        "num_microbatches": found.way.num_microbatches,
        "schedule": found.way.schedule,
        "remat": to_text(found.remat),
        "optimizer": request.optimizer,
        "precision": request.precision,
        "compiled": request.compiled,
        "layers_per_stage": [len(stage) for stage in found.cut],
        "workers": [
            {"stages": list(stages), "peak": memory.peak, **asdict(memory)}
            for stages, memory in zip(found.homes, found.memory, strict=True)
        ],
    }

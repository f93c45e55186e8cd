"""`plan --bytes`: does a model fit as one pipeline over all accelerators, and where is it cut?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from gpipe_bench.experiments.commands.output import DONE, tell
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.pipeline.plan.named import NAMED, named
from gpipe_bench.planner.answer import nothing_fits, smallest
from gpipe_bench.planner.candidate import splits
from gpipe_bench.planner.model import Model
from gpipe_bench.planner.request import Request, Space, divisors
from gpipe_bench.planner.search import Found

GIB = 2**30
EAGER_BYTES = ", layers compiled (bytes of eager ones, an upper estimate)"
PARTS = ("parameters", "optimizer_state", "gradients", "boundary", "activations", "transients", "buffers")


def fits(model: Model, request: Request, arguments: argparse.Namespace) -> int:
    """Exit status. Raises ValueError, naming value and remedy, for what can't be placed."""
    found = placed(model, request, *_asked(model, arguments))
    tell(arguments, [facts(model, request, found)], lambda: text(model, request, found))
    return DONE


def _asked(model: Model, arguments: argparse.Namespace) -> tuple[str, str, int | None]:
    """Schedule, what is recomputed, and the number of micro-batches, where it is said."""
    for option in ("pp", "tp", "hosts", "between", "cards", "script", "format", "no_fsdp"):
        given = getattr(arguments, option)
        if given not in (None, [], False, 1):
            words = f"--{option.replace('_', '-')}" + (f" {given}" if given is not True else "")
            raise ValueError(f"{words}: --bytes is about one pipeline over all accelerators; leave one out")
    chosen: list[Any] = []
    for option, usual in (("schedule", "gpipe"), ("remat", "always"), ("num_microbatches", None)):
        several = getattr(arguments, option)
        if len(several) > 1:
            words = f"--{option.replace('_', '-')} {several[1]}"
            raise ValueError(f"{words}: --bytes takes one of them; leave the others out")
        chosen.append(several[0] if several else usual)
    name, remat, number = chosen
    if name not in NAMED:
        raise ValueError(f"--schedule {name}: there is no such schedule; choose one of {', '.join(NAMED)}")
    if arguments.compiled and splits(name):
        whole = ", ".join(each for each in NAMED if not splits(each))
        raise ValueError(
            f"--compiled with --schedule {name}: a compiled layer's backward is not split in two; choose one "
            f"of {whole}"
        )
    stages, layers = named(name, arguments.accelerators, 1).num_stages, len(model.layers)
    if stages > layers:
        raise ValueError(f"cannot cut {layers} layers into {stages} stages: use at most {layers}")
    counts = divisors(model.batch_size)
    if number is not None and number not in counts:
        raise ValueError(
            f"--num-microbatches {number} does not divide the mini-batch of {model.batch_size}; use one of "
            f"{', '.join(map(str, counts))}"
        )
    return name, remat, number


def placed(model: Model, request: Request, schedule: str, remat: str, number: int | None) -> Found:
    """The model's cut with the smallest peak, with the fewest micro-batches that fit where none are given.

    Raises ValueError, naming what would do, where it does not fit.
    """
    given = None if number is None else (number,)
    space = Space(
        schedules=(schedule,), pp=(request.accelerators,), sharded=False, microbatches=given, remats=(remat,)
    )

    def least(within: Space) -> Found:
        found = smallest(model, request, within)
        assert found is not None, "one pipeline of no more stages than layers is a grid"
        return found

    most = least(space)
    if most.peak > request.usable_bytes:
        raise ValueError(nothing_fits(model, request, space, most, as_one=True))
    for count in () if number is not None else divisors(model.batch_size)[:-1]:
        fewer = least(replace(space, microbatches=(count,)))
        if fewer.peak <= request.usable_bytes:
            return fewer
    return most


def text(model: Model, request: Request, found: Found) -> str:
    """Table of the workers: their stages and layers, and the parts of their fullest moment in GiB."""
    again = {"always": "every one recomputed", "never": "nothing recomputed"}
    remat = found.candidate.remat[0]  # as all stages recompute
    what = again.get(remat, f"re-materialization {remat}")
    title = (
        f"{model.name}: {model.num_parameters:,} parameters under {found.way.schedule} on "
        f"{request.accelerators} x {request.memory_bytes / GIB:g} GiB (modelled)\n{request.precision}, "
        f"{request.optimizer}, mini-batch {request.batch_size} in {found.way.num_microbatches} micro-batches"
        f", {what}"
        + EAGER_BYTES * request.compiled
        + (f", {model.attention} attention" if model.attention != "cpu" else "")
        + (f", {request.held_back_bytes / GIB:g} GiB held back" if request.held_back_bytes else "")
    )
    gib: Callable[[int], str] = lambda num_bytes: f"{num_bytes / GIB:.2f}"  # noqa: E731
    lines = [
        [
            worker, " ".join(map(str, stages)), found.layers_of(worker), memory.when, gib(memory.peak),
            *(gib(getattr(memory, part)) for part in PARTS),
        ]
        for worker, (stages, memory) in enumerate(zip(found.homes, found.memory, strict=True))
    ]  # fmt: skip
    headers = ["worker", "stages", "layers", "at", "peak GiB", *(part.replace("_", " ") for part in PARTS)]
    if all(stages == (worker,) for worker, stages in enumerate(found.homes)):
        headers = ["stage", *headers[2:]]
        lines = [[line[0], *line[2:]] for line in lines]
    first = headers.index("peak GiB")
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers) - set(range(first))).text()


def facts(model: Model, request: Request, found: Found) -> dict[str, Any]:
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
        "remat": found.candidate.remat[0],
        "optimizer": request.optimizer,
        "precision": request.precision,
        "compiled": request.compiled,
        "layers_per_stage": [len(stage) for stage in found.candidate.cut],
        "workers": [
            {"stages": list(stages), "peak": memory.peak, **asdict(memory)}
            for stages, memory in zip(found.homes, found.memory, strict=True)
        ],
    }

"""`size` of a model that is given: where it is cut, what fills each accelerator, or what would help.

The question is one that `plan` asks on its way, of a grid that is one pipeline, so both have one answer: the
cut whose fullest worker is smallest, and one sentence where that is still too much.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from gpipe_bench.experiments.commands.asked import reserve_bytes
from gpipe_bench.pipeline.plan.links import LINKS
from gpipe_bench.pipeline.plan.remat import check_remat, from_text
from gpipe_bench.pipeline.plan.schedules.known import NAMED, named
from gpipe_bench.planner.accelerators import accelerator
from gpipe_bench.planner.candidate import splits
from gpipe_bench.planner.infeasible import Manner, Smallest, nothing_fits, smallest
from gpipe_bench.planner.model import Model, model_of
from gpipe_bench.planner.request import MEASURED, Request
from gpipe_bench.planner.space import Space, divisors


def placed(arguments: argparse.Namespace, cap_bytes: int) -> tuple[Model, Request, Smallest]:
    """The model that was asked for, what was asked of it, and its cut under a cap per accelerator.

    Without a number of micro-batches it is the smallest with which the model fits. Raises ValueError, naming
    value and remedy, for what is no such model, cannot be cut so or does not fit.
    """
    model = model_of(
        arguments.model, arguments.batch_size, arguments.num_layers, num_filters=arguments.num_filters
    )
    if arguments.device_type is not None:
        device = accelerator(arguments.device_type, arguments.precision)
        model = replace(model, attention=device.attention)
    request = Request(
        accelerators=arguments.accelerators, memory_bytes=cap_bytes,
        batch_size=model.batch_size, link=LINKS["loopback"], optimizer=arguments.optimizer or "adam",
        precision=arguments.precision, compiled=arguments.compiled,
        device_type=arguments.device_type or MEASURED, reserve_bytes=reserve_bytes(arguments),
    )  # fmt: skip
    name, manner = _manner(arguments, model)
    counts = divisors(model.batch_size)
    number = arguments.num_microbatches
    if number is not None and number not in counts:
        raise ValueError(
            f"--num-microbatches {number} does not divide the mini-batch of {model.batch_size}; use one of "
            f"{', '.join(map(str, counts))}"
        )
    space = Space(
        schedules=(name,), pp=(request.accelerators,), sharded=False,
        microbatches=None if number is None else (number,),
    )  # fmt: skip
    assert manner.remat is not None
    check_remat(manner.remat, named(name, request.accelerators, 1).num_stages, number or counts[-1])
    most = _least(model, request, space, manner)
    if most.peak > request.usable_bytes:
        raise ValueError(nothing_fits(model, request, space, most, manner))
    for count in () if number is not None else counts[:-1]:
        fewer = _least(model, request, replace(space, microbatches=(count,)), manner)
        if fewer.peak <= request.usable_bytes:
            return model, request, fewer
    return model, request, most


def _manner(arguments: argparse.Namespace, model: Model) -> tuple[str, Manner]:
    """The schedule and what is recomputed, as far as the model and its accelerators allow."""
    name = arguments.schedule or "gpipe"
    remat = from_text(arguments.remat or "always")
    if not isinstance(remat, str) and arguments.num_microbatches is None:
        raise ValueError(f"--remat {arguments.remat} needs --num-microbatches M, whose numbers it is about")
    if arguments.compiled and splits(name):
        whole = ", ".join(each for each in NAMED if not splits(each))
        raise ValueError(
            f"--compiled with --schedule {name}: a compiled layer's backward is not split in two; choose one "
            f"of {whole}"
        )
    stages, layers = named(name, arguments.accelerators, 1).num_stages, len(model.layers)
    if stages > layers:
        raise ValueError(f"cannot cut {layers} layers into {stages} stages: use at most {layers}")
    return name, Manner(remat, in_one=True)


def _least(model: Model, request: Request, space: Space, manner: Manner) -> Smallest:
    found = smallest(model, request, space, manner=manner)
    assert found is not None, "one pipeline of no more stages than layers is a grid"
    return found

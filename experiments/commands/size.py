"""`size`: Table 1's question for one's own accelerators. How large may the model be, and where is it cut?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import print_line
from gpipe_bench.experiments.commands.sizing.schedule import describe, stage_table, text
from gpipe_bench.experiments.table1.paper_models import GIB, HALVES
from gpipe_bench.models import SHAPES

if TYPE_CHECKING:
    from gpipe_bench.experiments.table1.largest import Placement, Setting


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError, naming value and remedy, for what can't be placed."""
    halves = {half.model: name for name, half in HALVES.items()}
    if arguments.model not in halves and ":" not in arguments.model and arguments.model not in SHAPES:
        raise ValueError(
            f"unknown model {arguments.model!r}; known: {', '.join([*halves, *SHAPES])}, and one's own as "
            "module:function"
        )
    if arguments.num_stages < 1:
        raise ValueError(f"--num-stages {arguments.num_stages}: a pipeline has at least 1 stage")
    if not 0 < arguments.cap_gib < 1e6:
        raise ValueError(f"--cap-gib {arguments.cap_gib:g}: give the GiB of one accelerator, such as 16")
    import torch

    from gpipe_bench.experiments.table1.largest import Setting, largest

    torch.set_num_threads(1)
    if arguments.model not in halves:
        from gpipe_bench.experiments.commands.sizing.given import run as run_given

        run_given(arguments)
        return exits.DONE
    half = halves[arguments.model]
    if arguments.batch_size is not None:
        raise ValueError(
            f"--batch-size {arguments.batch_size}: {arguments.model} has Table 1's mini-batch of "
            f"{HALVES[half].batch_size}; leave it out"
        )
    if arguments.schedule is not None:
        _check_size(half, arguments)
        facts = describe(arguments, half)
        if arguments.json:
            print_line(json.dumps({"model": arguments.model, **facts}).encode())
        else:
            print(text(arguments, facts))
        return exits.DONE
    if arguments.remat is not None:
        raise ValueError(f"--remat {arguments.remat} goes with --schedule; the search recomputes everything")
    attention = "fused" if half == "transformer" else "none"
    setting = Setting(
        half, arguments.num_stages, False, arguments.precision, attention, arguments.cap_gib,
        compiled=arguments.compiled, optimizer=arguments.optimizer or "rmsprop",
    )  # fmt: skip
    if arguments.num_layers is None:
        if arguments.num_filters is not None:
            raise ValueError("--num-filters needs --num-layers; leave both out to search")
        placement = largest(setting)
    else:
        placement = _given(setting, arguments)
    if arguments.json:
        import msgspec

        print_line(msgspec.json.encode({"model": arguments.model, **placement.describe()}))
    else:
        print(_text(setting, placement))
    return exits.DONE


def _check_size(half: str, arguments: argparse.Namespace) -> None:
    """`ValueError` for a size that no model of the family has."""
    model, filters = HALVES[half].model, arguments.num_filters or 0
    if (1 if arguments.num_layers is None else arguments.num_layers) < 1 or filters < 0:
        raise ValueError(
            f"--num-layers {arguments.num_layers}, --num-filters {filters}: give positive numbers"
        )
    if half == "amoebanet" and not filters:
        raise ValueError(f"{model} needs --num-filters, such as 208")
    if half == "transformer" and filters:
        raise ValueError(f"{model} has no filters; leave --num-filters out")


def _given(setting: Setting, arguments: argparse.Namespace) -> Placement:
    """The model that was asked for, if it fits."""
    from gpipe_bench.experiments.table1.largest import place_anyhow, place_best

    half = HALVES[setting.half]
    filters = arguments.num_filters or 0
    _check_size(setting.half, arguments)
    if arguments.num_microbatches is None:
        placement = place_best(setting, arguments.num_layers, filters)
    elif arguments.num_microbatches not in setting.microbatch_counts():
        counts = ", ".join(map(str, setting.microbatch_counts()))
        raise ValueError(
            f"--num-microbatches {arguments.num_microbatches} does not divide the mini-batch of "
            f"{half.batch_size}; use one of {counts}"
        )
    else:
        placement = place_anyhow(setting, arguments.num_layers, filters, arguments.num_microbatches)
    if placement.peak_bytes > setting.cap_bytes:
        worst = max(range(len(placement.stages)), key=lambda number: placement.stages[number].peak)
        raise ValueError(
            f"{half.model} of this size needs {placement.peak_bytes / GIB:.2f} GiB on its fullest "
            f"accelerator, stage {worst} at {placement.stages[worst].when}, with "
            f"{placement.num_microbatches} micro-batches, the cap is {arguments.cap_gib:g} GiB: use more "
            "stages, more micro-batches or a smaller model"
        )
    return placement


def _text(setting: Setting, placement: Placement) -> str:
    half = HALVES[setting.half]
    size = f"{placement.num_layers} layers"
    if placement.num_filters:
        size = f"({placement.num_layers}, {placement.num_filters})"
    title = (
        f"{half.model} {size}: {placement.num_parameters:,} parameters on {setting.num_stages} x "
        f"{setting.cap_bytes / GIB:g} GiB (modelled)\n{setting.precision}, {setting.optimizer}, "
        f"mini-batch {half.batch_size} in {placement.num_microbatches} micro-batches, every one recomputed"
        + (", layers compiled" if setting.compiled else "")
    )
    return stage_table(title, placement.partition, placement.stages)

"""`size`: does a model fit into given accelerators, and where is it cut? And how large may Table 1's be?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.asked import (
    check_counts,
    find_own_modules,
    memory_bytes,
    model_options,
    precision,
    reserve_option,
    training_options,
)
from gpipe_bench.experiments.commands.output import print_line, say
from gpipe_bench.models.paper import GIB, HALVES
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.plan.schedules.known import NAMED

if TYPE_CHECKING:
    from gpipe_bench.experiments.table1.largest import Placement, Setting


def options(verb: argparse.ArgumentParser) -> None:
    """Of the verb."""
    model_options(verb, "; without it, the largest that fits is searched")
    machines = verb.add_argument_group("your machines")
    machines.add_argument(
        "--accelerators", "--num-stages", type=int, required=True, metavar="K",
        help="of the pipeline; where a schedule has two stages on each, there are twice as many stages",
    )  # fmt: skip
    machines.add_argument(
        "--memory-gib", "--cap-gib", type=float, required=True, metavar="GIB", help="of each"
    )
    reserve_option(machines)
    machines.add_argument(
        "--device-type", metavar="NAME",
        help="an accelerator by its name, such as h100, whose attention keeps less; default: this CPU",
    )  # fmt: skip
    training = verb.add_argument_group("how it is trained")
    training.add_argument(
        "--batch-size", type=int, metavar="N",
        help="examples of a mini-batch; default: 32, Table 1's, or as many as your example has",
    )  # fmt: skip
    training_options(training, default=None)
    training.add_argument("--num-microbatches", type=int, metavar="M", help="default: the fewest that fit")
    training.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(NAMED)}; default: gpipe")
    training.add_argument(
        "--remat", metavar="WHICH",
        help=f"what is recomputed: {', '.join(REMAT_MODES)}, or one choice per stage as for the verb "
        "schedule; default: always",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError, naming value and remedy, for what can't be placed."""
    check_counts(arguments, "accelerators", "num_layers", "num_filters", "num_microbatches", "batch_size")
    arguments.precision, cap_bytes = precision(arguments), memory_bytes(arguments)
    if arguments.schedule not in (None, *NAMED):
        raise ValueError(f"unknown schedule {arguments.schedule!r}; known: {', '.join(NAMED)}")
    half = next((name for name, half in HALVES.items() if half.model == arguments.model), None)
    is_searched = half is not None and arguments.num_layers is None
    if is_searched:
        _check_search(arguments)
    import torch

    torch.set_num_threads(1)
    if half is not None and is_searched:
        _search(arguments, half)
        return exits.DONE
    from gpipe_bench.experiments.commands.sizing.given import placed
    from gpipe_bench.experiments.commands.sizing.shown import facts, text

    find_own_modules()
    found = placed(arguments, cap_bytes)
    if arguments.json:
        print_line(json.dumps(facts(*found)).encode())
    else:
        say(text(*found))
    return exits.DONE


def _check_search(arguments: argparse.Namespace) -> None:
    """`ValueError` for options of a given model, where the largest one is searched."""
    for option in ("num_filters", "num_microbatches", "schedule", "remat", "device_type"):
        value = getattr(arguments, option)
        if value is not None:
            words = f"--{option.replace('_', '-')} {value}"
            raise ValueError(f"{words} needs --num-layers L; without both, the largest model is searched")
    batch_size = next(half.batch_size for half in HALVES.values() if half.model == arguments.model)
    if arguments.batch_size not in (None, batch_size):
        raise ValueError(
            f"--batch-size {arguments.batch_size} needs --num-layers L: the largest {arguments.model} is "
            f"searched with Table 1's mini-batch of {batch_size}"
        )


def _search(arguments: argparse.Namespace, half: str) -> None:
    from gpipe_bench.experiments.table1.largest import Setting, largest

    attention = "fused" if half == "transformer" else "none"
    setting = Setting(
        half, arguments.accelerators, False, arguments.precision, attention, arguments.memory_gib,
        compiled=arguments.compiled, optimizer=arguments.optimizer or "rmsprop",
    )  # fmt: skip
    placement = largest(setting)
    if arguments.json:
        import msgspec

        print_line(msgspec.json.encode({"model": arguments.model, **placement.describe()}))
    else:
        say(_text(setting, placement))


def _text(setting: Setting, placement: Placement) -> str:
    from gpipe_bench.experiments.commands.sizing.shown import table

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
    stages = zip(placement.partition, placement.stages, strict=True)
    return table(
        title,
        [(str(i), f"{span.start}-{span.stop - 1}", memory) for i, (span, memory) in enumerate(stages)],
    )

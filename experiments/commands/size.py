"""`size`: does a model fit into given accelerators, and where is it cut? And how large may Table 1's be?

What `plan` asks, too, options of the same name and meaning with one refusal for each value that is none,
stands at the end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.commands.output import DONE, tell
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.models.paper import GIB, HALVES
from gpipe_bench.pipeline.plan.links import LINKS
from gpipe_bench.pipeline.plan.named import NAMED, named
from gpipe_bench.pipeline.plan.names import suggestion
from gpipe_bench.pipeline.plan.remat import REMAT_MODES, check_remat, from_text, to_text
from gpipe_bench.planner.accelerators import accelerator
from gpipe_bench.planner.candidate import splits
from gpipe_bench.planner.request import MEASURED, Request, Space, divisors

if TYPE_CHECKING:
    from gpipe_bench.experiments.paper.largest import Placement, Setting
    from gpipe_bench.pipeline.memory.peaks import StageMemory
    from gpipe_bench.planner.infeasible import Smallest
    from gpipe_bench.planner.model import Model

EAGER_BYTES = ", layers compiled (bytes of eager ones, an upper estimate)"
PARTS = ("parameters", "optimizer_state", "gradients", "boundary", "activations", "transients", "buffers")


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
        close = suggestion(arguments.schedule, NAMED)
        raise ValueError(f"unknown schedule {arguments.schedule!r}{close}; known: {', '.join(NAMED)}")
    half = next((name for name, half in HALVES.items() if half.model == arguments.model), None)
    is_searched = half is not None and arguments.num_layers is None
    if is_searched:
        _check_search(arguments)
    import torch

    torch.set_num_threads(1)
    if half is not None and is_searched:
        _search(arguments, half)
        return DONE
    find_own_modules()
    found = placed(arguments, cap_bytes)
    tell(arguments, [facts(*found)], lambda: text(*found))
    return DONE


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
    from gpipe_bench.experiments.paper.largest import Setting, largest

    attention = "fused" if half == "transformer" else "none"
    setting = Setting(
        half, arguments.accelerators, False, arguments.precision, attention, arguments.memory_gib,
        optimizer=arguments.optimizer or "rmsprop",
    )  # fmt: skip
    placement = largest(setting)
    facts = {"model": arguments.model, **placement.describe()}
    compiled = EAGER_BYTES * arguments.compiled
    tell(arguments, [facts], lambda: _largest_text(setting, placement, compiled))


def _largest_text(setting: Setting, placement: Placement, compiled: str) -> str:
    half = HALVES[setting.half]
    size = f"{placement.num_layers} layers"
    if placement.num_filters:
        size = f"({placement.num_layers}, {placement.num_filters})"
    title = (
        f"{half.model} {size}: {placement.num_parameters:,} parameters on {setting.num_stages} x "
        f"{setting.cap_bytes / GIB:g} GiB (modelled)\n{setting.precision}, {setting.optimizer}, "
        f"mini-batch {half.batch_size} in {placement.num_microbatches} micro-batches, every one recomputed"
        + compiled
    )
    stages = zip(placement.partition, placement.stages, strict=True)
    return table(
        title,
        [(str(i), f"{span.start}-{span.stop - 1}", memory) for i, (span, memory) in enumerate(stages)],
    )


def placed(arguments: argparse.Namespace, cap_bytes: int) -> tuple[Model, Request, Smallest]:
    """The model that was asked for, what was asked of it, and its cut under a cap per accelerator.

    Without a number of micro-batches it is the smallest with which the model fits. Raises ValueError, naming
    value and remedy, for what is no such model, cannot be cut so or does not fit.
    """
    from gpipe_bench.planner.infeasible import nothing_fits, smallest
    from gpipe_bench.planner.model import model_of

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
    name, remat, layers = (
        arguments.schedule or "gpipe",
        from_text(arguments.remat or "always"),
        len(model.layers),
    )
    if arguments.compiled and splits(name):
        whole = ", ".join(each for each in NAMED if not splits(each))
        raise ValueError(
            f"--compiled with --schedule {name}: a compiled layer's backward is not split in two; choose one "
            f"of {whole}"
        )
    stages, layers = named(name, arguments.accelerators, 1).num_stages, len(model.layers)
    if stages > layers:
        raise ValueError(f"cannot cut {layers} layers into {stages} stages: use at most {layers}")
    counts, number = divisors(model.batch_size), arguments.num_microbatches
    if number is not None and number not in counts:
        raise ValueError(
            f"--num-microbatches {number} does not divide the mini-batch of {model.batch_size}; use one of "
            f"{', '.join(map(str, counts))}"
        )
    check_remat(remat, stages)
    given = None if number is None else (number,)
    space = Space(schedules=(name,), pp=(request.accelerators,), sharded=False, microbatches=given)

    def least(within: Space) -> Smallest:
        found = smallest(model, request, within, remat=remat)
        assert found is not None, "one pipeline of no more stages than layers is a grid"
        return found

    most = least(space)
    if most.peak > request.usable_bytes:
        raise ValueError(nothing_fits(model, request, space, most, remat))
    for count in () if number is not None else counts[:-1]:
        fewer = least(replace(space, microbatches=(count,)))
        if fewer.peak <= request.usable_bytes:
            return model, request, fewer
    return model, request, most


def text(model: Model, request: Request, found: Smallest) -> str:
    """Of a model that was given, for a terminal."""
    again = {"always": "every one recomputed", "never": "nothing recomputed"}
    what = again.get(str(found.remat), f"re-materialization {to_text(found.remat)}")
    title = (
        f"{model.name}: {model.num_parameters:,} parameters under {found.way.schedule} on "
        f"{request.accelerators} x {request.memory_bytes / GIB:g} GiB (modelled)\n{request.precision}, "
        f"{request.optimizer}, mini-batch {request.batch_size} in {found.way.num_microbatches} micro-batches"
        f", {what}"
        + EAGER_BYTES * request.compiled
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


# What `plan` asks, too

PRECISIONS = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "bfloat16-pure": "bfloat16-pure", "bf16-pure": "bfloat16-pure",
}  # fmt: skip
MOST_GIB = 1e6


def model_options(verb: argparse.ArgumentParser, without: str = "") -> None:
    """Which model, and how large."""
    verb.add_argument(
        "model", metavar="MODEL",
        help="a published shape (gpt2-xl, llama-8b, unet-5-64 ...), transformer-lm or amoebanet-d with Table "
        "1's options, or your own as module:function",
    )  # fmt: skip
    verb.add_argument(
        "--num-layers", type=int, metavar="L",
        help="blocks of GPT-2 or Llama, in the place of the shape's own; of transformer-lm and amoebanet-d"
        + without,
    )  # fmt: skip
    verb.add_argument("--num-filters", type=int, metavar="D", help="of amoebanet-d, with --num-layers")


def reserve_option(machines: Any) -> None:
    """What of the memory is not planned with."""
    machines.add_argument(
        "--reserve-gib", type=float, metavar="GIB",
        help="of each, for what is no tensor: context, kernels, workspaces, buffers of collectives; default: "
        "1.5 of an accelerator that is named, else 0",
    )  # fmt: skip


def training_options(group: Any, default: str | None = "adam") -> None:
    """What a step is made of besides the mini-batch."""
    said = default or "adam; rmsprop where the largest is searched"
    group.add_argument(
        "--optimizer", choices=("sgd", "rmsprop", "adam"), default=default, help=f"default: {said}"
    )
    group.add_argument(
        "--precision", default="float32", metavar="TYPE",
        help="float32; bf16 or fp16 mixed (weights stay float32, fp16 scales its loss); bf16-pure for "
        "everything in bfloat16; default: %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--compiled", action="store_true",
        help="layers run under torch.compile: bytes are those of eager layers, an upper estimate",
    )  # fmt: skip


def memory_bytes(arguments: argparse.Namespace) -> int:
    """Of one accelerator. `ValueError` for what none has."""
    if not 2**-20 <= arguments.memory_gib < MOST_GIB:
        raise ValueError(
            f"--memory-gib {arguments.memory_gib:g}: give the GiB of one accelerator, such as 24"
        )
    return int(arguments.memory_gib * GIB)


def reserve_bytes(arguments: argparse.Namespace) -> int | None:
    """Held back of it; None where nobody says. `ValueError` for less than nothing."""
    if arguments.reserve_gib is None:
        return None
    if not 0 <= arguments.reserve_gib < MOST_GIB:
        raise ValueError(
            f"--reserve-gib {arguments.reserve_gib:g}: give the GiB of each accelerator that are not for "
            "tensors, 0 or more"
        )
    return int(arguments.reserve_gib * GIB)


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """`ValueError` for an option that is given with a number below 1, alone or in a list."""
    for name in names:
        given = getattr(arguments, name)
        for number in given if isinstance(given, list) else [given]:
            if number is not None and number < 1:
                raise ValueError(f"--{name.replace('_', '-')} {number}: give 1 or more")


def precision(arguments: argparse.Namespace) -> str:
    """The name that the library has for it. `ValueError` for one that is not known."""
    if arguments.precision not in PRECISIONS:
        raise ValueError(f"--precision {arguments.precision}: choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[arguments.precision]


def find_own_modules() -> None:
    """Makes one's own modules importable from the folder in which this was started."""
    if "" not in sys.path:
        sys.path.insert(0, "")

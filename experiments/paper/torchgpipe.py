"""torchgpipe's published speeds and memory, predicted: batches, micro-batches, cuts and GPUs are stated, so
nothing is left to choose.

Of speeds its documentation leaves open what the paper leaves open too: the share of the peak, and the link
between GPUs of one host, which are those declared for Table 3. Its settings are those of its scripts
(benchmarks/amoebanetd-speed, resnet101-speed, resnet101-accuracy and unet-speed of version 0.0.7). Its U-Nets
on four and eight GPUs are left out: there a skip goes directly from the stage that makes it to the one that
takes it, past the stages between them, and the steps here have links between neighbours only.

Of the memory of its largest U-Nets (benchmarks/unet-memory) a prediction is one number, the sum of the
accelerators' peaks, in bytes that tensors hold; what was published is what PyTorch's allocator had reserved,
with the blocks that it could not use again and the workspaces of cuDNN. The stages between those of a skip
hold nothing of it. Gradients of skips that wait for their stage are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from gpipe_bench.experiments.paper.full_size import FullSize
from gpipe_bench.harness.reproduction import load_reproduction
from gpipe_bench.models import MODELS, count_parameters, example_batch, loss_fn
from gpipe_bench.models.unet import Join, Stash
from gpipe_bench.pipeline.memory.profile import Profiler
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.memory.trace import Boundary
from gpipe_bench.pipeline.memory.workers import stage_memory
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.planner.accelerators import P40

LIKE = "table3-amoebanet"
"""Table whose share of the peak and link are used: those of GPUs without a fast link, too."""
LINK = ("share_of_peak", "link_bytes_per_s", "link_latency_s")

Cell = tuple[str, str, str]
"""Table, row and column, as in results/paper.csv."""


class Setting(NamedTuple):
    """One published run.

    Args:
        table, row, column: of its throughput in results/paper.csv
        ratio: row of its throughput relative to the first of the table; empty where none is published
        balance: layers of every stage
        batch_size: examples of the mini-batch
        num_microbatches: as asked for; those there are follow from their size, the next whole number
        remat: which micro-batches are recomputed
    """

    table: str
    row: str
    column: str
    ratio: str
    balance: tuple[int, ...]
    batch_size: int
    num_microbatches: int
    remat: str = "except_last"

    @property
    def cell(self) -> Cell:
        return self.table, self.row, self.column

    @property
    def cut(self) -> Partition:
        """The layers of every stage."""
        return tuple(range(*ends) for ends in pairwise(accumulate(self.balance, initial=0)))


def _amoebanet(m: int, balance: tuple[int, ...], batch_size: int) -> Setting:
    remat = "always" if m == 1 else "except_last"
    return Setting(
        "table2-amoebanet", f"M={m} throughput", f"K={len(balance)}", f"M={m}", balance, batch_size, m, remat
    )


def _speed(table: str, column: str, balance: tuple[int, ...], batch_size: int, m: int) -> Setting:
    remat = "never" if column == "naive-1" else "except_last"
    return Setting(table, "throughput", column, "normalized throughput", balance, batch_size, m, remat)


_resnet, _unet = partial(_speed, "figure3-resnet101"), partial(_speed, "unet-speed")
_EIGHT = (26, 22, 33, 44, 44, 66, 66, 69)
_AMOEBANET_EIGHT = (2, 2, 2, 3, 3, 4, 4, 4)

SETTINGS: dict[str, tuple[Setting, ...]] = {
    "amoebanet": (
        _amoebanet(1, (7, 17), 96),
        _amoebanet(4, (9, 15), 256),
        _amoebanet(32, (9, 15), 1280),
        _amoebanet(1, (3, 4, 5, 12), 160),
        _amoebanet(4, (3, 6, 7, 8), 360),
        _amoebanet(32, (3, 6, 7, 8), 1152),
        _amoebanet(1, (2, 2, 2, 2, 2, 3, 4, 7), 196),
        _amoebanet(4, _AMOEBANET_EIGHT, 480),
        _amoebanet(32, _AMOEBANET_EIGHT, 1280),
    ),
    "resnet101": (
        _resnet("naive-1", (370,), 118, 1),
        _resnet("pipeline-1", (370,), 220, 2),
        _resnet("pipeline-2", (135, 235), 25_000, 1667),
        _resnet("pipeline-4", (44, 92, 124, 110), 5632, 256),
        _resnet("pipeline-8", _EIGHT, 5400, 150),
    ),
    "resnet101-accuracy": (
        Setting("resnet101-accuracy", "pipeline-256", "throughput", "", (140, 230), 256, 4),
        Setting("resnet101-accuracy", "pipeline-1k", "throughput", "", _EIGHT, 1024, 64),
        Setting("resnet101-accuracy", "pipeline-4k", "throughput", "", _EIGHT, 4096, 64),
    ),
    "unet": (
        _unet("naive-1", (241,), 40, 1),
        _unet("pipeline-1", (241,), 80, 2),
        _unet("pipeline-2", (104, 137), 512, 32),
    ),
}
"""Configurations by model and script; ratios are relative to the first of each."""

_RESNET = {"num_classes": 1000, "image_size": 224}
SIZES = {
    "amoebanet": FullSize(
        "amoebanet-d",
        {"num_layers": 18, "num_filters": 256, "image_size": 224, "preset": "torchgpipe", "aux_head": False},
        "sgd",
    ),
    "resnet101": FullSize("resnet101", _RESNET, "sgd"),
    "resnet101-accuracy": FullSize("resnet101", _RESNET, "momentum"),
    "unet": FullSize("unet", {"num_convs": 5, "num_filters": 64}, "sgd"),
}


def predict(script: str) -> dict[Cell, float]:
    """All published speeds of one script, and their ratios to the first."""
    rates = {setting: _examples_per_s(SIZES[script], setting) for setting in SETTINGS[script]}
    first = next(iter(rates.values()))
    values: dict[Cell, float] = {}
    for setting, rate in rates.items():
        values[setting.cell] = rate
        if setting.ratio and rate is not first:
            values[setting.table, setting.ratio, setting.column] = rate / first
    return values


def _examples_per_s(full: FullSize, setting: Setting) -> float:
    _check_all_named(setting.balance, len(full.layers))
    examples = -(-setting.batch_size // setting.num_microbatches)
    count = -(-setting.batch_size // examples)
    choices = load_reproduction().of(LIKE)
    share, bandwidth, latency = (float(str(choices[name].value)) for name in LINK)
    step = full.step(
        P40, "float32", setting.cut, count * examples, count,
        share_of_peak=share, link=Link(LIKE, latency, bandwidth),
        remat=setting.remat,
    )  # fmt: skip
    return count * examples / step.makespan_s


def _check_all_named(balance: Sequence[int], num_layers: int) -> None:
    if sum(balance) != num_layers:
        raise ValueError(
            f"{balance} has {sum(balance)} layers, the model {num_layers}; a published cut must name them all"
        )


class LargeUNet(NamedTuple):
    """One column of the table of the largest U-Nets.

    Args:
        column: in results/paper.csv
        num_convs, num_filters: (B, C) of the U-Net
        balance: layers of every stage; empty for the model as it is
        num_microbatches: as asked for; more than examples give one example each
    """

    column: str
    num_convs: int
    num_filters: int
    balance: tuple[int, ...] = ()
    num_microbatches: int = 1


UNETS = {
    each.column: each
    for each in (
        LargeUNet("naive-1", 6, 72),
        LargeUNet("pipeline-1", 11, 128, (505,), 32),
        LargeUNet("pipeline-2", 24, 128, (526, 551), 32),
        LargeUNet("pipeline-4", 24, 160, (472, 54, 36, 515), 32),
        LargeUNet("pipeline-8", 48, 160, (800, 140, 62, 36, 36, 36, 36, 987), 128),
    )
}


def unet_memory(given: LargeUNet, batch_size: int = 32, image_size: int = 192) -> tuple[int, tuple[int, ...]]:
    """Parameters of one U-Net, and the peak of every accelerator in bytes; nothing of its size is allocated.

    Raises ValueError where the balance does not name all layers.
    """
    options: dict[str, Any] = {
        "num_convs": given.num_convs, "num_filters": given.num_filters, "image_size": image_size,
    }  # fmt: skip
    with torch.device("meta"):
        modules: list[nn.Module] = [*MODELS["unet"](**options)]
    balance = given.balance or (len(modules),)
    _check_all_named(balance, len(modules))
    examples = -(-batch_size // given.num_microbatches)
    remat = "except_last" if given.balance else "never"
    schedule = gpipe(len(balance), -(-batch_size // examples), remat)
    ends = map(Boundary.of, example_batch("unet", examples, device="meta", **options))
    profiler = Profiler()
    layers, loss = profiler.model(modules, loss_fn("unet", **options), *ends)
    peaks = []
    for number, (start, stop) in enumerate(pairwise(accumulate(balance, initial=0))):
        entering = _without(layers[start].inputs, _taken(modules[start:stop]))
        stage = stage_bytes(
            profiler.chain(modules[start:stop], entering), loss if stop == len(modules) else None
        )
        peaks.append(stage_memory(stage, schedule.actions[number], "sgd", is_first=number == 0).peak)
    return count_parameters(nn.Sequential(*modules)), tuple(peaks)


def _taken(layers: Sequence[nn.Module]) -> int:
    """How many skips the layers take from stages before them."""
    own = taken = 0
    for layer in layers:
        if isinstance(layer, Stash):
            own += 1
        elif isinstance(layer, Join):
            own, taken = (own - 1, taken) if own else (0, taken + 1)
    return taken


def _without(entering: Boundary, num_skips: int) -> Boundary:
    """The tensors that enter a stage, without the skips that only pass through: those after `num_skips`."""
    count = 1 + num_skips
    if not entering.is_tuple:
        return entering
    kept = replace(entering, tensors=entering.tensors[:count], same_as=entering.same_as[:count])
    return replace(kept, is_tuple=count > 1)

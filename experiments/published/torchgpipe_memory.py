"""torchgpipe's published memory of its largest U-Nets, predicted by the memory model.

Its script (benchmarks/unet-memory, version 0.0.7) states all that the model asks for: mini-batch, micro-
batches, cuts, optimizer. Nothing is left to choose, so a prediction is one number. It is the sum of the
accelerators' peaks, in bytes that tensors hold; what was published is what PyTorch's allocator had reserved,
with the blocks that it could not use again and the workspaces of cuDNN.

torchgpipe hands a skip directly from the stage that makes it to the one that takes it, so the stages between
the two hold nothing of it. Gradients of skips that wait for their stage are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from gpipe_bench.models import MODELS, count_parameters, example_batch, loss_fn
from gpipe_bench.models.unet import Join, Stash
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import Profiler
from gpipe_bench.pipeline.memory.stages.footprint import footprint
from gpipe_bench.pipeline.memory.stages.peaks import stage_memory
from gpipe_bench.pipeline.plan.schedule import gpipe

TABLE = "unet-memory"
BATCH_SIZE = 32


@dataclass(frozen=True, slots=True)
class Published:
    """One column of the table.

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


PUBLISHED = (
    Published("naive-1", 6, 72),
    Published("pipeline-1", 11, 128, (505,), 32),
    Published("pipeline-2", 24, 128, (526, 551), 32),
    Published("pipeline-4", 24, 160, (472, 54, 36, 515), 32),
    Published("pipeline-8", 48, 160, (800, 140, 62, 36, 36, 36, 36, 987), 128),
)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Parameters, and the peak of every accelerator in bytes."""

    num_parameters: int
    peaks: tuple[int, ...]


def predict(given: Published, batch_size: int = BATCH_SIZE, image_size: int = 192) -> Predicted:
    """Parameters and peaks of one U-Net; nothing of its size is allocated.

    Raises ValueError where the balance does not name all layers.
    """
    options: dict[str, Any] = {
        "num_convs": given.num_convs,
        "num_filters": given.num_filters,
        "image_size": image_size,
    }
    with torch.device("meta"):
        modules: list[nn.Module] = [*MODELS["unet"](**options)]
    balance = given.balance or (len(modules),)
    if sum(balance) != len(modules):
        raise ValueError(
            f"{balance} has {sum(balance)} layers, the model {len(modules)}; a published cut must "
            "name them all"
        )
    examples = -(-batch_size // given.num_microbatches)
    remat = "except_last" if given.balance else "never"
    schedule = gpipe(len(balance), -(-batch_size // examples), remat)
    inputs, target = example_batch("unet", examples, device="meta", **options)
    profiler = Profiler()
    layers, loss = profiler.model(
        modules, loss_fn("unet", **options), Boundary.of(inputs), Boundary.of(target)
    )
    peaks = []
    for number, (start, stop) in enumerate(pairwise(accumulate(balance, initial=0))):
        entering = _without(layers[start].inputs, _taken(modules[start:stop]))
        stage = footprint(
            profiler.chain(modules[start:stop], entering), loss if stop == len(modules) else None
        )
        peaks.append(stage_memory(stage, schedule.actions[number], "sgd", is_first=number == 0).peak)
    return Predicted(count_parameters(nn.Sequential(*modules)), tuple(peaks))


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
    """What enters a stage without the skips that only pass through: those behind the first so many."""
    count = 1 + num_skips
    if not entering.is_tuple:
        return entering
    kept = replace(entering, tensors=entering.tensors[:count], same_as=entering.same_as[:count])
    return replace(kept, is_tuple=count > 1)

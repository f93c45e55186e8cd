"""torchgpipe's largest U-Nets, predicted: parameters, memory of stages whose skips go past those between."""

from __future__ import annotations

from itertools import pairwise

import torch
from records import record

from gpipe_bench.experiments.paper.predicted.torchgpipe import SETTINGS, UNETS, LargeUNet, unet_memory
from gpipe_bench.experiments.paper.predictions import COLUMNS, EXPERIMENT, SCRIPTS
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Boundary, Profiler, gpipe, pipeline_memory

# One convolution on each of five levels: a level down is 4 + 2 layers, up 2 + 4; one more at the end.
DOWN, BOTTOM, UP = 30, 4, 31
TINY = {"num_convs": 1, "num_filters": 4, "image_size": 64}


def peaks(*balance: int) -> tuple[int, ...]:
    return unet_memory(LargeUNet("tiny", 1, 4, balance, 8), batch_size=8, image_size=64)[1]


def with_every_skip_passed_on(*balance: int) -> list[int]:
    """The memory model's stages of the zoo's U-Net as it is."""
    with torch.device("meta"):
        model = MODELS["unet"](**TINY)
    inputs, target = example_batch("unet", 1, device="meta", **TINY)
    layers, loss = Profiler().model(model, loss_fn("unet", **TINY), Boundary.of(inputs), Boundary.of(target))
    ends = [sum(balance[:i]) for i in range(len(balance) + 1)]
    cut = [range(start, stop) for start, stop in pairwise(ends)]
    found = pipeline_memory(layers, loss, cut, gpipe(len(cut), 8, "except_last"), "sgd")
    return [each.peak for each in found]


def test_where_every_skip_goes_to_the_next_stage_nothing_is_special() -> None:
    assert list(peaks(DOWN, BOTTOM + UP)) == with_every_skip_passed_on(DOWN, BOTTOM + UP)


def test_a_stage_between_holds_nothing_of_the_skips_that_pass_it() -> None:
    """The five skips of 8 examples, by hand: 4 channels of 64 x 64, then twice as many of half the size."""
    skips = sum((4 << i) * (64 >> i) ** 2 for i in range(5)) * 4
    direct, passed = peaks(DOWN, BOTTOM, UP), with_every_skip_passed_on(DOWN, BOTTOM, UP)
    assert passed[1] - direct[1] >= 8 * skips
    assert (direct[0], direct[2]) == (passed[0], passed[2])


def test_every_published_cut_names_all_layers_and_every_column_is_answered() -> None:
    assert (tuple(UNETS), tuple(SETTINGS)) == (COLUMNS, SCRIPTS)
    found = EXPERIMENT.run(Case({"part": "memory", "column": "pipeline-1"}), RunOptions(profile="short"))
    kept = record(
        experiment="predictions", profile="short", case={"part": "memory", "column": "pipeline-1"},
        metrics=found.metrics, details=found.details,
    )  # fmt: skip
    parameters, memory = compare(EXPERIMENT.cells([kept]))
    assert (parameters.ours, parameters.verdict) == (2_213_834_176, "reproduced")
    assert (memory.unit, memory.provenance, memory.source) == ("GiB", "modelled", "torchgpipe")
    # Whatever else the allocator had reserved, these it must have held: value and gradient.
    assert memory.ours > 2 * 4 * 2_213_834_176 / 2**30
    assert "unet-memory: memory, pipeline-1" in EXPERIMENT.tables([kept])

"""Predictions for accelerators that are not here: counts, steps, and what others published."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.experiments.paper.predicted.sizes import (
    FullSize,
    num_bytes,
    product_flops,
    tiled_elements,
)
from gpipe_bench.experiments.paper.predicted.torchgpipe import SETTINGS, SIZES, predict
from gpipe_bench.experiments.paper.profiles import EXAMPLES
from gpipe_bench.harness import paper as paper_file
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Boundary, Kind, Link, Profiler, gpipe, pipeline_memory
from gpipe_bench.planner import accelerators
from gpipe_bench.planner.accelerators import P100_16, TPU_V2, Accelerator

TRANSFORMER = {
    "num_layers": 3, "d_model": 64, "ffn_dim": 256, "num_heads": 2, "seq_len": 16, "vocab_size": 100,
    "attention": "explicit",
}  # fmt: skip
AMOEBANET = {"num_layers": 6, "num_filters": 16, "image_size": 64, "num_classes": 10, "aux_head": False}


# Counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "examples"),
    [("transformer-lm", TRANSFORMER, 5), ("amoebanet-d", AMOEBANET, 4), ("resnet101", {"image_size": 64}, 4)],
)
def test_operations_and_memory_scaled_from_one_prime_number_of_examples_are_those_of_any(
    model, options, examples
) -> None:
    full = FullSize(model, options)
    with torch.device("meta"):
        modules = MODELS[model](**options)
    inputs, target = example_batch(model, examples, device="meta", **options)
    with FlopCounterMode(display=False) as forward:
        output = modules(inputs)
    assert sum(full.flops(examples)) == forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        loss_fn(model, **options)(output, target).backward()
    assert backward.get_total_flops() == sum(
        product_flops(each, examples)
        for layer in full.layers
        for operation in layer.backward
        for each in operation.products
    )
    assert sum(full.parameters) == sum(p.numel() for p in modules.parameters())
    layers, loss = Profiler(None).model(
        modules, loss_fn(model, **options), Boundary.of(inputs), Boundary.of(target)
    )
    assert [full.sent_bytes(n, examples, "float32") for n in range(len(layers) - 1)] == [
        layer.outputs.num_bytes for layer in layers[:-1]
    ]
    cut, schedule = (range(2), range(2, len(modules))), gpipe(2, 3, "always")
    wanted, *scaled = (
        [stage.peak for stage in pipeline_memory(each, of_loss, cut, schedule, receive_ahead=1)]
        for each, of_loss in ((layers, loss), (full.profiles("float32", examples)[:-1], loss))
    )
    assert scaled == [wanted]


def test_padded_operations_of_a_convolution_by_hand() -> None:
    """3 x 3, 40 to 70 channels, 14 x 14 places, 4 images: rows 784, inner 360, columns 70."""
    product = (1, 196 * EXAMPLES, 360, 70)
    assert product_flops(product, 4) == 2 * 784 * 360 * 70
    assert product_flops(product, 4, 128) == 2 * 784 * 384 * 128
    assert product_flops(product, 1, 128) == 2 * 200 * 384 * 128  # 196 rows in tiles of 8


def test_tiles_by_hand() -> None:
    # 4 images, 40 channels: 8 x 128 one way, 128 x 40 the other
    assert tiled_elements((4, 40, 14, 14), "images") == 196 * 8 * 128
    assert tiled_elements((256, 8, 1, 1), "images") == 256 * 8
    assert tiled_elements((2, 3, 16, 100), "sequences") == 6 * 16 * 128
    assert tiled_elements((100,), "images") == 100
    assert num_bytes(((70, 40), 4, True), 4, "bfloat16") == 4 * 70 * 40, "parameters stay float32"
    assert num_bytes(((EXAMPLES, 40), 4, True), 4, "bfloat16") == 2 * 4 * 40


def test_an_operation_takes_the_longer_of_arithmetic_and_memory_and_fused_ones_nothing() -> None:
    full = FullSize("transformer-lm", TRANSFORMER)
    arithmetic = Accelerator(name="counts", flops_per_s=1.0, half_flops_per_s=2.0, bytes_per_s=math.inf)
    seconds = full.seconds(arithmetic, "float32", 2, (0.5, 1.0))[1]
    per_token = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 2 * 16 * 64
    assert full.flops(2)[1] == 2 * 16 * per_token
    assert seconds.forward.tolist() == [2 * 2 * 16 * per_token, 2 * 16 * per_token]
    assert seconds.backward[1] == 2 * seconds.forward[1]
    assert full.seconds(arithmetic, "bfloat16", 2, (1.0,))[1].forward[0] == seconds.forward[1] / 2
    moving = replace(arithmetic, flops_per_s=math.inf, bytes_per_s=1.0)
    slow, fused = (
        full.seconds(each, "float32", 2, (1.0,))[1].forward[0]
        for each in (moving, replace(moving, fuses=True, name="fuses"))
    )
    pointwise = sum(
        num_bytes(tensor, 2, "float32")
        for each in full.layers[1].forward
        if each.is_elementwise
        for tensor in each.tensors
    )
    assert pointwise > 0
    assert slow - fused == pointwise
    with pytest.raises(ValueError, match=r"shares_of_peak is \(0\.0,\); each is a"):
        full.seconds(arithmetic, "float32", 2, (0.0,))


def test_fewer_than_eight_images_take_a_tpu_as_long_as_eight() -> None:
    full = FullSize("resnet101", {"image_size": 64})
    one, eight, nine = (full.seconds(TPU_V2, "float32", n, (0.5,))[0].forward[0] for n in (1, 8, 9))
    assert one == eight < nine
    gpu = [full.seconds(P100_16, "float32", n, (0.5,))[0].forward[0] for n in (1, 8)]
    assert gpu[0] < gpu[1] / 4


def test_a_core_is_half_a_chip() -> None:
    for each, clock_hz, units in ((accelerators.TPU_V2, 700e6, 1), (accelerators.TPU_V3, 940e6, 2)):
        assert each.flops_per_s == pytest.approx(units * 2 * 128 * 128 * clock_hz, rel=0.01)
    assert (P100_16.flops_per_s, P100_16.bytes_per_s) == (9.3e12, 732e9)


SMALL = FullSize(
    "transformer-lm",
    {"num_layers": 10, "attention": "explicit", "d_model": 32, "ffn_dim": 128, "num_heads": 2, "seq_len": 16,
     "vocab_size": 500},
)  # fmt: skip


def test_cuts_follow_the_rule() -> None:
    full = SMALL
    assert full.cut("layers", "cumulative share", 13) is None, "a stage would be empty"
    with pytest.raises(ValueError, match="a layer: use operations, parameters, layers"):
        full.cut("minutes", "least variance", 2)
    assert len(full.cut("seconds", "least variance", 2)) == 2
    assert full.cut("layers", "least variance", 2) == (range(6), range(6, 12))


# Steps ------------------------------------------------------------------------------------------------------


def test_a_step_is_laid_out_with_what_its_layers_take() -> None:
    """Set-up and updates at the speed of memory, messages at that of the link, recomputation as a forward."""
    full, cut = SMALL, (range(6), range(6, 12))
    link = Link("a link", 1e-6, 1e10)
    step = full.step(TPU_V2, "float32", cut, 9, 4, share_of_peak=0.5, link=link)
    layers = full.seconds(TPU_V2, "float32", 3, (0.5,))  # micro-batches of 2.25 examples hold 3
    forward = sum(layer.forward[0] for layer in layers[:6])
    assert step.times[0, Kind.F] == step.times[0, Kind.R] == pytest.approx(forward)
    assert step.times[1, Kind.B] == pytest.approx(sum(layer.backward[0] for layer in layers[6:]))
    assert step.beside["activation_bytes"] == [full.sent_bytes(5, 3, "float32")]
    assert step.beside["setup_s"][0] > 0 == step.beside["setup_s"][1]
    assert step.beside["update_s"][0] > 0
    assert step.makespan_s > 4 * forward
    assert sum(step.shares.values()) == pytest.approx(1)
    host = full.step(TPU_V2, "float32", cut, 9, 4, share_of_peak=0.5, link=link, setup="none")
    assert step.makespan_s - host.makespan_s == pytest.approx(step.beside["setup_s"][0])


# Others' numbers --------------------------------------------------------------------------------------------

PUBLISHED = {(cell.source, *cell.key): cell for cell in paper_file.load_paper()}


def test_the_published_cuts_have_as_many_layers_as_the_zoos_models() -> None:
    for model, runs in SETTINGS.items():
        for each in runs:
            assert each.cut[-1].stop == len(SIZES[model].layers)
            assert ("torchgpipe", *each.cell) in PUBLISHED


def test_a_published_ratio_is_that_of_its_speeds() -> None:
    found = predict("resnet101")
    ratio = ("figure3-resnet101", "normalized throughput", "pipeline-4")
    speed, base = (("figure3-resnet101", "throughput", column) for column in ("pipeline-4", "naive-1"))
    assert found[ratio] == pytest.approx(found[speed] / found[base])

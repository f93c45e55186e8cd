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
    of_the_paper,
    product_flops,
    tiled_elements,
)
from gpipe_bench.experiments.paper.profiles import EXAMPLES
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Boundary, Kind, Link, Profiler, gpipe, pipeline_memory
from gpipe_bench.planner.accelerators import TPU_V2, Accelerator

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


# Steps ------------------------------------------------------------------------------------------------------


def test_a_step_is_laid_out_with_what_its_layers_take() -> None:
    """Set-up and updates at the speed of memory, messages at that of the link, recomputation as a forward."""
    full, cut = of_the_paper("table2", "transformer", quick=True), (range(6), range(6, 12))
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

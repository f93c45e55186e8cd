"""Operations of layers by closed forms, and the seconds that a roofline makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_bench.models import MODELS
from gpipe_bench.pipeline import LINKS, Boundary
from gpipe_bench.planner import Request, model_of, roofline
from gpipe_bench.planner.accelerators import ACCELERATORS
from gpipe_bench.planner.costs import SizeCosts
from gpipe_bench.planner.roofline import Noted, Operation, by_roofline, noted

ROWS, WIDTH = 64, 32


def of(layer: nn.Module, *shape: int, precision: str = "float32", attention: str = "flash") -> Noted:
    return noted(layer, Boundary.of(torch.empty(*shape, requires_grad=True)), precision, attention)


def flops(operations: list[Operation]) -> float:
    return sum(each.flops for each in operations)


def moved(operations: list[Operation]) -> float:
    return sum(each.moved for each in operations)


@pytest.mark.parametrize(("rows", "width"), [(64, 32), (32, 32)])  # tokens may be as many as channels
def test_a_linear_layer_moves_its_operands_once(rows: int, width: int) -> None:
    found = of(nn.Linear(width, width, bias=False), rows, width)
    data, weights = 4 * rows * width, 4 * width * width
    assert flops(found.forward) == 2 * rows * width * width
    assert moved(found.forward) == 2 * data + weights
    assert flops(found.inputs) == flops(found.forward)
    assert moved(found.inputs) == 2 * data + weights
    assert flops(found.backward) == 2 * flops(found.forward)
    assert moved(found.backward) == 2 * (2 * data + weights)


def test_in_bfloat16_operands_are_cast_before() -> None:
    found = of(nn.Linear(WIDTH, WIDTH, bias=False), ROWS, WIDTH, precision="bfloat16")
    data, weights = ROWS * WIDTH, WIDTH * WIDTH
    assert moved(found.forward) == 6 * (data + weights) + 2 * (2 * data + weights)
    product = next(each for each in found.forward if each.flops)
    assert product.is_half
    assert moved([product]) == 2 * (2 * data + weights)


LENGTH, HEADS, CHANNELS = 320, 2, 16


def block(dropout: float) -> nn.Module:
    width = HEADS * CHANNELS
    model = MODELS["gpt2"](
        num_layers=1, d_model=width, num_heads=HEADS, vocab_size=8, seq_len=LENGTH, dropout=dropout
    )
    return model[1]


@pytest.mark.parametrize(
    ("precision", "attention", "dropout"),
    [
        ("float32", "flash", 0.0), ("float32", "flash", 0.1), ("bfloat16", "flash", 0.0),
        ("bfloat16", "flash", 0.1), ("float32", "efficient", 0.1), ("float32", "cpu", 0.0),
    ],
)  # fmt: skip
def test_fused_attention_multiplies_for_half_of_all_pairs(
    precision: str, attention: str, dropout: float
) -> None:
    found = of(block(dropout), 1, LENGTH, HEADS * CHANNELS, precision=precision, attention=attention)
    width = HEADS * CHANNELS
    linear = 12 * width**2 * 2 * LENGTH
    pairs = 2 * 2 * LENGTH**2 * width / 2
    assert flops(found.forward) == linear + pairs
    assert flops(found.backward) == 2 * linear + 2.5 * pairs
    assert flops(found.inputs) == linear + 2.5 * pairs
    fused = [each for each in found.forward if each.flops == pairs]
    assert len(fused) == 1
    size = 2 if precision == "bfloat16" else 4
    assert 0 <= fused[0].moved - (4 * size * LENGTH * width + 4 * HEADS * LENGTH) <= 64  # and the seeds


def test_seconds_are_those_of_the_slowest_part() -> None:
    device = replace(
        ACCELERATORS["a100"], flops_per_s=1e12, half_flops_per_s=2e12, bytes_per_s=1e12, reached=0.5
    )
    share = roofline.MIDDLE
    product = Operation(1e9, False, {0: 4e6}, {1: 4e6})
    assert roofline.seconds([product], device) == pytest.approx(1e-3 / 0.5 / share)
    assert roofline.seconds([product._replace(is_half=True)], device) == pytest.approx(5e-4 / 0.5 / share)
    copy = Operation(0.0, False, {0: 4e9}, {1: 4e9})
    assert roofline.seconds([copy], device) == pytest.approx(8e-3 / roofline.BANDWIDTH / share)
    assert roofline.seconds([Operation(0.0, False, {}, {})] * 3, device) == pytest.approx(
        3 * roofline.KERNEL_S / share
    )


def costs_of(**more: Any) -> SizeCosts:
    """Of `planning_models.square`, whose layers are too large for a kernel's start to count."""
    request = Request(
        accelerators=1, memory_bytes=2**40, batch_size=4096, link=LINKS["nvlink3"], device_type="a100", **more
    )
    return by_roofline(model_of("planning_models:square", 4096), request, [4096]).at(4096)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_layers_take_what_the_sheet_says_by_their_operations(precision: str) -> None:
    device = ACCELERATORS["a100"]
    seconds = costs_of(precision=precision).layers_s
    elements, bandwidth = 4096**2, 0.8 * 0.92 * device.bytes_per_s
    product_s = 2 * 4096**3 / (0.8 * 0.869 * device.rate(precision))
    cast_s = 0.0 if precision == "float32" else 6 * elements / bandwidth  # of weights, then of gradients
    assert [seconds[kind][1] for kind in "FIWB"] == pytest.approx(
        [product_s + cast_s, product_s, product_s + cast_s, 2 * product_s + cast_s]
    )
    assert seconds["I"][0] == 0  # nothing wants the gradient of the input
    size = 4 if precision == "float32" else 2
    assert seconds["F"][2] == pytest.approx(2 * size * elements / bandwidth)


def test_no_two_layers_have_tensors_in_common() -> None:
    """Tensors that lay where others had been counted as these: compiled layers took changing seconds."""
    layers = [of(nn.Linear(WIDTH, WIDTH), ROWS, WIDTH).forward for _ in range(32)]
    tensors = [{number for each in layer for number in (*each.reads, *each.writes)} for layer in layers]
    assert sum(map(len, tensors)) == len(set().union(*tensors))


def test_what_is_compiled_takes_less_time() -> None:
    plain, compiled = (costs_of(precision="bfloat16", compiled=each).layers_s for each in (False, True))
    assert compiled["F"][3] < 0.9 * plain["F"][3]  # the loss is with it
    assert compiled["F"][:3] == plain["F"][:3]


def test_an_optimizer_moves_its_state_once() -> None:
    request = Request(
        accelerators=1, memory_bytes=2**40, batch_size=1, link=LINKS["nvlink3"], device_type="a100",
        optimizer="rmsprop",
    )  # fmt: skip
    found = by_roofline(model_of("planning_models:plain", 1), request, [1])
    parameters = 16 * 17
    bandwidth = 0.8 * 0.92 * ACCELERATORS["a100"].bytes_per_s
    assert found.update_s[0] == pytest.approx(28 * parameters / bandwidth)
    assert (found.low, found.high) == (0.8, 1.25)

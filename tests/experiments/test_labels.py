"""Profiles of other sizes from one whose lengths are told apart by primes; arrays in tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_bench.experiments.paper.profiles import (
    Label,
    Reading,
    Relabel,
    amoebanet,
    profiled,
    transformer,
)
from gpipe_bench.pipeline import Boundary, Profiler
from gpipe_bench.pipeline.memory.profile import ModelProfile
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.memory.trace import LayerProfile


def block(width: int, examples: int) -> LayerProfile:
    layer = nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU())
    inputs = Boundary.of(torch.empty(examples, width, 5, 7, requires_grad=True))
    return Profiler(with_shapes=True).layer(layer, inputs)


def fields(profile: LayerProfile) -> list[object]:
    return [
        dataclasses.astuple(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
        for value in (getattr(profile, each.name) for each in dataclasses.fields(profile))
    ]


def test_a_relabelled_profile_is_that_of_the_other_size() -> None:
    relabel = Relabel((Label(61, 61, 12), Label(43, 43, 6)))
    assert fields(relabel.profile(block(61, 43))) == fields(block(12, 6))


def check_equal(made: ModelProfile, direct: ModelProfile) -> None:
    assert [layer.num_parameters for layer in made.layers] == [
        layer.num_parameters for layer in direct.layers
    ]
    assert [(a.inputs, a.outputs) for a in made.layers] == [(a.inputs, a.outputs) for a in direct.layers]
    for mine, other in zip((*made.layers, made.loss), (*direct.layers, direct.loss), strict=True):
        assert stage_bytes([mine]) == stage_bytes([other]), mine.name
    assert stage_bytes(made.layers, made.loss) == stage_bytes(direct.layers, direct.loss)


def test_amoebanet_from_its_kinds_is_amoebanet_profiled_layer_by_layer(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Of any depth and width it takes 20 profiled layers."""
    run, traced = Profiler._run, list[str]()

    def counting(self: Profiler, layer: nn.Module, *ends: Any) -> LayerProfile:
        traced.append(type(layer).__name__)
        return run(self, layer, *ends)

    monkeypatch.setattr(Profiler, "_run", counting)
    made = [amoebanet(Reading(), *size) for size in ((9, 48, 2), (72, 1600, 7))]
    assert len(traced) <= 20
    check_equal(made[0], profiled(Reading(), "amoebanet", 2, num_layers=9, num_filters=48))


@pytest.mark.parametrize(("examples", "attention"), [(1, "explicit"), (2, "explicit"), (5, "fused")])
def test_the_transformer_at_another_micro_batch(examples: int, attention: str) -> None:
    made = transformer(Reading(), 2, examples, attention)
    check_equal(made, profiled(Reading(), "transformer", examples, num_layers=2, attention=attention))

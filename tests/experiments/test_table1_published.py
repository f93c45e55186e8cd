"""Table 1 as published: what settings do to memory, and the search for the last that holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpipe_bench.experiments.paper.largest import Setting, last_that, place_anyhow
from gpipe_bench.experiments.paper.stages import (
    Combination,
    costs_of,
    counted,
    cuts_of,
    quadratic,
    stages_of,
)
from gpipe_bench.models.paper import Column, column


def with_settings(**changes: Any) -> Combination:
    """Plain settings, with some changes."""
    plain = {
        "activation_format": "float32", "gradient_copies": 0, "boundary_tensors": "inputs",
        "partition_cost": "operations", "partition_rule": "least variance", "num_microbatches": 4,
    }  # fmt: skip
    assert set(changes) <= set(plain)
    return {**plain, **changes}


def total(settings: Combination, where: Column) -> int:
    stages = stages_of("transformer", where, settings)
    assert stages is not None
    return sum(counted(stage, settings) for stage in stages)


# ------------------------------------------------------------------ the model


@pytest.mark.parametrize("name", ["naive-1", "pipeline-1"])
def test_what_is_kept_by_every_operation_is_this_engines_memory(name: str) -> None:
    """Without gradients, and with one copy of them, as the memory model has them that real steps check; but
    for the gradient of the one parameter that is being added, which is counted with the others here.
    """
    where = column("transformer", name)
    count = 1 if where.is_naive else 32
    placed = place_anyhow(
        Setting("transformer", 1, where.is_naive, "float32", "explicit"), where.num_layers, 0, count
    )
    stage = placed.stages[0]
    settings = with_settings(num_microbatches=32)
    assert total(settings, where) == pytest.approx(stage.working_set, rel=5e-3)
    with_gradients = total({**settings, "gradient_copies": 1}, where)
    assert with_gradients == pytest.approx(stage.working_set + stage.gradients, rel=5e-3)


def test_each_setting_does_what_it_says() -> None:
    where = column("transformer", "pipeline-8")
    base = total(with_settings(), where)
    gradients = 4 * (103 * 50_358_272 + 65_536_000 + 65_568_000)
    assert total(with_settings(gradient_copies=2), where) - base == pytest.approx(2 * gradients, rel=0.1)
    assert total(with_settings(activation_format="bfloat16"), where) < 0.6 * base
    assert total(with_settings(num_microbatches=8), where) < 0.6 * base
    # Each of the first seven stages keeps what it sends for every micro-batch of the mini-batch.
    sent = 7 * 32 * 1024 * 2048 * 4
    assert total(with_settings(boundary_tensors="inputs and outputs"), where) - base == sent


def test_partitions_follow_their_costs_and_an_empty_stage_is_none() -> None:
    where = column("transformer", "pipeline-8")
    by_layers = cuts_of("transformer", where, with_settings(partition_cost="layers"))
    assert by_layers is not None
    assert {len(cut) for cut in by_layers} == {13, 14}
    by_parameters = costs_of("transformer", 103, 0, with_settings(partition_cost="parameters"))
    assert by_parameters[0] == 65_536_000
    tiny = replace(where, num_layers=6)
    empty = with_settings(partition_cost="parameters", partition_rule="cumulative share")
    assert cuts_of("transformer", tiny, empty) is None
    assert stages_of("transformer", tiny, empty) is None


def test_a_polynomial_through_three_points() -> None:
    assert quadratic((1, 2, 5), (6, 11, 38), 3) == 18  # x^2 + 2 x + 3


# ------------------------------------------------------------------ the search


@pytest.mark.parametrize("guess", [0, 1, 7, 40, 41, 42, 500])
def test_the_last_that_holds_is_found_from_any_guess(guess: int) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= 41

    assert last_that(holds, 1, guess) == 41
    assert min(asked) >= 1
    assert len(asked) <= 18, "steps grow"
    assert last_that(lambda number: number <= 41, 42, guess) is None
    assert last_that(lambda number: number <= 41, 41, guess) == 41

"""Table 1 as published: what settings do to memory, ranges and quotients from records, capacities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpipe_bench.experiments.table1 import naive
from gpipe_bench.experiments.table1.as_published import (
    capacity_combinations,
    choices,
    costs_of,
    counted,
    cuts_of,
    largest,
    needed,
    quadratic,
    stages_of,
)
from gpipe_bench.experiments.table1.largest import Setting, last_that, place_anyhow
from gpipe_bench.experiments.table1.settings import (
    Choices,
    Combination,
    allowed,
    combinations,
)
from gpipe_bench.harness.unknowns import load_unknowns
from gpipe_bench.models.paper import HALVES, Column, column


def with_settings(**changes: Any) -> Combination:
    """The first combination, with some changes."""
    first = combinations("transformer")[0]
    assert set(changes) <= set(first)
    return {**first, **changes}


def total(settings: Combination, where: Column) -> int:
    stages = stages_of("transformer", where, settings)
    assert stages is not None
    return sum(counted(stage, settings) for stage in stages)


# ------------------------------------------------------------------ the model


def test_every_setting_is_an_unknown_of_the_file_and_none_is_left_out() -> None:
    for half, table in (("amoebanet", "table1-amoebanet"), ("transformer", "table1-transformer")):
        unknown = load_unknowns().of(table)
        used = {*allowed(half), *choices(half)} | ({"num_layers"} if half == "amoebanet" else set())
        assert used == set(unknown)
        assert all(unknown[name].allowed == values for name, values in allowed(half).items())
        number = 1
        for values in allowed(half).values():
            number *= len(values)
        assert len(combinations(half)) == number
        assert len({tuple(each.values()) for each in combinations(half)}) == number


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
    assert total(with_settings(tensor_layout="tiled 8 x 128"), where) >= base
    # Each of the first seven stages keeps what it sends for every micro-batch of the mini-batch.
    sent = 7 * 32 * 1024 * 2048 * 4
    assert total(with_settings(boundary_tensors="inputs and outputs"), where) - base == sent


def test_gradients_are_there_whether_they_are_counted_or_not() -> None:
    none, one = with_settings(), with_settings(gradient_copies=1)
    stages = stages_of("transformer", column("transformer", "pipeline-1"), none)
    assert stages is not None
    assert needed(stages[0], none) == needed(stages[0], one) > stages[0].fixed + counted(stages[0], none)


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


# ------------------------------------------------------------------ capacity


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


def test_the_largest_model_fits_and_one_layer_more_does_not() -> None:
    where, settings = column("transformer", "pipeline-8"), capacity_combinations("transformer")[0]
    found = largest("transformer", where, settings)
    assert found is not None
    cap = float(settings["memory_cap_bytes"])
    for more, fits in ((0, True), (1, False)):
        stages = stages_of("transformer", replace(where, num_layers=found.num_layers + more), settings)
        assert stages is not None
        assert (max(needed(stage, settings) for stage in stages) <= cap) is fits
    assert found.num_parameters == found.num_layers * 50_358_272 + 65_536_000 + 65_568_000


def test_capacities_are_about_the_file_and_reach_every_extreme() -> None:
    for half in HALVES:
        values, tried = choices(half), capacity_combinations(half)
        assert len({tuple(each.values()) for each in tried}) == len(tried)
        assert 0 not in values["gradient_copies"]
        for name, each in values.items():
            assert {settings[name] for settings in tried} == set(each)
        worst = {
            "activation_format": "float32",
            "kept_by": "every operation",
            "tensor_layout": "tiled 8 x 128",
        }
        cuts = {
            (each["partition_cost"], each["partition_rule"])
            for each in tried
            if worst.items() <= each.items()
        }
        assert len(cuts) == 6


# ------------------------------------------------------------------ from records


GIB = 2**30


def test_a_part_is_only_what_was_tried_with_the_same_others() -> None:
    settings: list[Combination] = [{"a": 0, "b": 0}, {"a": 1, "b": 0}, {"a": 0, "b": 1}]
    choices = Choices(("a", "b"), tuple(settings), {})
    spread = choices.spread([1.0, 2.0, 90.0])
    assert spread is not None
    assert {part.what: (part.low, part.high) for part in spread.parts} == {"a": (1, 2), "b": (1, 90)}
    assert choices.spread([None, None, None]) is None


def test_of_products_alone_three_layers_of_the_transformer_keep_what_the_paper_prints() -> None:
    """By hand for bfloat16: 3 layers of 3.25 GiB (queries, keys, values, scores, context, output, 8192 and
    2048 wide products) and logits of 1.953 GiB.
    """
    layer = 3 * 0.125 + 2 + 2 * 0.125 + 0.5 + 0.125
    products, compiled = naive.reasons("transformer").details["reasons"]
    kept = products["bytes"][0]
    assert kept < compiled["bytes"][0], "no cut of single layers keeps less than their products"
    assert kept == 2 * round((3 * layer + 32 * 1024 * 32_000 * 2 / GIB) * GIB)

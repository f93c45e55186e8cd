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
    last_that,
    needed,
    quadratic,
    stages_of,
)
from gpipe_bench.experiments.table1.cells import cells
from gpipe_bench.experiments.table1.experiment import EXPERIMENT
from gpipe_bench.experiments.table1.largest import Setting, place_anyhow
from gpipe_bench.experiments.table1.settings import (
    Combination,
    allowed,
    combinations,
    hypotheses,
    possible,
    spread_of,
    walks,
)
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.record import SCHEMA, Record
from gpipe_bench.harness.unknowns import load_unknowns
from gpipe_bench.harness.verdict import Answer
from gpipe_bench.models.paper import COLUMNS, HALVES, Column, column


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


def record(part: str, half: str, details: dict[str, Any]) -> Record:
    return Record(
        schema=SCHEMA, experiment="table1", profile="short", case={"part": part, "half": half}, status="done",
        reason="", quantities=(), details=details, environment={}, command="", started_at="", duration_s=0.0,
    )  # fmt: skip


GIB = 2**30
MEMORY = record(
    "hypotheses",
    "transformer",
    {
        "settings": {"gradient_copies": [0, 1], "num_microbatches": [16, 32]},
        "columns": {"pipeline-1": {"bytes": [6 * GIB, 3 * GIB, 9 * GIB, None], "fits": "1100"}},
        "parameters": {"settings": {}, "columns": {"pipeline-1": [785_761_536], "naive-1": [282_178_816]}},
    },
)
CAPACITY = record(
    "capacity",
    "transformer",
    {
        "settings": {"num_microbatches": [16, 32], "memory_cap_bytes": [1.0, 2.0]},
        "combinations": [[0, 0], [0, 1], [1, 0]],
        "columns": {
            "naive-1": {"parameters": [0, 100_000_000, 200_000_000]},
            "pipeline-1": {"parameters": [300_000_000, 400_000_000, 500_000_000]},
            "pipeline-128": {"parameters": [0, 0, 60_000_000_000]},
        },
    },
)


def entry(records: list[Record], table: str, row: str, where: str) -> Answer:
    records = [replace_columns(each) for each in records]
    (found,) = (each for each in cells(records) if each.place == (table, row, where))
    return found


def replace_columns(given: Record) -> Record:
    """With every column of the half, those that the test leaves out like the first one it gives."""
    columns = dict(given.details["columns"])
    parameters = dict(given.details.get("parameters", {"columns": {}})["columns"])
    for each in COLUMNS["transformer"]:
        columns.setdefault(each.name, next(iter(columns.values())))
        if parameters:
            parameters.setdefault(each.name, next(iter(parameters.values())))
    details = {**given.details, "columns": columns}
    if parameters:
        details["parameters"] = {**given.details["parameters"], "columns": parameters}
    return record(str(given.case["part"]), "transformer", details)


def test_activation_memory_is_a_range_over_the_combinations_under_which_the_papers_models_fit() -> None:
    """9 GiB do not fit; of the other two the lower M is the nearest to the middle of everything."""
    found = entry([MEMORY], "table1-transformer", "peak activation memory", "pipeline-1")
    assert found.question == "as published"
    assert found.spread is not None
    assert (found.spread.low, found.spread.high) == (3 * GIB, 6 * GIB)
    assert found.spread.combinations == 2
    assert found.quantity is not None
    assert found.quantity.value == 6 * GIB
    assert [part.what for part in found.spread.parts] == ["num_microbatches"]
    assert "under which the paper's models fit (2 of 4); this one by itself fits under 2" in found.note
    (judged,) = (
        each for each in compare([found]) if each.place == found.place and each.question == "as published"
    )
    assert judged.verdict == "below", "6.4 is met by the 9 GiB that do not fit"


def test_a_model_that_fits_under_no_combination_tells_nothing_of_the_others() -> None:
    columns = {**MEMORY.details["columns"], "naive-1": {"bytes": [1, 2, 3, 4], "fits": "0000"}}
    changed = record("hypotheses", "transformer", {**MEMORY.details, "columns": columns})
    found = entry([changed], "table1-transformer", "peak activation memory", "naive-1")
    assert (found.spread.low, found.spread.high) == (1, 2)
    assert "this one by itself fits under none" in found.note
    nothing = {**changed.details, "columns": {"naive-1": columns["naive-1"]}}
    assert possible(record("hypotheses", "transformer", nothing)) == (0, 1, 2, 3)


def test_capacity_counts_what_does_not_fit_as_nothing() -> None:
    found = entry([CAPACITY], "table1-transformer", "maximum parameters", "naive-1")
    assert found.spread is not None
    assert (found.spread.low, found.spread.high) == (0, 200_000_000)
    assert "under 1 of 3 combinations nothing fits" in found.note


def test_a_claim_divides_what_fits_under_the_same_settings() -> None:
    found = entry(
        [CAPACITY], "claims", "Transformer: larger by re-materialization alone", "pipeline-1 / naive-1"
    )
    assert found.spread is not None
    assert (found.spread.low, found.spread.high) == (2.5, 4.0)
    assert found.spread.combinations == 2
    assert "under 1 of 3 combinations nothing fits in naive-1" in found.note
    grown = entry(
        [CAPACITY],
        "claims",
        "Transformer: largest on 128 partitions over naive-1",
        "pipeline-128 / naive-1",
    )
    assert grown.spread is not None
    assert (grown.spread.low, grown.spread.high) == (0, 300.0)


def test_without_records_every_prediction_is_not_run() -> None:
    predictions = [each for each in cells([]) if each.question == "as published"]
    assert {each.verdict for each in compare(predictions) if each.question == "as published"} == {"not run"}


def test_hypotheses_join_the_halves_and_are_in_the_papers_units() -> None:
    other = record(
        "hypotheses",
        "amoebanet",
        {
            "settings": {"gradient_copies": [0, 1], "num_classes": [1000, 1001]},
            "columns": {"naive-1": {"bytes": [10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9], "fits": "0000"}},
        },
    )
    found = hypotheses([other, MEMORY])
    assert len(found) == 8
    assert found[0].name == "the base"
    assert len({each.name for each in found}) == 8
    key = ("table1-amoebanet", "peak activation memory", "naive-1")
    named = {each.name: each for each in found}
    assert named["gradients x1, 1001 classes, M = 32"].values == {key: 4.0}, "no memory, no number"
    assert named["gradients x1"].values[key] == 3.0
    assert named["M = 32"].values["table1-transformer", "peak activation memory", "pipeline-1"] == 3.0
    assert hypotheses([]) == []


def test_a_part_is_only_what_was_tried_with_the_same_others() -> None:
    settings: list[Combination] = [{"a": 0, "b": 0}, {"a": 1, "b": 0}, {"a": 0, "b": 1}]
    spread = spread_of(settings, [1.0, 2.0, 90.0], ("a", "b"))
    assert spread is not None
    assert {part.what: (part.low, part.high) for part in spread.parts} == {"a": (1, 2), "b": (1, 90)}
    assert spread_of(settings, [None, None, None], ("a", "b")) is None


def test_the_smoke_profile_predicts_nothing_and_the_short_one_both_halves() -> None:
    parts = {
        profile: sorted(
            (str(case.key["part"]), str(case.key["half"]))
            for case in EXPERIMENT.cases(RunOptions(profile=profile))
            if case.key["part"] in ("hypotheses", "capacity")
        )
        for profile in ("smoke", "short")
    }
    assert parts["smoke"] == []
    assert len(parts["short"]) == 4


def test_a_reason_by_name_is_held_against_naive_1_and_against_what_is_divided_by_it() -> None:
    reason = {
        "name": "products only",
        "settings": {"activation_format": ["float32", "bfloat16"]},
        "bytes": [23.4 * GIB, 11.7 * GIB],
        "capacity": {"settings": {"num_microbatches": [16, 32]}, "parameters": [100_000_000, 0], "sizes": []},
    }
    given = [replace_columns(CAPACITY), record("reasons", "transformer", {"reasons": [reason]})]
    given.append(replace_columns(MEMORY))
    found = hypotheses(given)[-1]
    assert (found.name, found.after_looking) == ("table1-transformer: products only", True)
    assert found.spreads["table1-transformer", "peak activation memory", "naive-1"].values == (23.4, 11.7)
    times = ("claims", "Transformer: larger by re-materialization alone", "pipeline-1 / naive-1")
    assert found.spreads[times].values == (3.0, 4.0), "nothing fits at M = 32"


def test_the_largest_models_are_walked_with_the_activations_under_the_same_settings() -> None:
    sizes = {"num_layers": [1, 2, 3], "num_filters": [0, 0, 0]}
    largest = replace_columns(CAPACITY)
    columns = {name: {**each, **sizes} for name, each in largest.details["columns"].items()}
    settings = {"gradient_copies": [1], "num_microbatches": [16, 32], "memory_cap_bytes": [1.0, 2.0]}
    capacity = record(
        "capacity",
        "transformer",
        {"settings": settings, "combinations": [[0, 0, 0], [0, 1, 1], [0, 1, 0]], "columns": columns},
    )
    found = {walk.name: walk for walk in walks([replace_columns(MEMORY), capacity])}
    every = found["table1-transformer, whether it fits or not"]
    memory = ("table1-transformer", "peak activation memory", "pipeline-1")
    assert (len(every.settings), every.values[memory]) == (4, [6.0, 3.0, 9.0, None])
    sized = found["table1-transformer, largest models"]
    assert sized.values["table1-transformer", "num_layers", "pipeline-1"] == [1, 2, 3]
    assert sized.values["table1-transformer", "maximum parameters", "naive-1"][0] is None, "nothing fits"
    assert sized.values[memory] == [9.0, None, None], "one copy of gradients, by M"


def test_of_products_alone_three_layers_of_the_transformer_keep_what_the_paper_prints() -> None:
    """By hand for bfloat16: 3 layers of 3.25 GiB (queries, keys, values, scores, context, output, 8192 and
    2048 wide products) and logits of 1.953 GiB.
    """
    layer = 3 * 0.125 + 2 + 2 * 0.125 + 0.5 + 0.125
    products, compiled = naive.reasons("transformer").details["reasons"]
    kept = products["bytes"][0]
    assert kept < compiled["bytes"][0], "no cut of single layers keeps less than their products"
    assert kept == 2 * round((3 * layer + 32 * 1024 * 32_000 * 2 / GIB) * GIB)

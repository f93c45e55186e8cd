"""What follows without a run: the stride control, and quotients of printed numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_bench.experiments.computed import experiment as quotients
from gpipe_bench.experiments.computed import stride, trained
from gpipe_bench.experiments.computed.answer import Computed, spread_of, to_details, to_quantities
from gpipe_bench.experiments.computed.experiment import EXPERIMENT, cells
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.record import SCHEMA, Record
from gpipe_bench.models import MODELS


def record(table: str, answers: list[Computed], what: str = "") -> Record:
    """What a run of the case leaves."""
    return Record(
        schema=SCHEMA, experiment="computed", profile="short",
        case={"part": "as published", "table": table, "what": what or table}, status="done", reason="",
        quantities=to_quantities(answers), details=to_details(answers), environment={}, command="",
        started_at="", duration_s=0.0,
    )  # fmt: skip


def words(table: str, answers: list[Computed]) -> dict[tuple[str, str], str]:
    """Verdicts by row and column."""
    found = compare(cells([record(table, answers)]), whole=())
    return {(c.row, c.column): c.verdict for c in found}


# The stride control


def test_a_moved_stride_keeps_nearly_four_times_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every map but those behind the place has twice the side."""
    monkeypatch.setattr(stride, "NUM_FILTERS", 16)
    monkeypatch.setattr(stride, "NUM_LAYERS", 3)
    original = stride.size(67, False, None)
    moved = {place: stride.size(67, False, place) for place in ("second reduction cell", "last normal cell")}
    ratios = {place: size.activation_bytes / original.activation_bytes for place, size in moved.items()}
    assert 3 < ratios["second reduction cell"] < ratios["last normal cell"] < 4.3
    assert moved["second reduction cell"].num_parameters == original.num_parameters
    assert stride.size(67, True, None).num_parameters > original.num_parameters


def test_the_range_goes_over_everything_that_is_not_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def size(image_size: int, auxiliary_head: bool, moved_stride: str | None) -> stride.Size:
        seen.append((image_size, auxiliary_head, moved_stride))
        if moved_stride is None:
            return stride.Size(100.0, 1000)
        more = 10 * (moved_stride == "last normal cell") + image_size - 224 + 5 * auxiliary_head
        return stride.Size(360.0 + more, 1000 + more)

    monkeypatch.setattr(stride, "size", size)
    memory, parameters = stride.stride()
    assert len(seen) == len(set(seen)) == 3 * 2 * 3
    assert memory.spread is not None
    assert memory.spread.combinations == 12
    assert (memory.spread.low, memory.spread.high) == (3.6, pytest.approx(3.6 + 0.1 + 1.07 + 0.05))
    assert memory.value == pytest.approx(4.4), "299 pixels, the middle"
    assert {part.what: (part.low, part.high) for part in memory.spread.parts} == {
        "moved_stride": (4.4, 4.5), "image_size": (3.65, pytest.approx(4.72)), "auxiliary_head": (4.35, 4.4),
    }  # fmt: skip
    assert parameters.value == pytest.approx(1.08)
    assert words("control-stride", [memory, parameters]) == {
        (memory.row, "moved stride"): "reproduced", (parameters.row, "moved stride"): "reproduced",
    }  # fmt: skip


# Quotients


def test_quotients_of_printed_numbers_by_hand() -> None:
    (growth,) = quotients.growth()
    assert growth.value == pytest.approx(145.8 / 4)
    assert growth.spread is not None
    assert growth.spread.low == pytest.approx(145.75 / 4.5)
    assert growth.spread.high == pytest.approx(145.85 / 3.5)
    errors = quotients.error_rates()
    assert [(error.row, error.value) for error in errors] == [
        ("CIFAR-10", pytest.approx(1.0)), ("CIFAR-100", pytest.approx(8.7)),
    ]  # fmt: skip
    assert set(words("growth", [growth]).values()) == {"identity"}
    assert set(words("transfer", errors).values()) == {"identity"}


def test_sentences_by_hand() -> None:
    """Filters double and sides halve; 24 layers have 96 rings; the versions are 8, 7, ..., 1."""
    activations, parameters, spmd, pipedream = quotients.sentences()
    assert activations.value == pytest.approx(0.5, rel=0.01)
    assert parameters.value == pytest.approx(4, rel=0.01)
    assert (spmd.value, pipedream.value) == (84.0, 4.5)
    of_ranks = quotients.correlation()
    assert of_ranks.value == pytest.approx(1 - 6 * 6 / (7 * 48)), "by the ranks of v1's Table 2"
    assert set(words("claims-text", [activations, parameters, spmd, pipedream]).values()) == {"identity"}
    assert set(words("growth", [of_ranks]).values()) == {"identity"}, "they follow by counting"


def test_every_network_of_the_zoo_trains_the_same_and_running_statistics_are_the_mini_batchs() -> None:
    assert list(trained.NETWORKS) == list(MODELS)
    networks, statistics = trained.trained()
    assert networks.value == 1, networks.what
    assert statistics.spread is not None
    assert (statistics.spread.low, statistics.spread.high) == pytest.approx((1, 1), abs=1e-12)
    found = record("claims-text", [networks, statistics])
    answers = cells([replace(found, case={"part": "trained", "table": "claims-text"})])
    assert {answer.question for answer in answers} == {"here"}
    assert [each.verdict for each in compare(answers, whole=())] == ["reproduced", "identity"]


def test_a_network_that_trains_to_other_weights_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "_weights", lambda name, num_stages: name == "unet" and num_stages > 1)
    networks = trained.networks()
    assert (networks.value, networks.what[-8:]) == (0.9, "not unet")
    assert words("claims-text", [networks]) == {(networks.row, networks.column): "below"}


# The experiment


def test_a_run_keeps_numbers_with_their_ranges() -> None:
    key = {"part": "as published", "table": "growth", "what": "growth"}
    outcome = EXPERIMENT.run(Case(key), RunOptions(profile="smoke"))
    (growth,) = quotients.growth()
    assert [quantity.value for quantity in outcome.quantities] == [
        growth.value,
        quotients.correlation().value,
    ]
    kept = record("growth", [growth])
    assert spread_of(kept, growth.row, growth.column) == growth.spread
    assert spread_of(kept, "another", growth.column) is None
    assert {entry.question for entry in cells([kept])} == {"as published"}


def test_a_smoke_run_leaves_out_what_takes_a_minute() -> None:
    short, smoke = (
        {c.key["table"] for c in EXPERIMENT.cases(RunOptions(profile=p))} for p in ("short", "smoke")
    )
    assert short - smoke == {"control-stride"}

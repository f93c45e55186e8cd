"""What follows without a run: the stride control, quotients of printed numbers, claims of write-ups."""

from __future__ import annotations

import pytest

from gpipe_bench.experiments.computed import quotients, stride, write_ups
from gpipe_bench.experiments.computed.answer import Answer, over, spread_of, to_details, to_quantities
from gpipe_bench.experiments.computed.experiment import EXPERIMENT, cells, tables
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.judging.compare import compare
from gpipe_bench.harness.judging.paper import load_paper
from gpipe_bench.harness.records.record import SCHEMA, Record

PUBLISHED = {(cell.source, *cell.key): cell for cell in load_paper()}


def record(table: str, answers: list[Answer], what: str = "") -> Record:
    """What a run of the case leaves."""
    return Record(
        schema=SCHEMA, experiment="computed", profile="short",
        case={"part": "as published", "table": table, "what": what or table}, status="done", reason="",
        quantities=to_quantities(answers), details=to_details(answers), environment={}, command="",
        started_at="", duration_s=0.0,
    )  # fmt: skip


def words(table: str, answers: list[Answer]) -> dict[tuple[str, str], str]:
    """Verdicts by row and column."""
    found = compare(cells([record(table, answers)]), whole=())
    return {(c.row, c.column): c.verdict for c in found}


def by_place(answers: list[Answer]) -> dict[tuple[str, str], Answer]:
    return {(answer.row, answer.column): answer for answer in answers}


def test_every_answer_has_a_row_of_the_papers_file() -> None:
    """By name: a row renamed in the file would otherwise end as a number that nobody printed."""
    cheap = [
        ("write-ups", write_ups.WRITE_UPS[name]()) for name in ("bubbles", "schedules", "memory", "speed")
    ]
    cheap += [("growth", quotients.growth()), ("transfer", quotients.error_rates())]
    for table, answers in cheap:
        for answer in answers:
            source = "write-up" if table == "write-ups" else "paper"
            assert (source, table, answer.row, answer.column) in PUBLISHED
    written = {cell.key[1:] for cell in PUBLISHED.values() if cell.source == "write-up"}
    assert len(written) == 24


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
    assert memory.value == pytest.approx(3.65)
    assert {part.what: (part.low, part.high) for part in memory.spread.parts} == {
        "moved_stride": (3.65, 3.75), "image_size": (3.65, pytest.approx(4.72)),
        "auxiliary_head": (3.6, 3.65),
    }  # fmt: skip
    assert parameters.value == pytest.approx(1.005)
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
    errors = by_place(quotients.error_rates())
    assert errors["CIFAR-10", "error rate"].value == pytest.approx(1.0)
    assert errors["CIFAR-100", "error rate"].value == pytest.approx(8.7)
    assert set(words("growth", [growth]).values()) == {"identity"}
    assert set(words("transfer", list(errors.values())).values()) == {"identity"}


def test_a_transformer_of_any_depth_is_counted_from_two() -> None:
    assert quotients.parameters_of("transformer", "naive-1") == quotients.parameters(
        "transformer-lm", {"num_layers": 3}
    )
    assert quotients.parameters_of("transformer", "pipeline-128") == pytest.approx(83.9e9, rel=1e-3)


# Write-ups


def test_bubbles_and_schedules_by_hand() -> None:
    found = by_place(write_ups.bubbles())
    for count in (4, 8, 32, 128):
        assert found["bubble", f"K=4, M={count}"].value == pytest.approx(300 / (count + 3))
    assert found["pipeline efficiency", "K=4, M=8"].value == pytest.approx(800 / 11)
    assert found["busy share of a device without pipelining", "K=8"].value == pytest.approx(12.5)
    rule = found["bubble at M >= 4K", "any K"].spread
    assert rule is not None
    assert (rule.low, rule.high) == (pytest.approx(100 / 9), pytest.approx(100 * 127 / 639))
    example = "4 GPUs, 8 micro-batches"
    ours = {
        row: answer.value
        for (row, column), answer in by_place(write_ups.schedules()).items()
        if column == example
    }
    assert ours == {
        "bubble of 1F1B over GPipe's": 1.0, "micro-batches in flight, 1F1B": 4,
        "micro-batches in flight, GPipe": 8, "activation memory of 1F1B over GPipe's": 0.5,
    }  # fmt: skip
    assert set(words("write-ups", write_ups.bubbles() + write_ups.schedules()).values()) == {"reproduced"}


def test_memory_and_speed_by_hand() -> None:
    (memory,) = write_ups.growth_of_memory()
    assert memory.spread == over("number of layers and of micro-batches", [1.0])
    speed, negligible = write_ups.speed()
    assert speed.spread is not None
    assert (speed.spread.low, speed.spread.high) == (pytest.approx(2 * 35 / 39), pytest.approx(2 * 33 / 35))
    found = words("write-ups", [memory, speed, negligible])
    assert list(found.values()) == ["reproduced", "undecided", "above"]


def test_a_recomputed_forward_is_a_third_of_the_step() -> None:
    """A little more: no gradient goes to the images or the tokens."""
    share = write_ups.recomputed_share("resnet101", {"image_size": 64})
    assert 1 / 3 < share < 0.35


def test_what_contradicts_the_paper_is_not_reproduced_and_says_so() -> None:
    answers = write_ups.counts()
    found = {c.row: c for c in compare(cells([record("write-ups", answers, "sizes")]), whole=())}
    assert found["parameters of the largest Transformer"].verdict == "below"
    assert any("83.9B took 128" in note for note in found["parameters of the largest Transformer"].footnotes)
    assert found["parameters of the image model"].verdict == "below"
    assert any("AmoebaNet-B" in note for note in found["parameters of the image model"].footnotes)
    assert found["size over GPT-2 XL's"].verdict == "above"
    assert found["parameters of the largest AmoebaNet"].verdict == "reproduced"


def test_a_very_large_transformer_sends_less_through_a_pipeline() -> None:
    (sent,) = write_ups.traffic()
    assert sent.spread is not None
    # 32 x 1024 x 2048 floats forward and back, over two times 7/8 of all gradients.
    passed = 2 * 32 * 1024 * 2048
    gradients = 2 * 7 / 8 * quotients.parameters_of("transformer", "pipeline-8")
    assert sent.value == pytest.approx(passed / gradients, rel=1e-3)
    assert sent.spread.high < 1


# The experiment


def test_every_number_answers_as_published_and_those_of_others_stand_apart() -> None:
    records = [record("write-ups", write_ups.schedules(), "schedules"), record("growth", quotients.growth())]
    entries = cells(records)
    assert {entry.question for entry in entries} == {"as published"}
    assert {entry.source for entry in entries} == {"paper", "write-up"}
    assert not any(PUBLISHED["write-up", *e.place].counted for e in entries if e.source == "write-up")
    text = tables(records, compare(entries, whole=()))
    of_paper, of_others = text.split("What others write about GPipe")
    assert "1 of 1 identity" in of_paper or "1 identity" in of_paper
    assert of_others.count("reproduced [") == 4


def test_a_run_keeps_numbers_with_their_ranges() -> None:
    outcome = EXPERIMENT.run(
        Case({"part": "as published", "table": "write-ups", "what": "bubbles"}), RunOptions(profile="smoke")
    )
    assert len(outcome.quantities) == 9
    kept = record("write-ups", write_ups.bubbles())
    assert spread_of(kept, "bubble at M >= 4K", "any K") == over(
        "number of stages", [100 * (k - 1) / (5 * k - 1) for k in range(2, 129)]
    )
    assert spread_of(kept, "bubble", "K=4, M=4") is None


def test_a_smoke_run_leaves_out_what_takes_a_minute() -> None:
    short, smoke = (
        {c.key["table"] for c in EXPERIMENT.cases(RunOptions(profile=p))} for p in ("short", "smoke")
    )
    assert short - smoke == {"control-stride"}

"""What takes no device: the stride control, and small networks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records import record

from gpipe_bench.experiments.paper import computed
from gpipe_bench.experiments.paper.computed import Computed, Size, cells, outcome
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.record import Record
from gpipe_bench.models import MODELS


def kept(table: str, answers: list[Computed]) -> Record:
    """What a run of the case leaves."""
    found, case = outcome(answers), {"part": "as published", "table": table, "what": table}
    return record(experiment="computed", case=case, metrics=found.metrics, details=found.details)


def words(table: str, answers: list[Computed]) -> dict[tuple[str, str], str]:
    """Verdicts by row and column."""
    part = "trained" if table == "claims-text" else "as published"
    of_part = replace(kept(table, answers), case={"part": part, "table": table})
    found = compare(cells([of_part]), whole=())
    return {(c.row, c.column): c.verdict for c in found}


# The stride control


def test_a_moved_stride_keeps_nearly_four_times_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every map but those behind the place has twice the side."""
    monkeypatch.setattr(computed, "NUM_FILTERS", 16)
    monkeypatch.setattr(computed, "NUM_LAYERS", 3)
    original = computed.size(67, False, None)
    moved = {
        place: computed.size(67, False, place) for place in ("second reduction cell", "last normal cell")
    }
    ratios = {place: size.activation_bytes / original.activation_bytes for place, size in moved.items()}
    assert 3 < ratios["second reduction cell"] < ratios["last normal cell"] < 4.3
    assert moved["second reduction cell"].num_parameters == original.num_parameters
    assert computed.size(67, True, None).num_parameters > original.num_parameters


def test_the_range_goes_over_everything_that_is_not_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def size(image_size: int, auxiliary_head: bool, moved_stride: str | None) -> Size:
        seen.append((image_size, auxiliary_head, moved_stride))
        if moved_stride is None:
            return Size(100.0, 1000)
        more = 10 * (moved_stride == "last normal cell") + image_size - 224 + 5 * auxiliary_head
        return Size(360.0 + more, 1000 + more)

    monkeypatch.setattr(computed, "size", size)
    memory, parameters = computed.stride()
    assert len(seen) == len(set(seen)) == 3 * 2 * 3
    assert memory.spread is not None
    assert memory.spread.combinations == 12
    assert (memory.spread.low, memory.spread.high) == (3.6, pytest.approx(3.6 + 0.1 + 1.07 + 0.05))
    assert memory.metric.value == pytest.approx(4.4), "299 pixels, the middle"
    assert {part.what: (part.low, part.high) for part in memory.spread.parts} == {
        "moved_stride": (4.4, 4.5), "image_size": (3.65, pytest.approx(4.72)), "auxiliary_head": (4.35, 4.4),
    }  # fmt: skip
    assert parameters.metric.value == pytest.approx(1.08)
    assert set(words("control-stride", [memory, parameters]).values()) == {"reproduced"}


# Small networks


def test_every_network_of_the_zoo_trains_the_same_and_running_statistics_are_the_mini_batchs() -> None:
    assert list(computed.NETWORKS) == list(MODELS)
    networks, statistics = computed.trained()
    assert networks.metric.value == 1, networks.metric.note
    assert statistics.spread is not None
    assert (statistics.spread.low, statistics.spread.high) == pytest.approx((1, 1), abs=1e-12)
    found = kept("claims-text", [networks, statistics])
    answers = cells([replace(found, case={"part": "trained", "table": "claims-text"})])
    assert {answer.question for answer in answers} == {"here"}
    assert [each.verdict for each in compare(answers, whole=())] == ["identity", "identity"]


# The experiment

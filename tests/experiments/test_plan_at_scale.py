"""The largest grids on paper: the best way of each grid, its record, its table and its figure."""

from __future__ import annotations

import pytest
from planning_models import costs_of, planned
from records import ran

from gpipe_bench.experiments.beyond.plan import on_paper
from gpipe_bench.experiments.beyond.plan.experiment import EXPERIMENT, figures, tables
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.pipeline import Link
from gpipe_bench.planner import Request, Space
from gpipe_bench.planner.request import ways
from gpipe_bench.planner.search import LOOKS, Search

TINY = on_paper.Scale(
    "a small one",
    on_paper.request_of(
        "h100", "nvlink", "infiniband", accelerators=4, memory_bytes=16 * 2**30, batch_size=4,
        optimizer="rmsprop", reserve_bytes=0,
    ),
    (1, 2), 1.0, (on_paper.Done("somebody", "somewhere", 2, 2, 1, "1f1b", 2, 3.0),),
)  # fmt: skip


def test_of_each_grid_it_is_the_best_of_all_its_ways() -> None:
    request = Request(accelerators=4, memory_bytes=2**40, batch_size=8, link=Link("near", 1e-4, 1e6))
    space = Space(schedules=("1f1b", "interleaved", "zb-h1"), tp=(1, 2), fewer=False)
    model = planned("divided")
    search = Search(costs_of(model), request, space, model.ties_over)
    every: dict[tuple[int, int], float] = {}
    for way in ways(request, space, search.costs.num_layers):
        found = search.best_of(way, LOOKS)
        if found is not None:
            grid = (way.grid.pp, way.grid.tp)
            every[grid] = min(every.get(grid, float("inf")), found.step_s)
    best = on_paper.best_of_each_grid(search)
    assert {grid: each.step_s for grid, each in best.items()} == pytest.approx(every, rel=0.05)
    assert set(every) == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)}
    assert search.skipped > 0


def test_a_case_is_recorded_shown_and_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(on_paper.SCALES, "transformer-4", TINY)
    found = ran(EXPERIMENT, {"part": on_paper.AT_SCALE, "model": "transformer-4"})
    assert {each.provenance for each in found.metrics} == {"modelled"}
    assert all(each.low < each.value < each.high for each in found.metrics)  # type: ignore[operator]
    steps = [each for each in found.metrics if each.name == on_paper.STEP]
    assert all(each.key["dp"] * each.key["tp"] * each.key["K"] == 4 for each in steps)  # type: ignore[operator]
    (theirs,) = (each for each in found.metrics if each.name == on_paper.THEIRS)
    (same,) = (each for each in steps if each.key["tp"] == 1 and each.key["K"] == 2)
    assert theirs.key == {"name": "somebody", "dp": 2, "tp": 1, "K": 2}
    assert same.value <= theirs.value  # type: ignore[operator]
    line = next(line for line in tables([found]).splitlines() if line.startswith("somebody "))
    assert " ".join(line.split()).startswith("somebody 2 2, 2 of them ZeRO-2 1 1f1b 2 2/2 ")
    assert line.split()[-2] == "3.0"
    (plot,) = figures([found])
    assert plot.name == "plan-at-scale"
    (axes,) = plot.draw().axes
    assert axes.get_legend_handles_labels()[1] == ["tp 1", "tp 2", "others, predicted", "others, measured"]


def test_every_published_step_says_what_it_was() -> None:
    found = on_paper.steps()
    assert len({step.name for step in found}) == len(found) >= 8
    for step in found:
        assert step.source
        assert step.differs
        assert step.pp * step.dp * step.fsdp * step.tp == step.accelerators
        assert step.batch_size % (step.dp * step.fsdp * step.num_microbatches) == 0
        assert bool(step.speed) != bool(step.step_s)


@pytest.mark.parametrize(
    ("name", "measured_s", "step_s"),
    [
        ("Llama 3 8B, 8 H100, FSDP", 2.843, 2.98),
        ("Llama 2 13B, 64 A100, FSDP", 3.789, 3.74),
        ("GPT-3 22B, 8 A100, TP", 1.42, 1.47),
    ],
)
def test_a_published_step_is_predicted(name: str, measured_s: float, step_s: float) -> None:
    (step,) = (each for each in on_paper.steps() if each.name == name)
    middle_s, low_s, high_s = step.predicted()
    assert step.measured_s == pytest.approx(measured_s, rel=1e-3)
    assert middle_s == pytest.approx(step_s, rel=0.02)
    assert low_s < step.measured_s < high_s < 1.6 * low_s


def test_published_steps_are_recorded_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    few = on_paper.steps()[:2]
    monkeypatch.setattr(on_paper, "steps", lambda: few)
    ranges = iter([(few[0].measured_s, 2.0, 3.0), (9.0, 8.0, 12.0)])
    monkeypatch.setattr(on_paper.Step, "predicted", lambda step: next(ranges))
    found = ran(EXPERIMENT, {"part": on_paper.PUBLISHED_STEPS})
    assert [each.value for each in found.metrics] == [few[0].measured_s, 9.0]
    text = tables([found])
    assert "1 of 2 inside, the widest range a factor of 1.50; asked: 75% of them, and at most 1.6: NO" in text
    assert figures([found]) == []


@pytest.mark.parametrize(("profile", "number"), [("smoke", 0), ("short", 3)])
def test_smoke_leaves_it_out(profile: str, number: int) -> None:
    options = RunOptions(profile=profile)
    assert (
        sum(
            case.key["part"] in (on_paper.AT_SCALE, on_paper.PUBLISHED_STEPS)
            for case in EXPERIMENT.cases(options)
        )
        == number
    )

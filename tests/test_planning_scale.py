"""What makes searches of large grids quick: each short cut against the long way."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from planning_models import costs_of, planned, tied

from gpipe_bench.pipeline.memory.profile import ModelProfile, Profiler
from gpipe_bench.pipeline.memory.stages.footprint import footprint
from gpipe_bench.pipeline.memory.stages.grids import Sharing, held_stage
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.schedules.known import NAMED, named
from gpipe_bench.planner import footprints as rows
from gpipe_bench.planner.bounds import Equals, by_memory_s, graphs_of
from gpipe_bench.planner.footprints import Footprints
from gpipe_bench.planner.grids import Grid
from gpipe_bench.planner.layer_times import REMATS
from gpipe_bench.planner.models import Model
from gpipe_bench.planner.quick import QuickSteps
from gpipe_bench.planner.request import Request
from gpipe_bench.planner.search import Search
from gpipe_bench.planner.space import Space, Way, ways

REQUEST = Request(accelerators=4, memory_bytes=2**40, batch_size=8, link=Link("near", 1e-4, 1e6))


def deep(layers: int = 71) -> tuple[Model, ModelProfile]:
    """A model with a row of `layers` - 2 equal layers, and its profile, which is that of a few."""
    model = planned("tied")
    profiler = Profiler(split_backward=True, ties_apart=True)
    few = ModelProfile(*profiler.model(tied()[0], model.loss_fn, model.inputs, model.target))
    first, equal, last = few.layers[0], few.layers[1], few.layers[-1]
    return model, ModelProfile((first, *[equal] * (layers - 2), last), few.loss)


@pytest.mark.parametrize(
    "sharing",
    [Sharing(), Sharing(3), Sharing(1, 2, 2), Sharing(2, 4, 3)],
    ids=["one", "dp", "zero2", "zero3"],
)
def test_rows_of_equal_layers_hold_what_layer_by_layer_they_do(sharing: Sharing) -> None:
    _, profile = deep()
    known, count = Footprints(profile), len(profile.layers)
    for start, stop in ((0, 9), (0, 50), (0, 71), (1, 12), (3, 36), (5, 66), (1, 70), (20, 71), (66, 71)):
        loss = profile.loss if stop == count else None
        assert known.of(range(start, stop), sharing) == held_stage(profile.layers[start:stop], loss, sharing)


def test_a_row_is_read_off_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    _, profile = deep()
    lengths: list[int] = []

    def counted(layers: tuple[object, ...], loss: object) -> object:
        lengths.append(len(layers))
        return footprint(layers, loss)  # type: ignore[arg-type]

    monkeypatch.setattr(rows, "footprint", counted)
    known = Footprints(profile)
    for stop in range(18, 60):
        known.whole(range(1, stop))
    assert sorted(lengths) == [16, 17, 64]


def test_a_row_that_is_no_line_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _, profile = deep()

    def curved(layers: tuple[object, ...], loss: object) -> object:
        found = footprint(layers, loss)  # type: ignore[arg-type]
        return replace(found, saved_bytes=len(layers) ** 2)

    monkeypatch.setattr(rows, "footprint", curved)
    known = Footprints(profile)
    assert [known.whole(range(1, 1 + n)).saved_bytes for n in (5, 20, 41)] == [25, 400, 41**2]


def test_what_fits_is_what_the_memory_says() -> None:
    """Whatever is known beforehand of weights and graphs."""
    request = Request(accelerators=2, memory_bytes=1, batch_size=8, link=Link("near", 1e-4, 1e6))
    model = planned("tied")
    search = Search(costs_of(model), request, Space(), model.ties)
    answers = set()
    for name, grid in product(("interleaved", "zb-v", "1f1b"), (Grid(2), Grid(2, 2), Grid(2, 1, 2, 2))):
        per_worker = NAMED[name].stages_per_worker or 2
        way = Way(grid, name, per_worker, 4, 2)
        room, stages = search.parts.room(way), 2 * per_worker
        cut = tuple(range(a, b) for a, b in pairwise((0, *range(3, 2 + stages), 8)))
        for worker in range(2):
            mine = [cut[stage] for stage in search.parts.schedule(way).stages_of(worker)]
            for remat in product(REMATS, repeat=per_worker):
                peak = room.memory(worker, tuple(mine), remat).peak
                for cap in (peak - 1, peak, peak // 2, 2 * peak):
                    fits = room.fits(worker, tuple(mine), remat, cap)
                    assert fits == (peak <= cap)
                    answers.add(fits)
    assert answers == {False, True}


def test_a_bound_is_below_every_step_and_knows_what_cannot_fit() -> None:
    model = planned("divided")
    hopeless = fitting = 0
    for cap in (4_500, 9_000, 12_000):
        request = replace(REQUEST, memory_bytes=cap, optimizer="sgd")
        search = Search(costs_of(model), request, Space(tp=(1, 2)), model.ties)
        for way in ways(request, search.space, search.costs.num_layers):
            bound_s, found = search.bound_s(way), search.best_of(way, 1000)
            hopeless += bound_s == float("inf")
            if found is not None:
                fitting += 1
                assert bound_s <= found.step_s * (1 + 1e-9)
    assert hopeless
    assert fitting


def test_what_memory_leaves_by_hand() -> None:
    """Eight layers of 3 s under 1F1B, of which a worker has room for four graphs. The first keeps two of each
    layer: four layers fit if they are recomputed, 1 s each. The last keeps one.
    """
    way = Way(Grid(2), "1f1b", 1, 4, 1)
    layers, graphs = Equals(8, 3.0, 1.0, 0.0, 0.0, 1.0), graphs_of(named("1f1b", 2, 4))
    assert by_memory_s(way, layers, graphs, 4, REMATS[::2], 48.0) == pytest.approx(4 * 4 * 4, rel=2e-4)
    assert by_memory_s(way, layers, graphs, 4, ("never",), 48.0) == float("inf")
    assert by_memory_s(way, layers, graphs, 16, ("never",), 55.0) == 55.0


@pytest.mark.parametrize("name", sorted(set(NAMED) - {"naive"}))
def test_more_micro_batches_keep_no_fewer_graphs(name: str) -> None:
    per_worker = NAMED[name].stages_per_worker or 2
    for workers in (2, 3, 5):
        few = graphs_of(named(name, workers, 2 * workers, stages_per_worker=per_worker))
        for count in range(2 * workers, 5 * workers * per_worker, 3):
            many = graphs_of(named(name, workers, count, stages_per_worker=per_worker))
            assert all(a <= b and c <= d for (a, c), (b, d) in zip(few, many, strict=True))


def test_graphs_by_hand() -> None:
    """1F1B of two workers: the first keeps two graphs, from the first forward on; the last one keeps one."""
    assert graphs_of(named("1f1b", 2, 4)) == ((2, 2), (1, 1))
    assert graphs_of(named("gpipe", 2, 4)) == ((4, 0), (4, 0))


def test_rows_that_wait_for_each_other_are_refused() -> None:
    row = (Action(0, Kind.F, 0), Action(0, Kind.B, 0))
    other = (Action(1, Kind.B, 0), Action(1, Kind.F, 0))
    with pytest.raises(ValueError, match="1B0 waits for 1F0"):
        QuickSteps(Schedule("circle", 2, 1, "never", (row, other)))

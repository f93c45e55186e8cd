"""Tests the planner's search: its step time against all candidates, its bytes against the memory model."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from planning_models import costs_of, planned

from gpipe_bench.pipeline import (
    LINKS,
    Link,
    Transport,
    bytes_of_stages,
    grid_peak_bytes,
    named,
    pipeline_memory,
)
from gpipe_bench.pipeline.memory.grids import Sharing, shared_stage
from gpipe_bench.pipeline.memory.workers import shared_weights
from gpipe_bench.planner import Request, Space, link_named, link_within, plan
from gpipe_bench.planner.candidate import Grid, Way
from gpipe_bench.planner.request import Topology, ways
from gpipe_bench.planner.search import Search
from gpipe_bench.planner.steps import Cut

NEAR, FAR = Link("near", 1e-4, 1e6), Link("far", 1e-3, 1e5)
TWO = Request(accelerators=2, memory_bytes=2**40, batch_size=16, link=NEAR)
REQUEST = Request(accelerators=4, memory_bytes=2**40, batch_size=16, link=NEAR)


def search_of(request: Request = REQUEST, space: Space | None = None, name: str = "plain") -> Search:
    model = planned(name)
    return Search(costs_of(model), request, space or Space(), model.ties_over)


@pytest.mark.parametrize("names", [("1f1b",), ("zb-v",)])
@pytest.mark.parametrize("cap", [2**40, 30_000])
def test_what_is_found_fits_and_is_close_to_the_best_of_all(cap: int, names: tuple[str, ...]) -> None:
    request = replace(REQUEST, memory_bytes=cap, optimizer="sgd", batch_size=4)
    search = search_of(request, Space(schedules=names, remats=("never", "always")))
    found, best_s = search.run(), float("inf")
    for way in ways(request, search.space, 6):
        room = search.room(way)
        homes = [room.schedule.stages_of(worker) for worker in range(way.grid.pp)]
        for inner in combinations(range(1, 6), way.num_stages - 1):
            cut = tuple(range(a, b) for a, b in pairwise((0, *inner, 6)))
            for remat in product(("never", "always"), repeat=len(cut)):
                if max(each.peak for each in room.counted(cut, remat)) <= cap:
                    best_s = min(best_s, search.step_s(way.candidate(cut, remat)))
    assert bool(found) == (best_s < float("inf")), homes
    if found:
        assert found[0].step_s <= 1.1 * best_s
        assert [each.step_s for each in found] == sorted(each.step_s for each in found)
        assert all(each.peak <= cap for each in found)
        assert all(each.candidate.grid.accelerators in (1, 2, 4) for each in found)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved", "gpipe"])
@pytest.mark.parametrize("remat", ["never", "always", "mixed"])
def test_a_workers_bytes_are_those_of_the_memory_model(name: str, remat: str) -> None:
    search = search_of(TWO, Space(schedules=(name,)))
    way = next(w for w in ways(TWO, search.space, 6) if w.grid.pp == 2 and w.num_microbatches == 4)
    stages = way.num_stages
    cut = tuple(range(a, b) for a, b in pairwise([0, *range(2, stages + 1), 6]))
    choice = tuple(
        ("never", "except_last", "always")[stage % 3] if remat == "mixed" else remat
        for stage in range(stages)
    )
    found = search.found(way, Cut(cut, choice, 1.0))
    profile = planned("plain").profile_of(way.microbatch_size, "float32", split_backward=True)
    as_engine, one_ahead = (
        pipeline_memory(
            profile.layers, profile.loss, cut,
            named(name, 2, 4, remat=choice, stages_per_worker=way.stages_per_worker), "adam",
            receive_ahead=ahead,
        )
        for ahead in (Transport(), 1)
    )  # fmt: skip
    assert way.grid == Grid(2, 1)
    assert [each.peak for each in found.memory] == [each.peak for each in as_engine]
    assert [each.when for each in found.memory] == [each.when for each in one_ahead]


@pytest.mark.parametrize("shared", ["tied", "frozen"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize(("name", "workers"), [("1f1b", 1), ("gpipe", 2), ("1f1b", 2), ("zb-v", 2)])
def test_a_tied_weight_takes_what_the_memory_model_says(
    name: str, workers: int, remat: str, optimizer: str, shared: str
) -> None:
    """A worker has the weight and its state once, a gradient per use, and one that the other owner sends."""
    request = replace(TWO, accelerators=workers, batch_size=8, optimizer=optimizer)
    search = search_of(request, Space(schedules=(name,)), shared)
    way = next(
        w
        for w in ways(request, search.space, 8)
        if w.grid == Grid(workers) and w.num_microbatches == 4 and w.schedule == name
    )
    bounds = [0, *range(3, 2 + way.num_stages), 8] if way.num_stages > 1 else [0, 8]
    cut = tuple(range(a, b) for a, b in pairwise(bounds))
    found = search.found(way, Cut(cut, (remat,) * len(cut), 1.0))
    model = planned(shared)
    profile = model.profile_of(way.microbatch_size, "float32", split_backward=way.splits)
    expected = pipeline_memory(
        profile.layers, profile.loss, cut,
        named(name, workers, 4, remat=remat, stages_per_worker=way.stages_per_worker), optimizer,
        receive_ahead=Transport() if workers > 1 else 0, ties=shared_weights(model.layers),
    )  # fmt: skip
    assert [each.peak for each in found.memory] == [each.peak for each in expected]


@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(2, 1, 2, 2), Grid(2, 1, 2, 3)])
def test_on_a_grid_bytes_are_enough_and_at_most_a_fifth_too_many(grid: Grid) -> None:
    search = Search(costs_of(planned("tied")), REQUEST, Space())
    way, cut = Way(grid, "1f1b", 1, 4, 2), (range(4), range(4, 8))
    found = search.found(way, Cut(cut, ("never", "always"), 1.0))
    profile = planned("tied").profile_of(2, "float32", split_backward=False)
    sharing = Sharing(grid.dp, grid.fsdp, grid.fsdp_level or 2)
    stages = [shared_stage(each, sharing) for each in bytes_of_stages(*profile, cut)]
    schedule = named("1f1b", 2, 4, remat=("never", "always"))
    exact = grid_peak_bytes(stages, schedule, "adam", receive_ahead=Transport())
    for mine, least in zip(found.memory, exact, strict=True):
        assert least <= mine.peak <= 1.2 * least


def test_ways_are_left_out_only_where_they_take_longer_than_what_is_kept() -> None:
    search = search_of()
    found = search.run(kept=3)
    every = list(ways(REQUEST, search.space, 6))
    assert len(found) == 3
    assert search.skipped > 0
    assert search.tried + search.skipped == len(every)
    assert all(
        search.about_s(way) <= each.step_s
        for way in every
        if way.grid.fsdp == 1 and (each := search.best_of(way))
    )


def test_links_by_what_people_call_them() -> None:
    assert link_named("nvlink", "h100") is LINKS["nvlink4"]
    assert link_named("nvlink", "A100-80GB") is LINKS["nvlink3"]
    assert link_named("infiniband", "v100") is LINKS["infiniband-edr"]
    assert link_named("nvlink2", "h100") is LINKS["nvlink2"]
    assert link_within("h100") is LINKS["nvlink4"]
    assert [link_within(card) for card in ("a10", "l40s", "rtx4090", "p100")] == [
        *[LINKS["pcie4-host"]] * 3,
        LINKS["pcie3-host"],
    ]


def test_what_sends_most_is_nearest() -> None:
    request = Request(accelerators=8, memory_bytes=1, batch_size=8, link=NEAR, between=FAR, hosts=2, cards=4)
    grid = Topology(request, Grid(2, 2, tp=2))
    assert (grid.boundaries((0, 1)), grid.ring("dp"), grid.ring("tp")) == ((FAR,), NEAR, NEAR)
    grid = Topology(replace(request, cards=2), Grid(4, 2))
    assert grid.boundaries((0, 1, 2, 3)) == (NEAR, FAR, NEAR)
    assert grid.describe() == "pp 0-1 2-3 near, pp 1-2 far, dp near"
    request = replace(request, cards=1)
    assert Topology(request, Grid(1, 8)).ring("dp") == FAR
    inside = Topology(replace(request, cards=4), Grid(1, 2, 4, 2))
    assert (inside.ring("dp"), inside.ring("fsdp")) == (FAR, NEAR)
    assert Topology(request, Grid(1, 1, 4, 2)).ring("fsdp") == NEAR  # inside the first host
    one = Topology(replace(request, hosts=1), Grid(2, 4))
    assert one.boundaries((0, 1, 1, 0)) == (NEAR, NEAR, NEAR)


@pytest.mark.parametrize(
    ("cards", "grid", "ring", "share"),
    [(8, Grid(1, 1, 16, 3), "fsdp", 8), (1, Grid(1, 1, 16, 3), "fsdp", 1), (8, Grid(1, 2, 1, tp=8), "dp", 1),
     (1, Grid(1, 2, tp=8), "dp", 1 / 8), (4, Grid(1, 2, 8, 3), "dp", 1 / 2)],
)  # fmt: skip
def test_rings_over_hosts_share_the_cards_of_each(cards: int, grid: Grid, ring: str, share: float) -> None:
    """One ring over all of a host's accelerators has all of its cards, eight rings have an eighth each."""
    request = Request(
        accelerators=16, memory_bytes=1, batch_size=16, link=NEAR, between=FAR, hosts=2, cards=cards
    )
    found = Topology(request, grid).ring(ring)
    assert found.bandwidth_bytes_per_s == share * FAR.bandwidth_bytes_per_s


def test_where_layers_are_timed_messages_and_sums_take_what_was_measured() -> None:
    """Loopback stands for what connects this machine's processes; a link that was named is kept."""
    model = planned("plain", 8)
    link, slow = Link("measured", 1e-5, 1e9, source="test"), Link("sums", 1e-3, 1e4, source="test")
    costs = replace(costs_of(model, (2, 4, 8)), link=link, sum_link=slow)
    asked = Request(accelerators=2, memory_bytes=2**30, batch_size=8, link=LINKS["loopback"])
    space, other = Space(sharded=False), LINKS["nvlink4"]
    here = plan(model, asked, space=space, costs=costs)
    assert here.request.link == link
    assert here.best.candidate.grid.dp == 1  # sums are dear
    without = plan(model, asked, space=space, costs=replace(costs, sum_link=None))
    assert without.best.candidate.grid.dp == 2
    named_one = plan(model, replace(asked, link=other), space=space, costs=costs)
    assert named_one.request.link == other
    assert named_one.best.candidate.grid.dp == 2

"""Cuts by the step that a schedule makes of them: against all cuts, one by one, laid out by the replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused

from gpipe_bench.pipeline import FREE, NAMED, Action, Kind, Link, Schedule, named, replay
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.planner import Costs, Request
from gpipe_bench.planner.candidate import REMATS, Grid
from gpipe_bench.planner.collectives import Collectives
from gpipe_bench.planner.costs import SizeCosts
from gpipe_bench.planner.cuts import AloneBound, best_cut
from gpipe_bench.planner.request import Topology
from gpipe_bench.planner.steps import LayerTimes, QuickSteps

SLOW = Link("slow", 0.25, 4.0)
RING = Link("ring", 0.25, 2**21)
SECONDS = st.integers(0, 8).map(lambda number: number / 4)
SINGLE = [name for name, each in NAMED.items() if each.stages_per_worker == 1]
TWICE = ["interleaved", "breadth-first", "zb-v", "v-half", "dualpipe-v"]


def replayed_s(
    schedule: Schedule, times: LayerTimes, cut: Partition, remat: tuple[str, ...], link: Link
) -> float:
    """The step by the replay, which knows no step with recomputation on some stages: there R is a part of the
    backward that need not wait for the gradient, as a stage's own forward of no length elsewhere.
    """
    count = schedule.num_microbatches
    rows = tuple(
        tuple(
            each
            for action in row
            for each in (
                (Action(action.stage, Kind.R, action.microbatch), action)
                if action.kind in (Kind.B, Kind.I)
                else (action,)
            )
        )
        for row in schedule.actions
    )
    takes = [times.stage(stage.start, stage.stop) for stage in cut]

    def seconds(action: Action) -> float:
        stage = takes[action.stage]
        again = {"never": 0, "except_last": count - 1, "always": count}[remat[action.stage]]
        return {
            Kind.F: stage.forward_s,
            Kind.R: stage.again_s if action.microbatch < again else 0.0,
            Kind.B: stage.backward_s,
            Kind.I: stage.inputs_s,
            Kind.W: stage.weights_s,
        }[action.kind]

    messages = [times.message(stage.start) for stage in cut[1:]]
    return replay(
        replace(schedule, remat="always", actions=rows), seconds, link,
        activation_bytes=[ahead for ahead, _ in messages], gradient_bytes=[back for _, back in messages],
        update_s=[stage.after_s for stage in takes],
        reductions=[stage.buckets for stage in takes], gathers=[stage.gathers for stage in takes],
    ).makespan_s  # fmt: skip


def all_cuts(layers: int, stages: int) -> Iterator[Partition]:
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(range(a, b) for a, b in pairwise((0, *inner, layers)))


@st.composite
def cases(draw: st.DrawFn, names: list[str], per_worker: int) -> tuple[Schedule, LayerTimes, Link, object]:
    workers = draw(st.integers(1, 3 if per_worker == 1 else 2))
    schedule = named(draw(st.sampled_from(names)), workers, draw(st.integers(1, 4)))
    stages = schedule.num_stages
    layers = draw(st.integers(stages, stages + 3))
    split = any(action.kind is Kind.W for action in schedule)

    def each(number: int) -> list[float]:
        return draw(st.lists(SECONDS, min_size=number, max_size=number))

    forward_s, backward_s = each(layers), each(layers)
    inputs_s, weights_s = (each(layers), each(layers)) if split else ((), ())
    levels = [None, 0, 2] if split else [None, 0, 2, 3]
    level = draw(st.sampled_from(levels))
    collectives = None
    if level is not None:
        halves = {"I": inputs_s, "W": weights_s} if split else {}
        costs = Costs(
            sizes={1: SizeCosts(layers_s={"F": forward_s, "B": backward_s, **halves})},
            parameter_bytes=[
                draw(st.lists(st.integers(0, 8).map(lambda size: size * 2**19), max_size=3))
                for _ in range(layers)
            ],
        )
        grid = Grid(workers, fsdp=2, fsdp_level=level) if level else Grid(workers, dp=2)
        request = Request(accelerators=2 * workers, memory_bytes=2**30, batch_size=8, link=RING)
        near = Topology(request, grid)
        collectives = Collectives(grid, near, costs, 1, split=split, ahead=draw(st.booleans()))
    times = LayerTimes(
        forward_s, backward_s, inputs_s, weights_s,
        each(layers - 1), each(layers - 1), each(layers), each(layers),
        draw(st.sampled_from([{}, {"F": 0.5, "B": 0.25, "R": 1.0, "I": 0.5, "W": 0.25}])), collectives,
    )  # fmt: skip
    bytes_of = draw(st.lists(st.integers(1, 4), min_size=layers, max_size=layers))
    cap = draw(st.integers(2, 3 * sum(bytes_of)))

    def fits(worker: int, mine: tuple[range, ...], remat: tuple[str, ...]) -> bool:
        kept = {"never": 3, "except_last": 2, "always": 1}
        held = sum(kept[what] * sum(bytes_of[i] for i in mine[n]) for n, what in enumerate(remat))
        return held <= cap + worker

    return schedule, times, draw(st.sampled_from([FREE, SLOW])), fits


def by_brute_force(case: tuple[Schedule, LayerTimes, Link, object]) -> float:
    schedule, times, link, fits = case
    best_s = float("inf")
    homes = [schedule.stages_of(worker) for worker in range(schedule.num_workers)]
    for cut in all_cuts(times.num_layers, schedule.num_stages):
        for remat in product(REMATS, repeat=schedule.num_stages):
            if all(
                fits(w, tuple(cut[s] for s in mine), tuple(remat[s] for s in mine))  # type: ignore[operator]
                for w, mine in enumerate(homes)
            ):
                best_s = min(best_s, replayed_s(schedule, times, cut, remat, link))
    return best_s


def check(case: tuple[Schedule, LayerTimes, Link, object]) -> None:
    schedule, times, link, fits = case
    links = [link] * (schedule.num_stages - 1)
    found = best_cut(schedule, times, links=links, fits=fits)  # type: ignore[arg-type]
    best_s = by_brute_force(case)
    if found is None:
        assert best_s == float("inf")
        return
    assert found.step_s == pytest.approx(best_s, rel=1e-9, abs=1e-9)
    assert found.bound_s >= found.step_s
    assert replayed_s(schedule, times, found.stages, found.remat, link) == pytest.approx(found.step_s)


@settings(max_examples=200)
@given(cases(SINGLE, 1))
def test_no_cut_is_better_where_each_worker_has_a_stage(
    case: tuple[Schedule, LayerTimes, Link, object],
) -> None:
    check(case)


@settings(max_examples=40)
@given(cases(TWICE, 2))
def test_no_cut_is_better_where_each_worker_has_two(case: tuple[Schedule, LayerTimes, Link, object]) -> None:
    check(case)


@settings(max_examples=40)
@given(cases([*SINGLE, "interleaved"], 1))
def test_without_effort_the_bound_still_holds(case: tuple[Schedule, LayerTimes, Link, object]) -> None:
    schedule, times, link, fits = case
    links = [link] * (schedule.num_stages - 1)
    found = best_cut(schedule, times, links=links, fits=fits, effort=1)  # type: ignore[arg-type]
    if found is not None:
        best_s = by_brute_force(case)
        assert found.bound_s <= best_s * (1 + 1e-9) + 1e-9
        assert found.step_s >= best_s * (1 - 1e-9) - 1e-9


@settings(max_examples=40)
@given(cases(SINGLE, 1))
def test_a_stage_alone_bounds_every_step_that_has_it(
    case: tuple[Schedule, LayerTimes, Link, object],
) -> None:
    schedule, times, link, _ = case
    bounds = AloneBound(schedule, times, [link] * (schedule.num_stages - 1))
    for cut in all_cuts(times.num_layers, schedule.num_stages):
        remat = tuple(REMATS[stage % 3] for stage in range(len(cut)))
        step_s = replayed_s(schedule, times, cut, remat, link)
        for stage, layers in enumerate(cut):
            for messages in (True, False):
                least_s = bounds.least_s(stage, layers.start, layers.stop, remat[stage], messages=messages)
                assert least_s <= step_s * (1 + 1e-9) + 1e-9


def test_a_layer_without_parameters_gathers_nothing() -> None:
    """Neither in a step nor in what a step takes at least."""
    nothing = (0.0,) * 3
    costs = Costs(sizes={1: SizeCosts(layers_s={"F": nothing, "B": nothing})}, parameter_bytes=[(), (), ()])
    request = Request(accelerators=2, memory_bytes=2**30, batch_size=2, link=RING)
    grid = Grid(1, fsdp=2, fsdp_level=3)
    shared = Collectives(grid, Topology(request, grid), costs, 1, split=False, ahead=True)
    times = LayerTimes(nothing, nothing, collectives=shared)
    assert times.stage(0, 3).forward_s == times.at_least(0, 3).forward_s == times.ahead_s(3) == 0


def test_sixty_four_stages_of_a_thousand_layers_are_better_than_even_ones() -> None:
    forward = [0.2, *(1.0 + 0.5 * (layer % 3) for layer in range(998)), 9.0]
    times = LayerTimes(forward, [2 * each for each in forward], activation_bytes=[1.0] * 999)
    schedule = named("1f1b", 64, 64)
    links = [Link("link", 0.01, 10.0)] * 63
    found = best_cut(schedule, times, links=links)
    assert found is not None
    even = tuple(range(round(k * 1000 / 64), round((k + 1) * 1000 / 64)) for k in range(64))
    even_s = QuickSteps(schedule, links).makespan_s(
        [times.stage(each.start, each.stop) for each in even],
        ["never"] * 64,
        [times.message(each.start) for each in even[1:]],
    )
    assert found.bound_s <= found.step_s < even_s
    assert found.step_s < 1.05 * found.bound_s


def test_only_what_must_is_recomputed() -> None:
    """Under 1F1B the first stage keeps three graphs and the last one: room for two each."""
    times = LayerTimes([1.0] * 6, [2.0] * 6, again_s=[1.5] * 6)

    def fits(worker: int, stages: tuple[range, ...], remat: tuple[str, ...]) -> bool:
        graphs = 1 if remat[0] == "always" else 3 - worker
        return graphs * len(stages[0]) <= 4

    found = best_cut(named("1f1b", 3, 6), times, fits=fits)
    assert found is not None
    assert (found.remat[1:], found.remat[0]) == (("never", "never"), "always")
    assert best_cut(named("1f1b", 3, 6), times, fits=lambda *_: False) is None


def test_rows_that_wait_for_each_other_are_refused() -> None:
    row = (Action(0, Kind.F, 0), Action(0, Kind.B, 0))
    other = (Action(1, Kind.B, 0), Action(1, Kind.F, 0))
    with refused(ValueError):
        QuickSteps(Schedule("circle", 2, 1, "never", (row, other)))

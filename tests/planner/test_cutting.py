"""Tests `best_cut`: its step time against the replay, and its result against all other cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.pipeline import FREE, NAMED, Action, Kind, Link, Schedule, named, replay
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.planner.costs import SizeCosts
from gpipe_bench.planner.steps import LayerTimes, LongSteps, QuickSteps, StageTimes, best_cut

SLOW = Link("slow", 0.25, 4.0)
SECONDS = st.integers(0, 8).map(lambda number: number / 4)
SINGLE = [name for name, each in NAMED.items() if each.stages_per_worker == 1]
TWO_STAGES_PER_WORKER = ["interleaved", "breadth-first", "zb-v", "v-half", "dualpipe-v"]


def replayed_s(
    schedule: Schedule, times: LayerTimes, cut: Partition, remat: tuple[str, ...], link: Link
) -> float:
    """Step time by the replay. The replay knows no recomputation on some stages alone, so every row gets an R
    before each backward; it takes no time on stages that recompute nothing.
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
    takes = [times.stage(span.start, span.stop, each) for span, each in zip(cut, remat, strict=True)]

    def seconds(action: Action) -> float:
        stage = takes[action.stage]
        again = {"except_last": count - 1, "always": count}.get(remat[action.stage], 0)
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

    kinds = {kind: each(layers) for kind in ("F", "R", "B", *("IW" * split))}
    kinds |= {"B blocks": [b + f for b, f in zip(kinds["B"], kinds["F"], strict=True)]}
    if split:
        kinds |= {"I blocks": [b + f for b, f in zip(kinds["I"], kinds["F"], strict=True)]}
    size = SizeCosts(
        layers_s=kinds, activation_bytes=each(layers - 1), gradient_bytes=each(layers - 1),
        action_s=draw(st.sampled_from([{}, {"F": 0.5, "B": 0.25, "R": 1.0, "I": 0.5, "W": 0.25}])),
    )  # fmt: skip
    times = LayerTimes(size, each(layers))
    bytes_of = draw(st.lists(st.integers(1, 4), min_size=layers, max_size=layers))
    cap = draw(st.integers(2, 3 * sum(bytes_of)))

    def fits(worker: int, mine: tuple[range, ...], remat: tuple[str, ...]) -> bool:
        kept = {"never": 4, "except_last": 3, "always": 2, "blocks": 1}
        held = sum(kept[what] * sum(bytes_of[i] for i in mine[n]) for n, what in enumerate(remat))
        return held <= cap + worker

    return schedule, times, draw(st.sampled_from([FREE, SLOW])), fits


REMATS = ("never", "except_last", "always", "blocks")


@settings(max_examples=150)
@given(st.one_of(cases(SINGLE, 1), cases(TWO_STAGES_PER_WORKER, 2)))
def test_a_cut_fits_and_takes_what_the_replay_says(case: tuple[Schedule, LayerTimes, Link, object]) -> None:
    """With one stage on each worker, a cut is found wherever one fits."""
    schedule, times, link, fits = case
    steps = QuickSteps(schedule, [link] * (schedule.num_stages - 1))
    found = best_cut(schedule, times, steps.makespan_s, fits=fits, remats=REMATS, looks=20)  # type: ignore[arg-type]
    homes = [schedule.stages_of(worker) for worker in range(schedule.num_workers)]

    def room(cut: Partition, remat: tuple[str, ...]) -> bool:
        return all(
            fits(w, tuple(cut[s] for s in mine), tuple(remat[s] for s in mine))  # type: ignore[operator]
            for w, mine in enumerate(homes)
        )

    if found is not None:
        assert room(found.stages, found.remat)
        assert replayed_s(schedule, times, found.stages, found.remat, link) == pytest.approx(found.step_s)
        plain = partial(best_cut, schedule, times, steps.makespan_s, fits=fits, remats=REMATS)  # type: ignore[arg-type]
        first = plain()
        assert first is not None
        assert plain(below_s=1.000001 * first.step_s + 1e-6) == first
        assert plain(below_s=0.0) is None
    elif not schedule.placement:
        every = all_cuts(times.num_layers, schedule.num_stages)
        assert not any(room(cut, ("blocks",) * len(cut)) for cut in every)


def test_sixty_four_stages_of_a_thousand_layers_are_better_than_even_ones() -> None:
    forward = [0.2, *(1.0 + 0.5 * (layer % 3) for layer in range(998)), 9.0]
    kinds = {"F": forward, "R": forward, "B": [2 * each for each in forward]}
    times = LayerTimes(SizeCosts(layers_s=kinds, activation_bytes=[1.0] * 999))
    links = [Link("link", 0.01, 10.0)] * 63
    steps = LongSteps(lambda number: named("1f1b", 64, number), 64, links)
    found = best_cut(named("1f1b", 64, 64), times, steps.makespan_s)
    assert found is not None
    even = tuple(range(round(k * 1000 / 64), round((k + 1) * 1000 / 64)) for k in range(64))
    takes, messages = [times.stage(each.start, each.stop) for each in even], [(1.0, 1.0)] * 63
    assert found.step_s < 0.95 * steps.makespan_s(takes, ["never"] * 64, messages)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1"])
def test_long_steps_are_extrapolated_from_two_shorter_ones(name: str) -> None:
    def rows(number: int) -> Schedule:
        return named(name, 2, number, stages_per_worker=2 if name == "interleaved" else 1)

    stages = rows(1).num_stages
    takes = [StageTimes(1.0, 1.0, 2.0, 1.0, 1.0, 0.5)] * stages
    asked = takes, ["always"] * stages, [(0.0, 0.0)] * (stages - 1)
    long = LongSteps(rows, 40, [FREE] * (stages - 1)).makespan_s(*asked)
    assert long == pytest.approx(QuickSteps(rows(40)).makespan_s(*asked), rel=0.01)


def test_half_a_backward_may_take_no_time() -> None:
    """A stage whose I takes 0 seconds was once treated as if its backward could not be split."""
    times = LayerTimes(SizeCosts(layers_s={"F": [1.0], "R": [1.0], "B": [2.0], "I": [0.0], "W": [0.5]}))
    assert times.stage(0, 1, "never").microbatch_s("never") == 1.5
    whole = LayerTimes(SizeCosts(layers_s={"F": [1.0], "R": [1.0], "B": [2.0]}))
    assert whole.stage(0, 1, "never").microbatch_s("never") == 3.0


def test_only_what_must_is_recomputed() -> None:
    """Under 1F1B the first stage keeps three graphs, the last stage one; each worker has room for two."""
    times = LayerTimes(SizeCosts(layers_s={"F": [1.0] * 6, "R": [1.5] * 6, "B": [2.0] * 6}))
    makespan_s = QuickSteps(named("1f1b", 3, 6)).makespan_s

    def fits(worker: int, stages: tuple[range, ...], remat: tuple[str, ...]) -> bool:
        graphs = 1 if remat[0] == "always" else 3 - worker
        return graphs * len(stages[0]) <= 4

    found = best_cut(named("1f1b", 3, 6), times, makespan_s, fits=fits, remats=REMATS[:3], looks=20)
    assert found is not None
    assert (found.remat[1:], found.remat[0]) == (("never", "never"), "always")
    assert best_cut(named("1f1b", 3, 6), times, makespan_s, fits=lambda *_: False) is None

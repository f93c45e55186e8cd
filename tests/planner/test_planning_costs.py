"""Costs of layers: what adds up to stages, what follows from what processes have found, and how things are
timed side by side: whose turn it is, what samples say, who else was busy.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest

from gpipe_bench.harness.rounds import (
    Usage,
    against_itself,
    differences,
    orders,
    ratios,
    repeats_for,
    turns,
    used_by_others,
)
from gpipe_bench.pipeline import Action, Event, Link, gpipe, named
from gpipe_bench.planner import Candidate, Costs, Request, link_named
from gpipe_bench.planner.candidate import Grid
from gpipe_bench.planner.collectives import all_reduce_s
from gpipe_bench.planner.costs import kinds_of
from gpipe_bench.planner.measured import measured, sizes_worth
from gpipe_bench.planner.model import Source
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.probes import Bench, Probed, ProbeJob, ProbeRun, Step, Taken, probe, run_of
from gpipe_bench.planner.steps import times_on


def test_kinds_tell_graphs_and_first_gradients_apart() -> None:
    kinds = kinds_of(gpipe(2, 3, "except_last"))
    assert {str(a): k for a, k in kinds.items() if a.stage == 1 and a.kind.value != "R"} == {
        "1F0": "F", "1F1": "F", "1F2": "G", "1B2": "B first", "1B1": "B", "1B0": "B",
    }  # fmt: skip
    halves = kinds_of(named("zb-h1", 2, 2))
    assert halves[Action.parse("0W0")] == "W first"
    assert halves[Action.parse("0W1")] == "W"
    assert halves[Action.parse("0I0")] == "I"


def probed(process: int, *more: ProbeRun, action_s: float = 0.5) -> Probed:
    """Four layers of 1, 2, 3, 4 s forward, and an action of `action_s`; two stages of (1, 2) and (3, 4)."""

    def run(number: int, way: str, stages: list[list[float]], mine: list[int], **more: Any) -> ProbeRun:
        taken = tuple(Taken(stage, "G", sum(stages[stage]) + action_s) for _ in range(2) for stage in mine)
        update_s = [(layer, seconds) for layer, seconds in ((0, 0.1), (1, 0.2), (3, 0.4)) if way == "fine"]
        return ProbeRun(number, 2, way, taken, update_s=(*update_s, (0, 0.2 + 0.1 * process)), **more)

    fine = run(0, "fine", [[1.0], [2.0], [3.0], [4.0]], [0, 1, 2, 3])
    coarse = run(
        1, "coarse", [[1.0, 2.0], [3.0, 4.0]], [process], gaps_s=(0.125,), messages=((8.0, 0.375),),
        beyond_s=0.75,
    )  # fmt: skip
    return Probed((fine, coarse, *more), ((4,),) * 4, {2: (8.0,) * 3}, {2: (8.0,) * 3})


def test_layers_and_what_an_action_costs_once_are_told_apart() -> None:
    costs = measured([probed(0), probed(1)], "a machine")
    at = costs.at(2)
    assert at.action_s["G"] == pytest.approx(0.5)
    assert at.layers_s["G"] == pytest.approx((1.0, 2.0, 3.0, 4.0))
    assert at.seconds("G", range(0, 3)) == pytest.approx(6.5)
    assert costs.update_s == pytest.approx((0.2, 0.2, 0.0, 0.4))
    assert costs.gap_s == 0.125
    assert costs.step_s == 0.75
    assert costs.link is not None
    assert costs.link.latency_s == pytest.approx(0.25)  # the sender's part is in the gap
    assert "2 processes at once" in costs.provenance["layers"]


def whole(beyond_s: float, *actions: tuple[str, float], **more: Any) -> ProbeRun:
    """All layers in one process."""
    taken = tuple(Taken(0, kind, seconds) for kind, seconds in actions)
    return ProbeRun(2, 2, "whole", taken, beyond_s=beyond_s, **more)


def test_a_replica_of_the_whole_model_takes_what_one_took() -> None:
    runs = whole(2.75, ("G", 9.0), ("B", 20.0)), whole(2.75, ("G", 11.0), ("B", 22.0))
    costs = measured([probed(process, *runs) for process in range(2)])
    assert costs.at(2).seconds("G", range(4)) == pytest.approx(10.0)
    assert costs.at(2).seconds("G", range(3)) == pytest.approx(6.5)  # a part is what its layers add up to
    assert costs.sum_link is not None
    # Of the sum, what every step takes beyond its actions is known already.
    assert all_reduce_s(4 * 4, 2, costs.sum_link) == pytest.approx(2.75 - 0.75)
    assert measured([probed(0), probed(1)]).sum_link is None


@pytest.mark.parametrize(
    ("level", "first_s", "wall_s", "beyond_s", "actions"),
    [
        (0, 1.0, 16.0, 5.0 - 3.0 + 1.0, [("G", 1.0), ("B first", 4.0), ("G", 1.0), ("B", 3.0), ("G", 1.0)]),
        # F0 waits 2 s for the gathers
        (2, 3.0, 18.0, 2.0 + 2.0 + 1.0, [("B first", 4.0), ("G", 1.0), ("B", 3.0), ("G", 1.0)]),
    ],
)
def test_a_sum_is_what_the_last_backward_takes_more_than_the_one_before(
    level: int, first_s: float, wall_s: float, beyond_s: float, actions: list[tuple[str, float]]
) -> None:
    """F0 B0 F1 B1 F2 B2 of 1, 4, 1, 3, 1, 5 s, and a second around them, at half the usual speed."""
    schedule = named("1f1b", 1, 3)
    ends = list(accumulate((first_s, 4.0, 1.0, 3.0, 1.0, 5.0)))
    events = tuple(map(Event, schedule.actions[0], [0.0, *ends], ends))
    probe = SimpleNamespace(size=2, way="whole", schedule=schedule, level=level)
    found = run_of(7, probe, Step(0, wall_s, events, update_s={1: 0.5}), speed=2.0)
    assert found.beyond_s == beyond_s / 2
    assert [(each.kind, each.seconds) for each in found.actions] == [(kind, s / 2) for kind, s in actions]
    assert (found.run, found.level, found.update_s) == (7, level, ((1, 0.25),))


def test_of_a_step_over_processes_gaps_and_messages_are_of_whoever_waits() -> None:
    """0F0 of 2 s, then 1F0 0.5 s later, 1B0 right behind it, 0B0 a second later."""
    schedule = gpipe(2, 1, "never")
    times = {"0F0": (0.0, 2.0), "1F0": (2.5, 3.5), "1B0": (3.75, 5.0), "0B0": (6.0, 7.0)}
    events = tuple(Event(Action.parse(name), *ends) for name, ends in times.items())
    probe = SimpleNamespace(size=2, way="coarse", schedule=schedule, level=0, boundary_bytes=(8.0,))
    found = run_of(0, probe, Step(0, 4.0, events[1:3], events), speed=0.5)
    assert found.gaps_s == (0.5,)
    assert sorted(found.messages) == [(8.0, 1.0), (8.0, 2.0)]
    assert found.beyond_s == (4.0 - 2.5) * 2
    alone = run_of(0, probe, Step(0, 4.0, events), speed=1.0)
    assert (alone.gaps_s, alone.messages, alone.beyond_s) == ((), (), 0.0)


def sharing() -> Costs:
    """Replicas of four layers, and parts of them at level 2."""
    runs = (
        whole(2.75, ("G", 9.0), ("B first", 18.0), ("B", 20.0)),
        whole(7.75, ("G", 11.0), ("B first", 22.0), ("B", 26.0), level=2,
              update_s=tuple((layer, 0.5 * layer) for layer in range(4))),
    )  # fmt: skip
    return measured([probed(process, *runs) for process in range(2)])


def test_parts_take_what_they_took() -> None:
    """Forward, backward, what a step takes once, and the optimizer, each as it was timed."""
    costs = sharing()
    assert costs.link is not None
    request = Request(accelerators=2, memory_bytes=2**40, batch_size=8, link=costs.link)
    way = Candidate(
        grid=Grid(1, 1, 2, 2), schedule="1f1b", stages_per_worker=1, num_microbatches=2, microbatch_size=2,
        cut=(range(4),), remat=("never",),
    )  # fmt: skip
    beside = replace(costs, jitter=(), gap_s=0.0)
    step_s = predict(way, beside, request).step_s
    assert step_s == pytest.approx(0.75 + 2 * 11 + 22 + 26 + (7.75 - 0.75) + (0.0 + 0.5 + 1.0 + 1.5))
    shards = beside.shards(2, 2, 2, request.link)
    assert shards is not None
    whole_model = times_on(Grid(1, 1, 2, 2), beside, 2, request, split=False).stage(0, 4)
    assert (whole_model.forward_s, whole_model.after_s) == pytest.approx((11.0, 3.0))
    assert sum(bucket.takes_s for bucket in whole_model.buckets) == pytest.approx(7.0)
    # Of four parts three quarters are sent; at a level, or over a link, that was not timed nothing is known.
    four = beside.shards(2, 4, 2, request.link)
    assert four is not None
    assert sum(four.once_s) == pytest.approx(7.0 * 0.75 / 0.5)
    assert sum(four.update_s) == pytest.approx(3.0 / 2)
    assert beside.shards(2, 2, 3, request.link) is None
    assert beside.shards(2, 2, 2, Link("another", 0.0, 1e9)) is None
    assert measured([probed(0), probed(1)]).shards(2, 2, 2, request.link) is None


# Timing side by side

# Whose turn it is


@pytest.mark.parametrize("seed", [3, "seed"])
def test_every_round_runs_all_arms_there_and_back_in_changing_order(seed: int | str) -> None:
    rounds = list(itertools.islice(orders(["a", "b", "c"], seed), 60))
    assert all(sorted(order[:3]) == ["a", "b", "c"] and order == order[::-1] for order in rounds)
    assert {order[:3] for order in rounds} == set(itertools.permutations("abc"))
    assert rounds == list(itertools.islice(orders(["a", "b", "c"], seed), 60))  # the same in every process
    assert rounds != list(itertools.islice(orders(["a", "b", "c"], "another"), 60))
    assert list(turns(["a", "b", "c"], 60, seed)) == list(itertools.chain.from_iterable(rounds))
    # A sample has as many steps as fill its time, by the fastest of the timed ones.
    assert [repeats_for([step_s, 2 * step_s], 0.05) for step_s in (0.02, 0.025, 0.1)] == [3, 2, 1]


# What is made of the samples


def test_a_drift_within_the_rounds_cancels() -> None:
    """The machine slows down by a tenth from sample to sample; theirs takes 1.5 times as long as ours."""
    now = 1.0
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for arm in turns(["ours", "theirs"], 9, seed=1):
        times[arm].append(now * (1.5 if arm == "theirs" else 1.0))
        now *= 1.1
    assert ratios(times, "theirs", "ours") == pytest.approx([1.5] * 9)
    assert ratios(times, "theirs", "ours", 0.5) == pytest.approx([0.75] * 9)
    assert all(ratio < 1 for ratio in against_itself(times, "ours"))  # the control shows it


def test_differences_are_paired_by_round() -> None:
    times = {"more": [3.0, 3.0, 20.0, 45.0], "less": [1.0, 1.0, 10.0, 10.0]}
    assert differences(times, "more", "less", 10.0) == pytest.approx([20.0, 200.0])


# Who else was busy


def test_what_no_process_of_ours_used_was_used_by_others() -> None:
    """Two cores over 10 s: 14 of 20 s busy as one sees it, of which ours took 4 and 6."""
    one, other = Usage(4.0, 14.0, 10.0, 2), Usage(6.0, 12.0, 10.0, 2)
    assert used_by_others([one, other]) == pytest.approx(4 / 20)
    assert used_by_others([Usage(6.0, 5.9, 10.0, 2)]) == 0.0  # clocks that tick coarsely owe nobody anything


# Probes of layers: how often each is timed, and what is said of it

LOOPBACK = link_named("loopback")
REQUEST = Request(accelerators=2, memory_bytes=2**40, batch_size=16, link=LOOPBACK)


def test_sizes_of_one_micro_batch_alone_are_not_timed() -> None:
    assert sizes_worth([1, 2, 4, 8, 16], REQUEST) == [1, 2, 4, 8]
    assert sizes_worth([16], REQUEST) == [16]
    assert sizes_worth([1, 16], replace(REQUEST, accelerators=1)) == [1, 16]


def probed_here(*sizes: int, **more: Any) -> Probed:
    """Of six layers in this process."""
    job = ProbeJob(Source("planning_models:plain"), sizes, **more)
    try:
        return probe(Bench(job))
    finally:
        gc.unfreeze()


def test_each_size_is_timed_in_every_way_as_often_as_there_are_rounds() -> None:
    found = probed_here(2, 1, rounds=2)
    counts = Counter((run.size, run.way) for run in found.runs)
    assert counts == {(size, way): 4 for size in (1, 2) for way in ("fine", "coarse")}
    assert found.activation_bytes == found.gradient_bytes == {size: (64.0 * size,) * 5 for size in (1, 2)}
    assert found.parameter_bytes == ((4 * 16 * 16, 4 * 16),) * 6
    fine = next(run for run in found.runs if run.way == "fine")
    assert {action.stage for action in fine.actions} == {layer for layer, _ in fine.update_s} == set(range(6))
    costs = measured([found])
    assert costs.at(2).seconds("G", range(6)) > 0
    assert [len(run) for run in costs.jitter] == [1] * 8, "of one process, each coarse run"
    short = found._replace(runs=tuple(run for run in found.runs if run.way == "coarse" or run.size == 1)[1:])
    assert "1 to 2 rounds" in measured([short]).provenance["layers"]

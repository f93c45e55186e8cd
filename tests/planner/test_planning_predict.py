"""Predictions: exact where all times are known, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import planning_models
import pytest

from gpipe_bench.experiments.beyond.plan_steps import WAYS, searched
from gpipe_bench.pipeline import FREE, Link, partition
from gpipe_bench.planner import Candidate, Costs, Request, Space
from gpipe_bench.planner.candidate import Grid
from gpipe_bench.planner.collectives import all_gather_s, all_reduce_s
from gpipe_bench.planner.costs import SizeCosts
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.search import Search

NEAR, FAR = Link("near", 1e-3, 1e9), Link("far", 1e-2, 1e8)


def costs(layers: int = 4, **more: object) -> Costs:
    """Layers of 1 s forward and 2 s backward, of which I is one and W the other."""
    one = (1.0,) * layers
    seconds = {"F": one, "G": one, "R": one, "B": (2.0,) * layers, "I": one, "W": one}
    size = SizeCosts(layers_s=seconds, activation_bytes=(0,) * (layers - 1))
    return Costs(sizes=dict.fromkeys((1, 2, 4), size), **more)  # type: ignore[arg-type]


def candidate(
    schedule: str = "gpipe", workers: int = 2, number: int = 4, remat: str = "never", size: int = 0,
    **more: int,
) -> Candidate:  # fmt: skip
    return Candidate(
        grid=Grid(workers, **more), schedule=schedule, stages_per_worker=1, num_microbatches=number,
        microbatch_size=size or 4 // number, cut=partition([1.0] * 4, workers), remat=(remat,) * workers,
    )  # fmt: skip


def request(link: Link = FREE, accelerators: int = 2, batch_size: int = 4, **more: object) -> Request:
    return Request(accelerators=accelerators, memory_bytes=2**40, batch_size=batch_size, link=link, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("workers", "number"), [(1, 1), (1, 4), (2, 1), (2, 4), (4, 2), (4, 4)])
def test_equal_stages_take_the_formula_of_the_paper(workers: int, number: int) -> None:
    each_s = 3 * 4 / workers
    for name in ("gpipe", "1f1b"):
        step = predict(candidate(name, workers, number), costs(), request(batch_size=4))
        assert step.step_s == pytest.approx((number + workers - 1) * each_s)
        assert step.low_s == step.step_s == step.high_s
        assert sum(step.parts_s.values()) == pytest.approx(step.step_s)


def test_every_price_of_a_step_stands_in_its_place() -> None:
    plain_s = predict(candidate(number=1), costs(), request()).step_s
    parts = {
        "gap_s": (0.5, 4 * 0.5),  # F and B on each of two workers
        "step_s": (0.25, 0.25),
        "update_s": ((0.125,) * 4, 0.25),
    }
    for name, (value, longer_s) in parts.items():
        step = predict(candidate(number=1), costs(4, **{name: value}), request())
        assert step.step_s == pytest.approx(plain_s + longer_s), name
    slow = predict(candidate(number=1), costs(), request(Link("slow", 0.5)))
    assert slow.step_s == pytest.approx(plain_s + 2 * 0.5)
    assert slow.parts_s["communication"] == pytest.approx(1.0)


def test_replicas_wait_for_the_sum_of_their_gradients() -> None:
    given = costs(parameter_bytes=((1000,),) * 4)
    one = predict(candidate(number=2), given, request(NEAR, 4, 4)).step_s
    two = predict(candidate(number=2, dp=2), given, request(NEAR, 4, 8)).step_s
    assert two == pytest.approx(one + all_reduce_s(2000, 2, NEAR))


def test_jitter_makes_a_pipeline_wait() -> None:
    late = (((1.0, 1.0, 1.0, 2.0),), ((1.0, 1.0, 1.0, 0.0),))
    step = predict(candidate(number=4), costs(jitter=late), request())
    plain = predict(candidate(number=4), costs(), request())
    assert step.low_s < step.step_s < step.high_s
    assert step.step_s > plain.step_s
    assert step.parts_s["jitter"] == pytest.approx(step.step_s - plain.step_s)
    again = predict(candidate(number=4), costs(jitter=late), request())
    assert again == step  # the draws are the same every time


def test_only_messages_that_leave_a_host_take_the_slow_link() -> None:
    """Four workers on two hosts, messages of one action each: two are near and one is far, each way."""
    sent = costs()
    sent = replace(sent, sizes={4: replace(sent.at(4), activation_bytes=(1e6,) * 3)})
    alone_s = predict(candidate(workers=4, number=1), costs(), request()).step_s
    two = request(NEAR, 4, hosts=2, between=FAR)
    near_s, far_s = (link.latency_s + link.occupied_s(1e6) for link in (NEAR, FAR))
    step = predict(candidate(workers=4, number=1), sent, two)
    assert step.step_s == pytest.approx(alone_s + 2 * (2 * near_s + far_s))
    assert step.provenance["grid"] == "pp 0-1 2-3 near, pp 1-2 far"


def test_sums_take_the_link_of_their_own_dimension() -> None:
    """Of two hosts of four: shards inside a host, replicas across; or replicas of three that straddle."""
    given = costs(parameter_bytes=((2**20,),) * 4, update_s=(1.0,) * 4)
    two = request(NEAR, 8, 8, hosts=2, between=FAR, cards=4)
    one = {"workers": 1, "number": 1, "fsdp": 4}
    inside = predict(candidate(dp=2, fsdp_level=3, size=1, **one), given, two)
    sum_s = all_reduce_s(2**20, 2, FAR)  # of a quarter of four layers
    assert inside.parts_s["weight update"] == pytest.approx(1.0)  # a quarter of it
    assert sum_s < inside.parts_s["collectives"] < sum_s + 16 * all_gather_s(2**20, 4, NEAR)
    three = request(NEAR, 12, 4, hosts=2, between=FAR, cards=1)
    straddles = predict(candidate(workers=3, number=1, dp=4, size=1), given, three)
    assert straddles.parts_s["collectives"] >= all_reduce_s(2**20, 4, FAR)


def test_the_sums_of_divided_layers_are_collectives_and_know_of_hosts() -> None:
    sent = costs(parameter_bytes=((2**20,),) * 4)
    sent = replace(sent, sizes={4: replace(sent.at(4), activation_bytes=(1e6,) * 3)})
    two = request(NEAR, 8, 8, hosts=2, between=FAR, cards=4)
    step = predict(candidate(workers=1, number=1, dp=2, tp=4), sent, two)
    assert step.parts_s["computation"] == pytest.approx(12.0 / 4)
    inside_s = 2 * 3 * 2 * all_reduce_s(1e6, 4, NEAR)  # three layers have a next one, two sums each way
    replicas_s = all_reduce_s(2**18, 2, FAR)  # of the last bucket at least
    assert inside_s + replicas_s < step.parts_s["collectives"] < inside_s + 5 * replicas_s
    assert step.provenance["grid"] == "dp far, tp near"
    whole = predict(candidate(workers=2, number=2, tp=4, size=4), sent, two)
    far_s, near_s = (2 * (link.latency_s + link.occupied_s(1e6)) for link in (FAR, NEAR))
    assert whole.parts_s["communication"] == pytest.approx(far_s)
    one = predict(candidate(workers=2, number=2, tp=4, size=4), sent, request(NEAR, 8, 8))
    assert one.parts_s["communication"] == pytest.approx(near_s)


def test_every_pass_gathers_where_nothing_is_kept() -> None:
    """ZeRO-3 where layers are gathered and computed in turn: in F, in R, and with its scatter in B."""
    given = costs(parameter_bytes=((2**20,),) * 4)
    shared = {"workers": 1, "number": 2, "fsdp": 2, "fsdp_level": 3}
    gather_s = 4 * all_gather_s(2**20, 2, NEAR)  # of all layers
    for remat, passes in (("never", 3), ("always", 4)):
        step = predict(candidate(remat=remat, **shared), given, request(NEAR, 2, 8))
        alone = predict(candidate(remat=remat, workers=1, number=2), given, request(NEAR, 1, 4))
        assert step.step_s - alone.step_s == pytest.approx(2 * passes * gather_s)
    with pytest.raises(ValueError, match="schedule 'zb-h1' splits backwards"):
        predict(candidate("zb-h1", **shared), given, request(NEAR, 2, 8))


def test_what_is_ranked_is_what_the_search_of_the_verb_finds() -> None:
    """Each with the cut that it lays out, and of what recomputes nothing its first is the ranking's."""
    model = planning_models.planned("tied", 8)
    known = planning_models.costs_of(model, (2, 4))
    asked = request(batch_size=8)
    names = tuple(name for name, _, remat in WAYS if remat == "never")
    space = Space(schedules=names, microbatches=(2, 4), pp=(2,), remats=("never",), sharded=False)
    (best,) = Search(known, asked, space).run(kept=1)
    found = searched(known, asked, (2, 4))
    never = [each for each in found if each.remat[0] == "never" and each.grid.dp == 1]
    assert best.candidate == never[0]

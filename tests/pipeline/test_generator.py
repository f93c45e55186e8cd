"""Generated schedules: valid, under their memory cap, and never longer than a named one."""

from __future__ import annotations

import random

import pytest
from random_schedules import random_placement

from gpipe_bench.pipeline import NAMED, SLOTS, Action, Kind, Link, Schedule, generate, named, replay, validate
from gpipe_bench.pipeline.plan.named import loop
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.pipeline.plan.vee import vee


def in_slots(schedule: Schedule) -> float:
    return replay(schedule, SLOTS).makespan_s * schedule.num_workers / schedule.num_stages


def most_alive(schedule: Schedule) -> int:
    timeline = replay(schedule, SLOTS)
    return max(
        live for worker in range(schedule.num_workers) for _, live in timeline.worker_live_activations(worker)
    )


# As many micro-batches as workers, twice and four times as many; graphs of a worker's whole share.
@pytest.mark.parametrize(
    ("num_workers", "expected"),
    [
        (2, {"1f1b": (9, 15, 27), "loop": (7.5, 13.5, 25.5), "h1": (7, 13, 25), "v": (6.5, 12.5, 24.5)}),
        (4, {"1f1b": (21, 33, 57), "loop": (16.5, 28.5, 52.5), "h1": (15, 27, 51), "v": (13.5, 25.5, 49.5)}),
        (
            8,
            {
                "1f1b": (45, 69, 117), "loop": (34.5, 58.5, 106.5), "h1": (31, 55, 103),
                "v": (27.5, 51.5, 99.5),
            },
        ),
    ],
)  # fmt: skip
def test_equal_stages_in_slots(num_workers: int, expected: dict[str, tuple[float, ...]]) -> None:
    line, ring, v = loop(num_workers, 1), loop(num_workers, 2), vee(num_workers)
    for position, times in enumerate((1, 2, 4)):
        size = times * num_workers
        found = {
            "1f1b": generate(line, size, split=False, most_alive=num_workers),
            "loop": generate(ring, size, split=False, most_alive=3 * num_workers),
            "h1": generate(line, size, most_alive=num_workers),
            "v": generate(v, size, most_alive=2 * num_workers),
        }
        assert {name: in_slots(each) for name, each in found.items()} == {
            name: lengths[position] for name, lengths in expected.items()
        }


@pytest.mark.parametrize(
    ("num_workers", "times", "one", "four", "all_of_them", "v"),
    [
        (4, 1, 22, 19, 19, 18.5), (4, 4, 70, 67, 67, 66.5),
        (8, 1, 46, 43, 39, 38.5), (8, 2, 78, 75, 71, 70.5), (8, 4, 142, 139, 135, 134.5),
    ],
)  # fmt: skip
def test_recomputation_and_weights_under_a_cap_in_slots(
    num_workers: int, times: int, one: int, four: int, all_of_them: int, v: float
) -> None:
    """The more graphs may be alive, the more weights can wait for what would be idle."""
    size, line = times * num_workers, loop(num_workers, 1)
    found = [generate(line, size, remat="always", most_alive=cap) for cap in (1, 4, size)]
    assert [in_slots(each) for each in found] == [one, four, all_of_them]
    assert in_slots(generate(vee(num_workers), size, remat="always", most_alive=2)) == v


def test_random_circumstances() -> None:
    """Whatever the placement, the times, the link and the cap: valid, under the cap, and not longer than any
    named schedule of that placement under the same cap.
    """
    draw = random.Random(0)
    for number in range(60):
        size, remat = draw.randint(1, 9), draw.choice(REMAT_MODES)
        name = draw.choice(sorted(NAMED))
        known = named(name, draw.randint(1, 4), size, remat=remat)
        place = tuple(known.worker(stage) for stage in range(known.num_stages))
        if number % 3 == 0:
            place = random_placement(draw, draw.randint(1, 6))
        seconds = {
            (stage, kind): draw.choice([0.5, 1, 1, 2, 3]) for stage in range(len(place)) for kind in Kind
        }
        link = Link("slow", latency_s=draw.choice([0, 0.3]))
        split = number % 3 == 0 or {action.kind for action in known} >= {Kind.I}
        if name == "dualpipe-v":
            continue  # both whole and split backwards, which no single choice of `split` makes
        cap = most_alive(known) if number % 3 else draw.choice([None, 3 * len(place)])
        found = generate(place, size, seconds, link, remat=remat, split=split, most_alive=cap)
        validate(found)
        assert cap is None or most_alive(found) <= cap
        if number % 3:
            assert replay(found, seconds, link).makespan_s <= replay(known, seconds, link).makespan_s + 1e-9


def test_uneven_stages_gain_over_every_named_schedule() -> None:
    """The named rows are made for equal stages."""

    def uneven(action: Action) -> float:
        return SLOTS[action.kind] * (3, 2, 1, 1)[action.stage]

    names = ("1f1b", "gpipe", "zb-h1", "zb-h2")
    known = {name: replay(named(name, 4, 4), uneven).makespan_s for name in names}
    assert known == {"1f1b": 39, "gpipe": 48, "zb-h1": 37, "zb-h2": 40}
    # The first stage never waits but for the last gradient.
    assert replay(generate(loop(4, 1), 4, uneven), uneven).makespan_s == 36


def test_a_slow_link_is_reckoned_with() -> None:
    link = Link("slow", latency_s=0.5, bandwidth_bytes_per_s=4)
    found = generate(loop(3, 1), 6, SLOTS, link, activation_bytes=[2, 2])
    known = replay(named("zb-h1", 3, 6), SLOTS, link, activation_bytes=[2, 2]).makespan_s
    assert replay(found, SLOTS, link, activation_bytes=[2, 2]).makespan_s <= known


def test_durations_are_asked_for_by_stage_and_kind_alone() -> None:
    asked: set[tuple[int, Kind]] = set()

    def seconds(action: Action) -> float:
        asked.add((action.stage, action.kind))
        return 1.0

    generate((0, 1, 0), 2, seconds)
    assert asked == {(stage, kind) for stage in range(3) for kind in (Kind.F, Kind.I, Kind.W)}

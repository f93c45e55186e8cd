"""Named schedules are as published, whatever their size; generated ones are never longer."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
from random_schedules import random_placement

from gpipe_bench.pipeline import (
    NAMED,
    SLOTS,
    Action,
    Kind,
    Link,
    Schedule,
    Timeline,
    draw,
    generate,
    gpipe,
    named,
    one_f_one_b,
    replay,
    validate,
)
from gpipe_bench.pipeline.plan.named import (
    breadth_first,
    dualpipe_v,
    interleaved,
    loop,
    v_half,
    vee,
    zb_h1,
    zb_h2,
    zb_v,
)
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES, most_alive_of, recomputed


def in_slots(schedule: Schedule) -> float:
    """Makespan in slots of a worker's whole share of the model."""
    return replay(schedule, SLOTS).makespan_s * schedule.num_workers / schedule.num_stages


def most_alive(schedule: Schedule) -> list[float]:
    """Graphs that each worker holds at most, in whole shares."""
    share = schedule.num_workers / schedule.num_stages
    return [share * most_alive_of(row) for row in schedule.actions]


def longest_span_s(timeline: Timeline) -> float:
    """From the first start to the last end of the worker that takes longest."""
    rows = [timeline.of_worker(worker) for worker in range(timeline.num_workers)]
    return max(row[-1].end_s - row[0].start_s for row in rows)


@pytest.mark.parametrize("name", NAMED)
def test_every_named_schedule_is_valid(name: str) -> None:
    for num_workers, num_microbatches in itertools.product(range(1, 6), (1, 2, 3, 4, 7, 8, 12)):
        for remat in REMAT_MODES:
            schedule = named(name, num_workers, num_microbatches, remat=remat)
            validate(schedule)
            assert schedule.num_workers == num_workers
            assert schedule.remat == remat


def test_loops_take_any_number_of_stages_and_micro_batches() -> None:
    for num_workers, name, turns, num_microbatches in itertools.product(
        (1, 3, 4), ("interleaved", "breadth-first"), (1, 3, 4), (1, 4, 11)
    ):
        schedule = named(name, num_workers, num_microbatches, stages_per_worker=turns)
        validate(schedule)
        assert [schedule.worker(stage) for stage in range(schedule.num_stages)] == [*loop(num_workers, turns)]


def test_placements() -> None:
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3) == (0, 1, 2, 2, 1, 0)
    assert vee(2, 3) == (0, 1, 1, 0, 0, 1)


# As many micro-batches as workers, twice and four times as many.
@pytest.mark.parametrize(
    ("num_workers", "one_f", "interleaved", "h1", "v"),
    [
        (2, (9, 15, 27), (7.5, 13.5, 25.5), (7, 13, 25), (7, 12.5, 24.5)),
        (4, (21, 33, 57), (16.5, 28.5, 52.5), (15, 27, 51), (15, 25.5, 49.5)),
        (8, (45, 69, 117), (34.5, 58.5, 106.5), (31, 55, 103), (31, 51.5, 99.5)),
    ],
)
def test_lengths_in_slots(num_workers: int, one_f, interleaved, h1, v) -> None:
    sizes = [num_workers * times for times in (1, 2, 4)]
    for name, expected in {
        "1f1b": one_f, "gpipe": one_f, "interleaved": interleaved, "breadth-first": interleaved, "zb-h1": h1,
        "zb-v": v,
    }.items():  # fmt: skip
        assert [in_slots(named(name, num_workers, size)) for size in sizes] == [*expected], name


@pytest.mark.parametrize(("num_workers", "turns"), [(2, 2), (4, 2), (4, 3), (8, 2)])
def test_bubble_and_activations_of_loops(num_workers: int, turns: int) -> None:
    for name, times in itertools.product(("interleaved", "breadth-first"), (1, 2, 4)):
        size = times * num_workers
        schedule = named(name, num_workers, size, stages_per_worker=turns)
        rate = (num_workers - 1) / (turns * size + num_workers - 1)
        assert replay(schedule, SLOTS).bubble == pytest.approx(rate)
        most = num_workers + (num_workers - 1) / turns if name == "interleaved" else size
        assert max(most_alive(schedule)) == pytest.approx(min(most, size))


@pytest.mark.parametrize("num_workers", [2, 4, 7, 12])
def test_zero_bubble_as_published(num_workers: int) -> None:
    """Bubbles for any F, I and W, and activations (arXiv 2401.10241, table 2)."""
    f, i, w = 5, 4, 3
    for times in (2, 3):
        size = times * num_workers
        for name, bubble, alive in (
            ("zb-h1", (num_workers - 1) * (f + i - w), num_workers),
            ("zb-h2", (num_workers - 1) * (f + i - 2 * w), 2 * num_workers - 1),
        ):
            schedule = named(name, num_workers, size)
            step = replay(schedule, {Kind.F: f, Kind.I: i, Kind.W: w})
            assert longest_span_s(step) == size * (f + i + w) + bubble, name
            assert max(most_alive(schedule)) == alive
        schedule = named("zb-v", num_workers, size)
        assert in_slots(schedule) == 3 * size + (num_workers - 1) / 2
        assert most_alive(schedule) == [num_workers] * num_workers
        assert max(most_alive(named("dualpipe-v", num_workers, size))) == num_workers + 1 / 2


@pytest.mark.parametrize("num_workers", [2, 3, 5, 8, 12, 16])
def test_controllable_memory_as_published(num_workers: int) -> None:
    """V-Half keeps half of what 1F1B keeps and V-Min a third, for about half and two thirds of its bubble."""
    size = 4 * num_workers
    for name, alive, share in (
        ("v-half", (num_workers + 2) // 2, 1 / 2),
        ("v-min", (num_workers + 4) // 3, 2 / 3),
    ):
        schedule = named(name, num_workers, size)
        assert max(most_alive(schedule)) == alive
        bubble = in_slots(schedule) / (3 * size) - 1
        # "About": of 1F1B's (K - 1) / M, without the skew of a few slots.
        assert bubble <= share * num_workers / size + 2 / size


# num_workers, num_microbatches, F, I, W, message (ms), rates of 1F1B, ZB-H1 and ZB-H2 as published
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641),
]  # fmt: skip


@pytest.mark.parametrize(("num_workers", "size", "f", "i", "w", "message", "one_f", "h1", "h2"), PUBLISHED)
def test_published_bubble_rates_of_zero_bubble(num_workers, size, f, i, w, message, one_f, h1, h2) -> None:
    """Table 5 of arXiv 2401.10241, which counts the span of the worker that takes longest."""
    link = Link("profiled", latency_s=message)
    for name, rate in (("zb-h1", h1), ("zb-h2", h2)):
        step = replay(named(name, num_workers, size), {Kind.F: f, Kind.I: i, Kind.W: w}, link)
        assert round(1 - size * (f + i + w) / longest_span_s(step), 4) == rate
    step = replay(one_f_one_b(num_workers, size), {Kind.F: f, Kind.B: i + w}, link)
    assert round(step.bubble, 4) == one_f


@pytest.mark.parametrize(
    ("row", "turns", "rate"), [(0, 3, 0.1055), (1, 3, 0.0443), (2, 4, 0.0808), (3, 3, 0.1104), (4, 2, 0.1493)]
)
def test_published_bubble_rates_of_interleaving(row: int, turns: int, rate: float) -> None:
    """The same table's 1F1B-I. Its rows wait for one message per worker less than Megatron's order does."""
    num_workers, size, f, i, w, message, *_ = PUBLISHED[row]
    schedule = named("interleaved", num_workers, size, stages_per_worker=turns)
    times = {Kind.F: f / turns, Kind.B: (i + w) / turns}
    step_s = replay(schedule, times, Link("profiled", latency_s=message)).makespan_s
    assert round(1 - size * (f + i + w) / (step_s - num_workers * message), 4) == rate


def test_recomputation_is_early_and_fits_before_every_backward() -> None:
    """ZB-H1's weights fill what its recomputations leave: K - 1 slots of bubble with R as without."""
    for num_workers, times in itertools.product((2, 4, 8), (1, 2, 4)):
        size = times * num_workers
        assert in_slots(named("zb-h1", num_workers, size, remat="always")) == 4 * size + num_workers - 1
        for name in ("1f1b", "gpipe"):
            make = one_f_one_b if name == "1f1b" else gpipe
            for remat in REMAT_MODES:
                assert named(name, num_workers, size, remat=remat) == make(num_workers, size, remat=remat)


def _pictures(text: str) -> list[str]:
    """Consecutive lines of a text that draw workers or stages, without their indentation."""
    lines = [line.strip() for line in text.splitlines()]
    groups = itertools.groupby(lines, key=lambda line: bool(re.match(r"(worker|stage) +\d+ \|", line)))
    return ["\n".join(group) for is_picture, group in groups if is_picture]


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        (interleaved.__doc__, named("interleaved", 2, 3)),
        (breadth_first.__doc__, named("breadth-first", 2, 2)),
        (zb_h1.__doc__, named("zb-h1", 3, 4)),
        (zb_h2.__doc__, named("zb-h2", 3, 5)),
        (zb_v.__doc__, named("zb-v", 2, 3)),
        (dualpipe_v.__doc__, named("dualpipe-v", 2, 3)),
        (v_half.__doc__, named("v-half", 2, 3)),
        (recomputed.__doc__, named("zb-h1", 3, 3, remat="always")),
    ],
)
def test_pictures_in_the_code_show_what_the_code_makes(text: str, schedule: Schedule) -> None:
    (picture,) = _pictures(text)
    assert picture == draw(replay(schedule, SLOTS))


def test_the_table_of_the_documentation() -> None:
    """Four workers, eight micro-batches: every named schedule, with the numbers that it has."""
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    found = {row[0].strip("`"): row[2:] for row in rows if len(row) > 2 and row[0].startswith("`")}
    assert list(found) == list(NAMED)
    for name, cells in found.items():
        plain, again = named(name, 4, 8), named(name, 4, 8, remat="always")
        assert cells == [
            f"{in_slots(plain):g}", f"{replay(plain, SLOTS).bubble:.1%}", f"{max(most_alive(plain)):g}",
            f"{in_slots(again):g}", f"{max(most_alive(again)):g}",
        ]  # fmt: skip


def most_graphs(schedule: Schedule) -> int:
    return max(map(most_alive_of, schedule.actions))


@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_equal_stages_take_no_longer_than_by_the_named_rows(num_workers: int) -> None:
    """Under as many graphs alive as they hold; a worker's share is of one stage or of two."""
    line, ring, v = loop(num_workers, 1), loop(num_workers, 2), vee(num_workers)
    for size in (num_workers, 4 * num_workers):
        for name, found in {
            "1f1b": generate(line, size, split=False, most_alive=num_workers),
            "interleaved": generate(ring, size, split=False, most_alive=3 * num_workers),
            "zb-h1": generate(line, size, most_alive=num_workers),
            "zb-v": generate(v, size, most_alive=2 * num_workers),
        }.items():
            assert in_slots(found) <= in_slots(named(name, num_workers, size)), name


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
        cap = most_graphs(known) if number % 3 else draw.choice([None, 3 * len(place)])
        found = generate(place, size, seconds, link, remat=remat, split=split, most_alive=cap)
        validate(found)
        assert cap is None or most_graphs(found) <= cap
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

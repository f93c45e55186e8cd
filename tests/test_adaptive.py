"""The choice of what to recompute: the best one on small cases, a good one on large ones, and refusals."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gpipe_bench.pipeline import (
    FREE,
    SLOTS,
    Action,
    Kind,
    Link,
    Schedule,
    Timeline,
    gpipe,
    named,
    one_f_one_b,
    replay,
    validate,
)
from gpipe_bench.pipeline.plan.remat import REMAT_MODES, of_stages
from gpipe_bench.pipeline.plan.schedule import recomputed
from gpipe_bench.planner import adaptive
from gpipe_bench.planner.recompute import Held, Ledger

EXAMPLES = int(os.environ.get("ADAPTIVE_EXAMPLES", "50"))
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)  # a smaller seed is no smaller case

# Workers, micro-batches and stages: few enough to try every choice.
SMALL = [
    ("1f1b", 2, 4), ("1f1b", 3, 3), ("1f1b", 4, 2), ("gpipe", 2, 4), ("gpipe", 4, 2), ("naive", 2, 3),
    ("interleaved", 2, 2), ("zb-h1", 2, 4), ("zb-h1", 4, 2), ("zb-v", 2, 2), ("breadth-first", 2, 2),
]  # fmt: skip


def simply_held(
    schedule: Schedule, inputs: Sequence[float], graphs: Sequence[float], fixed: Sequence[float]
) -> Held:
    """An action holds the graph that it makes or uses up, and each worker `fixed` bytes all the time; between
    I and W nothing waits.
    """

    def own(action: Action, recomputed: bool) -> float:
        is_free = action.kind is Kind.F and recomputed
        return fixed[schedule.worker(action.stage)] + (inputs if is_free else graphs)[action.stage]

    return Held(inputs, graphs, own, fixed)


def held_in_rows(schedule: Schedule, held: Held) -> int:
    """Most bytes of each worker, from the rows with their recomputations: as `Held` says it, not as it is
    searched.
    """
    most = []
    for worker, row in enumerate(schedule.actions):
        waiting: dict[tuple[int, int], float] = {}
        peak = held.at_rest[worker]
        for action in row:
            unit = (action.stage, action.microbatch)
            again = schedule.recomputes(action.microbatch, action.stage)
            waiting.pop(unit, None)
            peak = max(peak, held.own(action, again) + sum(waiting.values()))
            if action.kind is Kind.F:
                waiting[unit] = (held.inputs if again else held.graphs)[action.stage]
            elif action.kind is Kind.R:
                waiting[unit] = held.graphs[action.stage]
        most.append(peak)
    return most


def choices(schedule: Schedule) -> Iterator[Schedule]:
    sets = [
        chosen
        for size in range(schedule.num_microbatches + 1)
        for chosen in itertools.combinations(range(schedule.num_microbatches), size)
    ]
    for remat in itertools.product(sets, repeat=schedule.num_stages):
        yield recomputed(schedule, remat)


class Case:
    """A small schedule with times, bytes and a cap, all whole numbers, so that sums are exact."""

    def __init__(self, generator: random.Random) -> None:
        name, num_workers, num_microbatches = generator.choice(SMALL)
        self.schedule = named(name, num_workers, num_microbatches)
        stages = range(self.schedule.num_stages)
        times = {(s, kind): generator.randint(0, 6) for s in stages for kind in Kind}
        self.link = FREE if generator.random() < 0.5 else Link("slow", generator.randint(0, 3), 1)
        bytes_of = [generator.randint(0, 3) for _ in stages[1:]]
        self.lay_out = partial(replay, action_s=times, link=self.link, activation_bytes=bytes_of)
        # Now and then a graph is less than the inputs, as that of a layer that needs only its output's shape.
        inputs = [generator.randint(0, 3) for _ in stages]
        graphs = [each + generator.choice([0, 1, 4, 9, -1]) for each in inputs]
        own = {
            (action, again): generator.randint(0, 6)
            for action in recomputed(self.schedule, "always")
            for again in (False, True)
        }
        for action, _ in own:
            if action.kind is not Kind.F:
                own[action, False] = own[action, True]
        number = self.schedule.num_workers
        self.held = Held(inputs, graphs, lambda *key: own[key], [generator.randint(0, 5)] * number)
        always = held_in_rows(recomputed(self.schedule, "always"), self.held)
        never = held_in_rows(self.schedule, self.held)
        # From too little to more than enough, of each worker.
        self.caps = [generator.randint(min(a, b) - 1, max(a, b)) for a, b in zip(always, never, strict=True)]

    def fits(self, schedule: Schedule) -> bool:
        return all(
            peak <= cap for peak, cap in zip(held_in_rows(schedule, self.held), self.caps, strict=True)
        )


@settings(max_examples=EXAMPLES, phases=UNSHRUNK)
@given(st.integers(0, 2**32))
def test_small_cases_are_solved_as_by_trying_every_choice(seed: int) -> None:
    case = Case(random.Random(seed))
    steps = [case.lay_out(choice).makespan_s for choice in choices(case.schedule) if case.fits(choice)]
    if not steps:
        with pytest.raises(ValueError, match="whatever is recomputed|no choice of what to recompute"):
            adaptive(case.schedule, case.lay_out, case.held, case.caps)
        return
    found = adaptive(case.schedule, case.lay_out, case.held, case.caps)
    validate(found.schedule)
    assert case.fits(found.schedule)
    assert found.step_s == case.lay_out(found.schedule).makespan_s == min(steps)
    assert found.bound_s == found.step_s


@settings(max_examples=EXAMPLES // 2, phases=UNSHRUNK)
@given(st.integers(0, 2**32))
def test_a_search_that_is_cut_short_gives_true_bounds(seed: int) -> None:
    case = Case(random.Random(seed))
    steps = [case.lay_out(choice).makespan_s for choice in choices(case.schedule) if case.fits(choice)]
    if steps:
        try:
            found = adaptive(case.schedule, case.lay_out, case.held, case.caps, effort=0)
        except ValueError:  # only a longer search finds what fits
            return
        assert case.fits(found.schedule)
        assert found.bound_s <= min(steps) <= found.step_s


@settings(max_examples=EXAMPLES // 2, phases=UNSHRUNK)
@given(st.integers(0, 2**32))
def test_the_sums_of_a_choice_are_those_of_its_rows(seed: int) -> None:
    generator = random.Random(seed)
    case = Case(generator)
    units = [(s, m) for s in range(case.schedule.num_stages) for m in range(case.schedule.num_microbatches)]
    again = set(generator.sample(units, generator.randint(0, len(units))))
    remat = [[m for s, m in again if s == stage] for stage in range(case.schedule.num_stages)]
    peaks = held_in_rows(recomputed(case.schedule, remat), case.held)
    for worker, peak in enumerate(peaks):
        assert Ledger(case.schedule, worker, case.held, 0).peak_bytes(again) == peak


def graphs_alone(schedule: Schedule) -> Held:
    """A graph is one byte, all else none."""
    stages, workers = range(schedule.num_stages), range(schedule.num_workers)
    return simply_held(schedule, [0 for _ in stages], [1 for _ in stages], [0 for _ in workers])


IN_SLOTS = partial(replay, action_s=SLOTS)


def test_what_is_hidden_by_waiting_costs_nothing() -> None:
    """As in the picture of `planner.recompute`."""
    schedule = one_f_one_b(3, 4)
    found = adaptive(schedule, IN_SLOTS, graphs_alone(schedule), 2)
    assert found.schedule.remat == ((2,), "never", "never")
    assert found.step_s == found.bound_s == 18
    assert IN_SLOTS(schedule).makespan_s == 18
    assert IN_SLOTS(one_f_one_b(3, 4, "always")).makespan_s == 22


def test_gpipe_keeps_the_micro_batches_that_it_drains_first() -> None:
    schedule = gpipe(4, 8, "never")
    found = adaptive(schedule, IN_SLOTS, graphs_alone(schedule), 3)
    assert found.schedule.remat == (tuple(range(5)),) * 4
    assert found.step_s == found.bound_s == 38


@pytest.mark.parametrize(
    ("make", "cap", "step_slots", "always_slots"),
    [
        (lambda: one_f_one_b(8, 32), 3, 134, 149),
        (lambda: one_f_one_b(16, 64), 5, 275, 301),
        (lambda: named("zb-h1", 8, 32), 4, 119, 135),
        (lambda: gpipe(16, 64, "never"), 10, 292, 301),
    ],
)
def test_larger_cases_keep_what_passes_without_delay(
    make: Callable[[], Schedule], cap: int, step_slots: int, always_slots: int
) -> None:
    """A micro-batch that one worker recomputes delays all, so those with more room keep the same ones."""
    schedule = make()
    found = adaptive(schedule, IN_SLOTS, graphs_alone(schedule), cap, effort=0)
    assert found.step_s <= step_slots
    assert found.bound_s <= found.step_s
    assert IN_SLOTS(recomputed(schedule, "always")).makespan_s == always_slots


def test_a_large_case_is_laid_out_no_more_often_than_asked() -> None:
    """What a search takes is what its replays take."""
    number = 0

    def lay_out(schedule: Schedule) -> Timeline:
        nonlocal number
        number += 1
        return IN_SLOTS(schedule)

    schedule = one_f_one_b(32, 128)
    found = adaptive(schedule, lay_out, graphs_alone(schedule), 10, effort=12 * len(list(schedule)))
    assert number <= 12
    assert found.step_s <= 550 < 605 == IN_SLOTS(one_f_one_b(32, 128, "always")).makespan_s


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 6), st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
def test_never_longer_than_one_word_for_all(num_stages: int, count: int, cap: int, name: str) -> None:
    schedule = named(name, num_stages, count)
    held = graphs_alone(schedule)
    fitting = [
        IN_SLOTS(choice).makespan_s
        for mode in REMAT_MODES
        if max(held_in_rows(choice := recomputed(schedule, mode), held)) <= cap
    ]
    if fitting:
        assert adaptive(schedule, IN_SLOTS, held, cap, effort=2000).step_s <= min(fitting)


def test_what_fits_is_not_recomputed() -> None:
    schedule = one_f_one_b(3, 4)
    found = adaptive(schedule, IN_SLOTS, graphs_alone(schedule), 3)
    assert found.schedule == schedule
    assert found.bound_s >= found.step_s


def test_a_cap_for_each_worker() -> None:
    schedule = one_f_one_b(3, 4)
    found = adaptive(schedule, IN_SLOTS, graphs_alone(schedule), [3, 1, 1])
    assert [bool(again) for again in of_stages(found.schedule.remat, 3, 4)] == [False, True, False]


def test_one_of_the_graphs_that_wait_in_an_action_that_holds_too_much_has_to_go() -> None:
    schedule = one_f_one_b(2, 2)
    ledger = Ledger(schedule, 0, simply_held(schedule, [2, 1], [5, 5], [10, 20]), 19)
    assert ledger.excess({(0, 1)}) is None
    assert ledger.excess(set()) == ((0, 0), (0, 1))

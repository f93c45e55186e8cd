"""When receives are posted, and that no buffer is overwritten while it is needed."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import HELD_UP, LATE_WEIGHTS, random_placement, random_schedule
from test_schedule import schedules

from gpipe_bench.pipeline.plan.named import NAMED, gpipe, named, one_f_one_b
from gpipe_bench.pipeline.plan.receiving.ring import (
    SENDS_ON_THE_WAY,
    Ring,
    activation_ring,
    gradient_ring,
    turns,
)
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, validate
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay


def test_gpipe_posts_every_activation_at_once() -> None:
    ring = activation_ring(gpipe(3, 4), 1)
    assert ring.initial == (0, 1, 2, 3)
    assert ring.slot == (0, 1, 2, 3)
    assert ring.following == (None,) * 4


def test_one_f_one_b_posts_as_buffers_become_free() -> None:
    ring = activation_ring(one_f_one_b(3, 5), 1)
    assert ring.num_slots == 3
    assert ring.initial == (0, 1, 2)
    assert ring.following == (3, 4, None, None, None)
    assert ring.slot == (0, 1, 2, 0, 1)


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half", "v-min"])
def test_inputs_of_split_schedules_find_a_place(name: str, num_workers: int) -> None:
    """In slots, the receive of every input is posted before its sender is done, not at the same time."""
    schedule = named(name, num_workers, 8)
    end = {event.action: event.end_s for event in replay(schedule, SLOTS).events}
    late = []
    for stage in range(1, schedule.num_stages):
        ring = activation_ring(schedule, stage)
        for freed, microbatch in enumerate(ring.following):
            if microbatch is not None:
                message = Action(stage - 1, Kind.F, microbatch)
                if end[Action(stage, Kind.W, freed)] >= end[message]:
                    late.append(str(message))
    assert late == []


@pytest.mark.parametrize(("remat", "num_slots"), [("never", 2), ("always", 1), ("except_last", 1)])
def test_gradients_have_one_buffer_where_a_recomputation_hides_the_transfer(
    remat: str, num_slots: int
) -> None:
    ring = gradient_ring(gpipe(3, 4, remat=remat), 1)
    assert ring.num_slots == num_slots
    assert ring.initial == (3, 2)[:num_slots]
    assert ring.order == (3, 2, 1, 0)


@pytest.mark.parametrize("remat", ["never", "always"])
def test_small_gradients_are_all_posted_at_once(remat: str) -> None:
    ring = gradient_ring(gpipe(3, 4, remat=remat), 1, small=True)
    assert ring.num_slots == 4
    assert ring.initial == (3, 2, 1, 0)
    assert ring.following == (None,) * 4


@given(schedule=schedules(), data=st.data())
def test_no_buffer_is_used_twice_at_a_time(schedule: Schedule, data: st.DataObject) -> None:
    """Walks the row: what is needed has been posted, what is posted has a free buffer, and all comes to its
    turn.
    """
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    row = schedule.actions[stage]
    rings: list[tuple[Ring, tuple[Kind, ...]]] = []
    if stage > 0:
        rings.append((activation_ring(schedule, stage), (Kind.F,)))
        assert rings[-1][0].num_slots <= schedule.in_flight(stage - 1)
    if stage < schedule.num_stages - 1:
        small = data.draw(st.booleans())
        rings.append((gradient_ring(schedule, stage, small=small), (Kind.B,)))
        assert rings[-1][0].num_slots <= schedule.in_flight(stage)
    for ring, needing in rings:
        assert list(ring.order) == [a.microbatch for a in row if a.kind in needing]
        in_slot: dict[int, int] = {}

        def post(microbatch: int, ring: Ring = ring, in_slot: dict[int, int] = in_slot) -> None:
            slot = ring.slot[microbatch]
            assert slot < ring.num_slots
            assert slot not in in_slot
            in_slot[slot] = microbatch

        for microbatch in ring.initial:
            post(microbatch)
        for action in row:
            if action.kind in needing:
                assert in_slot[ring.slot[action.microbatch]] == action.microbatch
            if action.kind is Kind.B:
                del in_slot[ring.slot[action.microbatch]]
                following = ring.following[action.microbatch]
                if following is not None:
                    post(following)
        assert not in_slot


def stopped(schedule: Schedule, *, small: bool) -> list[str]:
    """Where the workers stand when nothing moves any more: [] if the step ends.

    A message goes when its receive is posted: when its slot is free and those before it, of its direction
    and between its two workers, are posted. A worker waits for what it needs, and after a send for the oldest
    one of that channel if more are on their way than may be.
    """
    stages, workers = range(schedule.num_stages), range(schedule.num_workers)
    home = schedule.worker
    rings = {(s, False): activation_ring(schedule, s) for s in stages[1:]}
    rings |= {(s, True): gradient_ring(schedule, s, small=small) for s in stages[:-1]}
    source = {key: home(key[0] + 1 if key[1] else key[0] - 1) for key in rings}
    slotted = {key: set(ring.initial) for key, ring in rings.items()}
    queues = {
        (a, b, back): [*turns(schedule, b, a, gradients=back)]
        for a in workers for b in workers for back in (False, True) if a != b
    }  # fmt: skip
    posted: dict[tuple[int, bool], set[int]] = {key: set() for key in rings}
    on_the_way: dict[tuple[int, int, bool], list[tuple[int, int]]] = {key: [] for key in queues}
    sent: dict[tuple[int, bool], set[int]] = {key: set() for key in rings}
    position, held_up = dict.fromkeys(workers, 0), dict[int, tuple[int, int, bool]]()

    def post() -> None:
        for (_, _, back), queue in queues.items():
            while queue and queue[0][1] in slotted[queue[0][0], back]:
                stage, m = queue.pop(0)
                posted[stage, back].add(m)

    def advance(w: int) -> bool:
        post()
        if w in held_up:
            stage, m = on_the_way[held_up[w]][0]
            if m not in posted[stage, held_up[w][2]]:
                return False
            on_the_way[held_up.pop(w)].pop(0)
            return True
        row = schedule.actions[w]
        if position[w] == len(row):
            return False
        s, kind, m = row[position[w]].stage, row[position[w]].kind, row[position[w]].microbatch
        backward = kind in (Kind.B, Kind.I)
        key = (s, backward)
        if (kind is Kind.F or backward) and key in rings:
            own = source[key] == w
            if not (m in sent[key] and (own or m in posted[key])):
                return False
        position[w] += 1
        if kind is Kind.W or kind is Kind.B:
            for key in ((s, False), (s, True)):
                if key in rings and (following := rings[key].following[m]) is not None:
                    slotted[key].add(following)
        target = (s - 1 if backward else s + 1, backward)
        if (kind is Kind.F or backward) and target in rings:
            sent[target].add(m)
            channel = (w, home(target[0]), backward)
            if channel in on_the_way:
                on_the_way[channel].append((target[0], m))
                if len(on_the_way[channel]) > SENDS_ON_THE_WAY:
                    held_up[w] = channel
        return True

    while any(advance(w) for w in workers):
        pass
    rows = schedule.actions
    return [str(rows[w][position[w]]) for w in workers if position[w] < len(rows[w]) or w in held_up]


@pytest.mark.parametrize("small", [False, True])
def test_a_stage_that_keeps_its_inputs_longer_than_the_one_before(small: bool) -> None:
    assert not stopped(LATE_WEIGHTS, small=small)
    assert activation_ring(LATE_WEIGHTS, 1).num_slots == 4


@pytest.mark.parametrize("small", [False, True])
def test_two_senders_that_would_wait_for_each_others_buffers(small: bool) -> None:
    """Stage 0 is held up by activations without a buffer, and stage 1, which would free one, by gradients."""
    validate(HELD_UP)
    assert not stopped(HELD_UP, small=small)


@pytest.mark.parametrize("small", [False, True])
def test_no_valid_schedule_stops_for_want_of_a_buffer(small: bool) -> None:
    generator = random.Random(0)
    for number in range(200):
        schedule = random_schedule(generator, generator.randint(2, 5), generator.randint(1, 9))
        validate(schedule)
        assert not stopped(schedule, small=small), f"schedule {number}: {schedule}"


@pytest.mark.parametrize("small", [False, True])
def test_no_valid_schedule_of_workers_with_several_stages_stops_for_want_of_a_buffer(small: bool) -> None:
    generator = random.Random(1)
    for number in range(200):
        num_stages = generator.randint(2, 6)
        placement = random_placement(generator, num_stages)
        schedule = random_schedule(generator, num_stages, generator.randint(1, 9), placement=placement)
        validate(schedule)
        assert not stopped(schedule, small=small), f"schedule {number}: {schedule}"


@pytest.mark.parametrize("name", NAMED)
def test_no_named_schedule_stops_for_want_of_a_buffer(name: str) -> None:
    for num_workers, num_microbatches in itertools.product((1, 2, 3, 4), (1, 2, 4, 7, 8)):
        for remat in ("never", "always"):
            schedule = named(name, num_workers, num_microbatches, remat=remat)
            assert not stopped(schedule, small=False), schedule

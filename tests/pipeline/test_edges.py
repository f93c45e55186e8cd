"""Rings: when receives are posted, that no buffer is overwritten while it is needed, that nothing stops for
want of one, and that on accelerators a wait for the whole device ends wherever it stands.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import HELD_UP, LATE_WEIGHTS, random_placement, random_schedule
from test_schedule import schedules

from gpipe_bench.pipeline import (
    NAMED,
    SLOTS,
    Action,
    Kind,
    Schedule,
    gpipe,
    named,
    one_f_one_b,
    replay,
    validate,
)
from gpipe_bench.pipeline.plan.edges import (
    SENDS_ON_THE_WAY,
    Direction,
    Edge,
    Ring,
    Rings,
    chain,
    refuse_other_orders,
    rings_of,
    turns,
)
from gpipe_bench.pipeline.plan.schedule import ends_of


def test_gpipe_posts_every_activation_at_once() -> None:
    ring = rings_of(gpipe(3, 4))[0, False].tight
    assert ring.initial == (0, 1, 2, 3)
    assert ring.slot == (0, 1, 2, 3)
    assert ring.following == (None,) * 4


def test_one_f_one_b_posts_as_buffers_become_free() -> None:
    """The example of the module's docstring."""
    ring = rings_of(one_f_one_b(3, 5))[0, False].tight
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
    for (source, back), rings in rings_of(schedule).items():
        for freed, microbatch in enumerate(rings.tight.following):
            if microbatch is not None and not back:
                message = Action(source, Kind.F, microbatch)
                if end[Action(source + 1, Kind.W, freed)] >= end[message]:
                    late.append(str(message))
    assert late == []


@pytest.mark.parametrize(("remat", "num_slots"), [("never", 2), ("always", 1), ("except_last", 1)])
def test_gradients_have_one_buffer_where_a_recomputation_hides_the_transfer(
    remat: str, num_slots: int
) -> None:
    rings = rings_of(gpipe(3, 4, remat=remat))[1, True]
    assert rings.tight.num_slots == num_slots
    assert rings.tight.initial == (3, 2)[:num_slots]
    assert rings.tight.order == (3, 2, 1, 0)
    assert rings.small.initial == (3, 2, 1, 0)  # small ones are all posted at once
    assert rings.small.following == (None,) * 4


@given(schedule=schedules(), data=st.data())
def test_no_buffer_is_used_twice_at_a_time(schedule: Schedule, data: st.DataObject) -> None:
    """Walks the row: what is needed has been posted, what is posted has a free buffer, and all comes to its
    turn.
    """
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    row = schedule.actions[stage]
    rings: list[tuple[Ring, tuple[Kind, ...]]] = []
    if stage > 0:
        rings.append((rings_of(schedule)[stage - 1, False].tight, (Kind.F,)))
        assert rings[-1][0].num_slots <= schedule.in_flight(stage - 1)
    if stage < schedule.num_stages - 1:
        rings.append((rings_of(schedule)[stage, True][data.draw(st.integers(0, 1))], (Kind.B,)))
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


class Walk:
    """The workers of a step in which `frozen` stands still before the action at `stop` of its row, if any.

    A message moves when it is sent and posted, in the order of its channel. `early` posts as soon as there is
    a slot, as where the host waits for messages.
    """

    def __init__(
        self,
        schedule: Schedule,
        frozen: int = -1,
        stop: int = 0,
        *,
        training: bool = True,
        early: bool = False,
        small: bool = False,
    ) -> None:
        self.schedule, self.frozen, self.stop, self.training = schedule, frozen, stop, training
        self.rings: dict[Direction, Rings] = {}
        none = (0,) * schedule.num_microbatches
        for key, each in rings_of(schedule, accelerated=not early).items():
            if training or not key[1]:
                tight = each.small if small else each.tight
                self.rings[key] = each._replace(
                    tight=tight, after=each.after or none, after_forward=each.after_forward or none
                )
        kinds = tuple(Kind) if training else (Kind.F,)
        self.rows = [[a for a in row if a.kind in kinds] for row in schedule.actions]
        workers = range(schedule.num_workers)
        self.queues = {
            (a, b, back): turns(schedule, b, a, back=back)
            for a in workers for b in workers for back in (False, True)
            if a != b and (training or not back)
        }  # fmt: skip
        self.position, self.calls = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
        self.sent: dict[tuple[int, int, bool], int] = dict.fromkeys(self.queues, 0)
        self.posted: dict[tuple[int, int, bool], int] = dict.fromkeys(self.queues, 0)
        self.local: set[tuple[int, int, bool]] = set()
        self.slotted: dict[Direction, set[int]] = {}
        for key, each in self.rings.items():
            ring = each.tight if training else (each.forward or each.tight)
            self.slotted[key] = set(ring.initial)

    def run(self) -> None:
        while any(self.advance(worker) for worker in range(self.schedule.num_workers)):
            pass

    def advance(self, worker: int) -> bool:
        if self.post(worker):
            return True
        row, position = self.rows[worker], self.position[worker]
        if position == len(row) or (worker == self.frozen and position == self.stop):
            return False
        if any(self.is_held_up(channel) for channel in self.queues if channel[0] == worker):
            return False
        action = row[position]
        if not self.has_input(worker, action):
            return False
        self.position[worker] += 1
        self.take(action)
        ends = {*ends_of(tuple(row))} if self.training else set()
        if action in ends:
            self.calls[worker] += 1
            for back in (False, True):
                key = action.stage - (not back), back
                if (each := self.rings.get(key)) is not None:
                    self.slotted[key] |= {each.tight.following[action.microbatch]} - {None}
            self.post(worker)
        if action.kind not in (Kind.R, Kind.W):
            self.send(worker, action)
        self.post(worker)
        return True

    def channel_of(self, action: Action) -> tuple[int, int, bool] | None:
        """By which what an action needs comes."""
        back = action.kind is not Kind.F
        other = action.stage + 1 if back else action.stage - 1
        if action.kind in (Kind.R, Kind.W) or not 0 <= other < self.schedule.num_stages:
            return None
        return self.schedule.worker(other), self.schedule.worker(action.stage), back

    def has_input(self, worker: int, action: Action) -> bool:
        channel = self.channel_of(action)
        if channel is None:
            return True
        if channel[0] == worker:
            return (action.stage, action.microbatch, channel[2]) in self.local
        index = self.queues[channel].index((action.stage, action.microbatch))
        # In a pass of forwards alone the next receive is posted before the message is looked at.
        return index < min(self.sent[channel], self.posted[channel])

    def take(self, action: Action) -> None:
        key = action.stage - 1, False
        each = self.rings.get(key)
        if not self.training and each is not None and each.forward is not None:
            self.slotted[key] |= {each.forward.following[action.microbatch]} - {None}

    def send(self, worker: int, action: Action) -> None:
        back = action.kind is not Kind.F
        other = action.stage - 1 if back else action.stage + 1
        if not 0 <= other < self.schedule.num_stages:
            return
        if self.schedule.worker(other) == worker:
            self.local.add((other, action.microbatch, back))
            return
        channel = (worker, self.schedule.worker(other), back)
        assert self.queues[channel][self.sent[channel]] == (other, action.microbatch)
        self.sent[channel] += 1
        self.calls[worker] += 1

    def post(self, worker: int) -> bool:
        before = sum(self.posted.values())
        for channel, queue in self.queues.items():
            if channel[1] != worker:
                continue
            while self.posted[channel] < len(queue):
                stage, m = queue[self.posted[channel]]
                key = stage - (not channel[2]), channel[2]
                each = self.rings[key]
                after = each.after[m] if self.training else each.after_forward[m]
                if m not in self.slotted[key] or self.calls[worker] < after:
                    break
                self.posted[channel] += 1
        return sum(self.posted.values()) > before

    def is_held_up(self, channel: tuple[int, int, bool]) -> bool:
        if not self.training and self.schedule.placement:
            return False
        return self.sent[channel] - SENDS_ON_THE_WAY > self.posted[channel]

    def waits_for_device(self) -> list[str]:
        """The kernels of the frozen worker that never end."""
        return [
            f"{channel}: {self.sent[channel]} sent, {self.posted[channel]} posted"
            for channel in self.queues
            if (channel[0] == self.frozen and self.sent[channel] > self.posted[channel])
            or (channel[1] == self.frozen and self.posted[channel] > self.sent[channel])
        ]


def stuck(schedule: Schedule, **options: bool) -> dict[tuple[int, int], list[str]]:
    """(worker, position in its row) at which a wait for the whole device never ends."""
    found = {}
    for worker in range(schedule.num_workers):
        walk = Walk(schedule, worker, **options)
        for stop in range(len(walk.rows[worker]) + 1):  # what could happen before still can
            walk.stop = stop
            walk.run()
            if kernels := walk.waits_for_device():
                found[worker, stop] = kernels
    return found


def goes_through(schedule: Schedule, **options: bool) -> bool:
    walk = Walk(schedule, **options)
    walk.run()
    return all(walk.position[worker] == len(row) for worker, row in enumerate(walk.rows))


def everything_ends(schedule: Schedule) -> None:
    for training in (True, False):
        assert goes_through(schedule, training=training), schedule
        assert not stuck(schedule, training=training), schedule


@pytest.mark.parametrize("name", NAMED)
def test_a_wait_for_the_device_ends_at_every_action_of_every_named_schedule(name: str) -> None:
    for num_workers, num_microbatches in itertools.product((1, 2, 4), (1, 4, 8)):
        for remat in ("never", "always"):
            everything_ends(named(name, num_workers, num_microbatches, remat=remat))


def test_a_wait_for_the_device_ends_at_every_action_of_any_valid_schedule() -> None:
    generator = random.Random(2)
    schedules = [LATE_WEIGHTS, HELD_UP]
    for _ in range(60):
        num_stages = generator.randint(2, 5)
        placement = random_placement(generator, num_stages) if generator.random() < 0.5 else ()
        schedules.append(random_schedule(generator, num_stages, generator.randint(1, 6), placement=placement))
    for schedule in schedules:
        everything_ends(schedule)


@pytest.mark.parametrize(("schedule", "number"), [(gpipe(4, 8), 24), (one_f_one_b(4, 8), 24)])
def test_receives_that_are_posted_when_they_have_a_slot_make_it_endless(
    schedule: Schedule, number: int
) -> None:
    """What the rule is for: without it, some of the places to wait at are traps."""
    assert goes_through(schedule, early=True)
    assert len(stuck(schedule, early=True)) == number


def test_a_send_waits_for_no_later_action_of_its_own_worker() -> None:
    """Rings of "breadth-first" get a slot more for it than where the host waits."""
    schedule = named("breadth-first", 2, 8)
    found = [
        max(
            rings.tight.num_slots for (_, back), rings in rings_of(schedule, accelerated=each).items() if back
        )
        for each in (False, True)
    ]
    assert found == [2, 4]


def test_a_stage_that_keeps_its_inputs_longer_than_the_one_before() -> None:
    assert rings_of(LATE_WEIGHTS)[0, False].tight.num_slots == 4


@pytest.mark.parametrize("small", [False, True])
def test_no_valid_schedule_stops_for_want_of_a_buffer(small: bool) -> None:
    """In `HELD_UP` stage 0 is held up by activations without a buffer, and stage 1, which would free one, by
    gradients.
    """
    generator = random.Random(0)
    found = [LATE_WEIGHTS, HELD_UP]
    for number in range(200):
        num_stages = generator.randint(2, 6)
        placement = random_placement(generator, num_stages) if number % 2 else ()
        found.append(random_schedule(generator, num_stages, generator.randint(1, 9), placement=placement))
    for schedule in found:
        validate(schedule)
        assert goes_through(schedule, early=True, small=small), schedule


@pytest.mark.parametrize("name", NAMED)
def test_no_named_schedule_stops_for_want_of_a_buffer(name: str) -> None:
    for num_workers, num_microbatches in itertools.product((1, 2, 3, 4), (1, 2, 4, 7, 8)):
        for remat in ("never", "always"):
            assert goes_through(named(name, num_workers, num_microbatches, remat=remat), early=True)


def test_portals_leave_the_rings_of_the_chain_as_they_are() -> None:
    """Its receives are posted when what they depend on is done, into a ring as its ends need it."""
    schedule, portal = one_f_one_b(4, 8), Edge(3, 0, 3, ("a",))
    found = rings_of(schedule, [portal], accelerated=True)
    for key, rings in rings_of(schedule, accelerated=True).items():
        assert found[key][:2] == rings[:2]
    # A portal to the last stage needs nothing of that worker, but a place: it keeps one micro-batch and
    # the first stage four.
    assert found[3, False].tight.num_slots == 4
    assert found[3, False].after[:4] == (0,) * 4
    # Its gradient needs all that the first worker sends before: the forward of the same micro-batch.
    assert found[3, True].after[0] >= 1
    assert found[3, True].after[3] >= 4


def test_portals_between_accelerators_in_another_order_are_refused() -> None:
    """Nothing else tells the micro-batches of an edge apart."""
    row = [Action.parse(text) for text in ["0F0", "0F1", "1F1", "1F0", "2F1", "2F0"]]
    back = [Action.parse(text) for text in ["2B0", "2B1", "1B0", "1B1", "0B0", "0B1"]]
    actions = tuple(tuple(a for a in (*row, *back) if (a.stage == 2) is last) for last in (False, True))
    schedule = Schedule("own", 3, 2, "never", actions, (0, 0, 1))
    with pytest.raises(ValueError, match=r"micro-batches in different orders \(\[0, 1\]\.\.\."):
        refuse_other_orders(schedule, [Edge(2, 0, 2, ("a",))])


def test_the_edges_of_a_chain_have_the_numbers_of_their_sources() -> None:
    assert chain(3) == (Edge(0, 0, 1), Edge(1, 1, 2))
    assert set(rings_of(named("zb-v", 2, 2))) == {(0, False), (0, True), (2, False), (2, True)}

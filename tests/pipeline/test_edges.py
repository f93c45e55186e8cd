"""Rings: when receives are posted, that no buffer is overwritten while it is needed, that nothing stops for
want of one, and that on accelerators a wait for the whole device ends wherever it stands.
"""

from __future__ import annotations

import itertools
import random

import pytest
from random_schedules import HELD_UP, LATE_WEIGHTS, random_placement, random_schedule

from gpipe_bench.pipeline import (
    NAMED,
    Action,
    Kind,
    Schedule,
    gpipe,
    named,
    one_f_one_b,
    validate,
)
from gpipe_bench.pipeline.plan.edges import (
    SENDS_ON_THE_WAY,
    Direction,
    Edge,
    Rings,
    refuse_other_orders,
    rings_of,
    turns,
)
from gpipe_bench.pipeline.plan.schedule import ends_of
from gpipe_bench.pipeline.ranks.connect import refuse_edges


def test_one_f_one_b_posts_as_buffers_become_free() -> None:
    """The example of the module's docstring."""
    ring = rings_of(one_f_one_b(3, 5))[0, False].tight
    assert ring.num_slots == 3
    assert ring.initial == (0, 1, 2)
    assert ring.following == (3, 4, None, None, None)
    assert ring.slot == (0, 1, 2, 0, 1)
    ring = rings_of(gpipe(3, 4))[0, False].tight  # every activation at once
    assert (ring.initial, ring.following) == ((0, 1, 2, 3), (None,) * 4)


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
    by_stage = gpipe(5, 4, remat=("always", "never", "except_last", "never", "always"))
    assert [rings_of(by_stage)[stage, True].tight.num_slots for stage in range(4)] == [1, 2, 1, 2]


class Walk:
    """The workers of a step in which `frozen` stands still before the action at `stop` of its row, if any.

    A message moves when it is sent and posted, in the order of its channel. No buffer is used twice at
    a time. `early` posts as soon as there is a slot, as where the host waits for messages.
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
        self.filled: set[tuple[Direction, int]] = set()  # buffers
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
                    self.filled.discard((key, each.tight.slot[action.microbatch]))
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
                if self.training:
                    assert (key, each.tight.slot[m]) not in self.filled
                    self.filled.add((key, each.tight.slot[m]))
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
    """And none stops for want of a buffer, where receives are posted as soon as there is a slot."""
    for num_workers, num_microbatches in itertools.product((1, 2, 4), (1, 4, 8)):
        for remat in ("never", "always"):
            schedule = named(name, num_workers, num_microbatches, remat=remat)
            everything_ends(schedule)
            assert goes_through(schedule, early=True)


def test_a_wait_for_the_device_ends_at_every_action_of_any_valid_schedule() -> None:
    generator = random.Random(2)
    schedules = [LATE_WEIGHTS, HELD_UP]
    for _ in range(40):
        num_stages = generator.randint(2, 5)
        placement = random_placement(generator, num_stages) if generator.random() < 0.5 else ()
        schedules.append(random_schedule(generator, num_stages, generator.randint(1, 6), placement=placement))
    for schedule in schedules:
        everything_ends(schedule)
    # What the rule is for: without it, some of the places to wait at are traps.
    assert len(stuck(gpipe(4, 8), early=True)) == 24


@pytest.mark.parametrize("small", [False, True])
def test_no_valid_schedule_stops_for_want_of_a_buffer(small: bool) -> None:
    """In `HELD_UP` stage 0 is held up by activations without a buffer, and stage 1, which would free one, by
    gradients.
    """
    generator = random.Random(0)
    found = [LATE_WEIGHTS, HELD_UP]
    for number in range(100):
        num_stages = generator.randint(2, 6)
        placement = random_placement(generator, num_stages) if number % 2 else ()
        found.append(random_schedule(generator, num_stages, generator.randint(1, 9), placement=placement))
    for schedule in found:
        validate(schedule)
        assert goes_through(schedule, early=True, small=small), schedule


def test_portals_between_accelerators_in_another_order_are_refused() -> None:
    """Nothing else tells the micro-batches of an edge apart."""
    row = [Action.parse(text) for text in ["0F0", "0F1", "1F1", "1F0", "2F1", "2F0"]]
    back = [Action.parse(text) for text in ["2B0", "2B1", "1B0", "1B1", "0B0", "0B1"]]
    actions = tuple(tuple(a for a in (*row, *back) if (a.stage == 2) is last) for last in (False, True))
    schedule = Schedule("own", 3, 2, "never", actions, (0, 0, 1))
    with pytest.raises(ValueError, match=r"micro-batches in different orders \(\[0, 1\]\.\.\."):
        refuse_other_orders(schedule, [Edge(2, 0, 2, ("a",))])


def test_more_portals_and_micro_batches_than_tags_are_refused() -> None:
    long = Schedule("long", 2**12, 2**12, "never", ((),) * 2**12)
    with pytest.raises(ValueError, match="portals between them with 4096 micro-batches"):
        refuse_edges(long, (), accelerated=False)

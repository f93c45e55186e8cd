"""When receives are posted on accelerators: a wait for the whole device ends, wherever it stands."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from random_schedules import HELD_UP, LATE_WEIGHTS, random_placement, random_schedule

from gpipe_bench.pipeline.plan.named import NAMED, gpipe, named, one_f_one_b
from gpipe_bench.pipeline.plan.receiving import posting
from gpipe_bench.pipeline.plan.receiving.posting import Posting, postings
from gpipe_bench.pipeline.plan.receiving.ring import (
    SENDS_ON_THE_WAY,
    RingKey,
    activation_ring,
    gradient_ring,
    turns,
)
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, ends_of


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
    ) -> None:
        self.schedule, self.frozen, self.stop, self.training = schedule, frozen, stop, training
        self.postings = early_postings(schedule) if early else postings(schedule)
        if not training:
            self.postings = {key: each for key, each in self.postings.items() if not key[1]}
        kinds = tuple(Kind) if training else (Kind.F,)
        self.rows = [[a for a in row if a.kind in kinds] for row in schedule.actions]
        workers = range(schedule.num_workers)
        self.queues = {
            (a, b, back): turns(schedule, b, a, gradients=back)
            for a in workers for b in workers for back in (False, True)
            if a != b and (training or not back)
        }  # fmt: skip
        self.position, self.calls = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
        self.sent: dict[tuple[int, int, bool], int] = dict.fromkeys(self.queues, 0)
        self.posted: dict[tuple[int, int, bool], int] = dict.fromkeys(self.queues, 0)
        self.local: set[tuple[int, int, bool]] = set()
        self.slotted: dict[RingKey, set[int]] = {}
        for key, each in self.postings.items():
            ahead = each.ring.order[: each.ahead]
            self.slotted[key] = set(each.ring.initial if training else ahead)

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
                if (each := self.postings.get((action.stage, back))) is not None:
                    following = each.ring.following[action.microbatch]
                    self.slotted[action.stage, back] |= {following} - {None}
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
        each = self.postings.get((action.stage, False))
        if not self.training and each is not None:
            position = each.ring.order.index(action.microbatch) + each.ahead
            self.slotted[action.stage, False] |= set(each.ring.order[position : position + 1])

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
                each = self.postings[stage, channel[2]]
                after = each.after[m] if self.training else each.after_forward[m]
                if m not in self.slotted[stage, channel[2]] or self.calls[worker] < after:
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


def early_postings(schedule: Schedule) -> dict[RingKey, Posting]:
    none = (0,) * schedule.num_microbatches
    return {
        (stage, back): Posting(ring, ring, none, none)
        for stage, back in postings(schedule)
        for ring in [(gradient_ring if back else activation_ring)(schedule, stage)]
    }


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
    """The rings of "breadth-first" get a slot more for it than where the host waits."""
    schedule = named("breadth-first", 2, 8)
    slots = {key: each.ring.num_slots for key, each in postings(schedule).items() if key[1]}
    assert slots == dict.fromkeys(slots, 3)
    assert {gradient_ring(schedule, stage).num_slots for stage, _ in slots} == {2}


def test_the_drawing_is_right() -> None:
    """Of the module's docstring: behind which action of stage 1 which receives are posted."""
    drawing = dict(
        re.findall(r"^    (at once|[FB]\d) +((?:[ag]\d ?)+)$", posting.__doc__ or "", re.MULTILINE)
    )
    schedule = one_f_one_b(3, 5)
    walk, found = Walk(schedule), {}
    row = walk.rows[1]
    seen = 0

    def look(where: str) -> None:
        nonlocal seen
        now = [f"{'g' if c[2] else 'a'}{walk.queues[c][i][1]}" for c in walk.queues if c[1] == 1
               for i in range(walk.posted[c])]  # fmt: skip
        if len(now) > seen:
            found[where] = sorted(set(now) - {each for posts in found.values() for each in posts})
            seen = len(now)

    walk.post(1)
    look("at once")
    while any(walk.advance(worker) for worker in (0, 2, 1)):
        done = walk.position[1]
        look(str(row[done - 1])[1:] if done else "at once")
    assert {where: sorted(posts.split()) for where, posts in drawing.items()} == found

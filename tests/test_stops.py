"""Where a schedule would stop: what `stop_of` says is what a run over a network with NCCL's rules does.

python -m tests.test_stops 1000      as many random schedules as that
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # as a program, too

from fakes.nccl_backend import NcclBackend, Pair
from fakes.nccl_world import Deadlock, World
from random_schedules import BOTH_LOOK_AWAY, HELD_UP, LATE_WEIGHTS, random_placement, random_schedule

from gpipe_bench.pipeline import NAMED, Action, Kind, Schedule, from_csv, named, validate
from gpipe_bench.pipeline.plan.edges import SENDS_ON_THE_WAY, rings_of
from gpipe_bench.pipeline.plan.files import stop_of
from gpipe_bench.pipeline.plan.schedule import channels, dependencies, ends_of

KINDS = list(Kind)


def ran(schedule: Schedule, buffers: int | None) -> list[tuple[int, str]]:
    """How many actions every rank takes over the fake network, and why it ends before its last if it sees
    that itself. It posts receives in the order of need into `buffers` places for each sender's stage.
    """
    world, needs = World(schedule.num_workers), dependencies(schedule)
    links = channels(schedule)
    for channel in links:
        pair = Pair(world, str(channel), (min(channel[:2]), max(channel[:2])))
        pair.joined = set(channel[:2])
        world.shared["pairs", str(channel)] = {pair._ranks: pair}
    taken, whys, kept = [0] * schedule.num_workers, [""] * schedule.num_workers, []
    ends = {action for stage in range(schedule.num_stages) for action in ends_of(schedule.row(stage))}

    def note(action: Action) -> torch.Tensor:
        return torch.tensor([action.stage, KINDS.index(action.kind), action.microbatch])

    def take(rank: int) -> str:
        inbox = {channel: wanted for channel, wanted in links.items() if channel[1] == rank}
        outbox = {
            message.source: channel
            for channel, sent in links.items()
            if channel[0] == rank
            for message in sent
        }
        ends_at = {
            channel: NcclBackend(world, rank, str(channel)) for channel in links if rank in channel[:2]
        }
        places: dict[Any, list[Any]] = {channel: [] for channel in inbox}
        sends: dict[Any, list[Any]] = defaultdict(list)
        free: dict[Any, float] = defaultdict(lambda: float("inf") if buffers is None else buffers)

        def post() -> None:
            for channel, wanted in inbox.items():
                while len(places[channel]) < len(wanted):
                    ring = wanted[len(places[channel])].target.stage, channel[2]
                    if not free[ring]:
                        break
                    free[ring] -= 1
                    place = torch.zeros(3, dtype=torch.int64)
                    places[channel].append((ends_at[channel].recv([place], channel[0], 0), place))

        post()
        mine: set[Action] = set()
        for action in schedule.actions[rank]:
            for pending in sends.values():
                while len(waiting := [work for work in pending if not work.is_done()]) > SENDS_ON_THE_WAY:
                    waiting[0].wait()
            if any(schedule.worker(need.stage) == rank and need not in mine for need in needs[action]):
                return "own"
            for channel, wanted in inbox.items():
                for (work, place), message in zip(places[channel], wanted, strict=False):
                    if message.target == action:
                        work.wait()
                        if not torch.equal(place, note(message.source)):
                            return "order"
                if action in [message.target for message in wanted[len(places[channel]) :]]:
                    return "buffer"
            mine.add(action)
            if action in outbox:
                kept.append(note(action))
                channel = outbox[action]
                sends[channel].append(ends_at[channel].send([kept[-1]], channel[1], 0))
            if action in ends:
                free[action.stage, False] += 1
                free[action.stage, True] += 1
                post()
            taken[rank] += 1
        for work in [work for pending in sends.values() for work in pending]:
            work.wait()
        return ""

    def end(rank: int) -> None:
        whys[rank] = take(rank)

    with suppress(Deadlock):
        for error in world.run(end):
            if error is not None:
                raise error
    return list(zip(taken, whys, strict=True))


def planted(generator: random.Random, schedule: Schedule) -> Schedule:
    """The schedule with one mistake in the order of a row: nothing is missing."""
    rows = [list(row) for row in schedule.actions]
    row = generator.choice(rows)
    if generator.random() < 0.5:  # two actions trade their places
        one, other = generator.randrange(len(row)), generator.randrange(len(row))
        row[one], row[other] = row[other], row[one]
    elif generator.random() < 0.5:  # one comes early or late
        row.insert(generator.randrange(len(row)), row.pop(generator.randrange(len(row))))
    else:  # a stage takes one kind of its actions in another order of the micro-batches
        action = generator.choice(row)
        places = [i for i, each in enumerate(row) if each[:2] == action[:2]]
        for place, moved in zip(places, generator.sample([row[i] for i in places], len(places)), strict=True):
            row[place] = moved
    return replace(schedule, actions=tuple(map(tuple, rows)))


def agreement(number: int, seed: int = 36) -> Counter[str]:
    """How often each answer comes out for random schedules, every second with a mistake of order. Whatever
    is said of one must be what its run does, on every worker.
    """
    generator, answers = random.Random(seed), Counter[str]()
    for index in range(number):
        num_stages = generator.randint(2, 6)
        placement = random_placement(generator, num_stages) if generator.random() < 0.5 else ()
        schedule = random_schedule(generator, num_stages, generator.randint(1, 6), placement=placement)
        kind = "as it was"
        if index % 2:
            schedule, kind = planted(generator, schedule), "with a mistake"
        buffers = generator.choice([None, None, 1, 2, 3])
        stop, run = stop_of(schedule, buffers), ran(schedule, buffers)
        lengths = [len(row) for row in schedule.actions]
        said = lengths if stop is None else list(stop.taken)
        assert said == [taken for taken, _ in run], (index, schedule, buffers)
        whys = {wait.worker: wait.why for wait in stop.waits} if stop else {}
        for worker, (_, why) in enumerate(run):
            assert not why or why == whys[worker], (index, schedule, buffers)
        first = "runs" if stop is None else f"stops: {stop.circle[0].why}"
        answers[f"{kind}, {'any' if buffers is None else 'few'} buffers: {first}"] += 1
    return answers


def test_what_is_said_is_what_a_run_does() -> None:
    answers = agreement(60)
    assert {answer.rpartition(" ")[2] for answer in answers} == {"runs", "own", "message", "buffer", "order"}
    assert not any(answer.startswith("as it was, any") and "stops" in answer for answer in answers)


@pytest.mark.parametrize("name", NAMED)
def test_no_schedule_of_ours_stops(name: str) -> None:
    """Neither with any number of buffers, nor with as many as the engine's rings have at most."""
    for remat in ("never", "always"):
        schedule = named(name, 3, 5, remat=remat)
        most = max(rings.tight.num_slots for rings in rings_of(schedule).values())
        assert stop_of(schedule) is None
        assert stop_of(schedule, most) is None


@pytest.mark.parametrize(
    "schedule", [LATE_WEIGHTS, HELD_UP, BOTH_LOOK_AWAY], ids=lambda schedule: schedule.name
)
def test_few_buffers_stop_what_is_valid(schedule: Schedule) -> None:
    validate(schedule)
    assert stop_of(schedule) is None
    stop = stop_of(schedule, 1)
    assert stop is not None
    assert "buffer" in {wait.why for wait in stop.circle}


@pytest.mark.parametrize(
    ("text", "buffers", "said"),
    [
        (
            "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", None,
            ["worker 1 stands at 1F1 and is sent what 0F0 made: worker 0 sends that first, and messages "
             "between two workers are matched by their order"],
        ),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", None,
            ["worker 0 stands at 0B0 and waits for what 1B0 makes, which worker 1 takes only behind 1F1",
             "worker 1 stands at 1F1 and waits for what 0F1 makes, which worker 0 takes only behind 0B0"],
        ),
        (
            "0F0,0B0\n1B0,1F0", None,
            ["worker 1 stands at 1B0, which needs 1F0; that stands behind it in the same row"],
        ),
        (
            "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1", 1,
            ["worker 1 stands at 1F1, whose message has no buffer; 1B0 gives one back, which stands behind "
             "it"],
        ),
        (
            "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1B1,1F1,1F2,1B2,1F3,1B3", 1,
            ["worker 1 stands at 1B1, which needs 1F1; that stands behind it in the same row"],
        ),
        (  # worker 0 has three messages on their way, for which worker 1 has one buffer
            "0F0,0F1,0F2,0F3,0F4,2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,2F4,2B4,0B0,0B1,0B2,0B3,0B4\n"
            "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,1F4,1B4", 1,
            ["worker 0 stands at 0F4 and waits until worker 1 has buffers for what it was sent; 1B0 gives "
             "one back, which worker 1 takes next",
             "worker 1 stands at 1B0 and waits for what 2B0 makes, which worker 0 takes only behind 0F4"],
        ),
    ],
)  # fmt: skip
def test_the_circle_in_words(text: str, buffers: int | None, said: list[str]) -> None:
    stop = stop_of(from_csv(text), buffers)
    assert stop is not None
    assert list(stop.words()) == said


if __name__ == "__main__":
    for answer, times in sorted(agreement(int(sys.argv[1])).items()):
        print(f"{times:5}  {answer}")

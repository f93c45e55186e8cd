"""Several stages per worker: what is derived from such rows, and which rows are refused."""

from __future__ import annotations

import dataclasses
import itertools
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_placement, random_schedule
from real_steps import Step, compare
from torch import nn

from gpipe_bench.pipeline import (
    FREE,
    NAMED,
    SLOTS,
    Kind,
    Link,
    Schedule,
    Timeline,
    draw,
    from_csv,
    named,
    replay,
    to_csv,
    validate,
)
from gpipe_bench.pipeline.plan.edges import turns
from gpipe_bench.pipeline.plan.walk import channels, dependencies, execution_order, transfers
from gpipe_bench.pipeline.ranks.connect import refuse_edges
from gpipe_bench.planner.predict import breakdown


def written(*rows: str, remat: str = "never") -> Schedule:
    return from_csv("\n".join(row.replace(" ", ",") for row in rows), remat=remat)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Random rows on a random placement, or a named schedule."""
    if draw(st.booleans()):
        sizes = draw(st.tuples(st.integers(1, 4), st.integers(1, 8)))
        remat = draw(st.sampled_from(["never", "always", "except_last"]))
        return named(draw(st.sampled_from(sorted(NAMED))), *sizes, remat=remat)
    generator = random.Random(draw(st.integers(0, 2**32)))
    num_stages = generator.randint(1, 6)
    placement = random_placement(generator, num_stages)
    return random_schedule(generator, num_stages, generator.randint(1, 6), placement=placement)


def test_a_schedule_knows_its_workers() -> None:
    schedule = named("zb-v", 2, 3)
    assert (schedule.num_workers, schedule.num_stages) == (2, 4)
    assert [schedule.worker(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert [schedule.stages_of(worker) for worker in range(2)] == [(0, 3), (1, 2)]
    row = [action for action in schedule.actions[0] if action.stage == 3]
    assert list(schedule.row(3)) == row
    assert str(row[0]) == "3F0"
    assert schedule.in_flight(0) == 3


@given(schedules())
def test_valid_schedules_run_through(schedule: Schedule) -> None:
    """In the order of one process and in the replay alike, and what is needed comes before."""
    validate(schedule)
    order = execution_order(schedule)
    position = {action: i for i, action in enumerate(order)}
    timeline = replay(schedule, SLOTS)
    event = {e.action: e for e in timeline.events}
    assert sorted(order) == sorted(schedule) == sorted(event)
    for action, needs in dependencies(schedule).items():
        for need in needs:
            assert position[need] < position[action]
            assert event[need].end_s <= event[action].start_s
    for worker, row in enumerate(schedule.actions):
        mine = schedule.stages_of(worker)
        assert [action for action in order if action.stage in mine] == list(row)
        assert [e.action for e in timeline.of_worker(worker)] == list(row)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(timeline.of_worker(worker)))


@given(schedules())
def test_messages_travel_in_the_order_in_which_they_are_posted(schedule: Schedule) -> None:
    """Every message is in one channel, or stays on its worker; sends, turns and needs agree."""
    between = channels(schedule)
    travelling = [message for messages in between.values() for message in messages]
    staying = [m for m in transfers(schedule) if m not in set(travelling)]
    assert len(travelling) + len(staying) == 2 * (schedule.num_stages - 1) * schedule.num_microbatches
    for message in staying:
        assert schedule.worker(message.source.stage) == schedule.worker(message.target.stage)
    place = {action: i for row in schedule.actions for i, action in enumerate(row)}
    for (source, target, backward), messages in between.items():
        assert source != target
        assert [place[m.source] for m in messages] == sorted(place[m.source] for m in messages)
        assert [place[m.target] for m in messages] == sorted(place[m.target] for m in messages)
        assert list(turns(schedule, target, source, back=backward)) == [
            (m.target.stage, m.target.microbatch) for m in messages
        ]


@given(schedules(), st.sampled_from([FREE, Link("slow", 0.5, 3), Link("shared", 0.25, 2, True)]))
def test_a_breakdown_accounts_for_every_worker(schedule: Schedule, link: Link) -> None:
    num_bytes = [1.0] * (schedule.num_stages - 1)
    found = breakdown(schedule, SLOTS, link, activation_bytes=num_bytes, update_s=[0.5] * schedule.num_stages)
    step = found.timeline
    total = schedule.num_workers * step.makespan_s
    assert float(sum(found.seconds.values())) == pytest.approx(total)
    assert found.seconds["weight update"] == Fraction(schedule.num_stages, 2)
    assert sum(step.worker_busy_s(worker) for worker in range(step.num_workers)) == pytest.approx(
        sum(step.busy_s(stage) for stage in range(step.num_stages))
    )
    again = Timeline.from_data(step.to_data())
    assert again == step
    assert again.placement == schedule.placement


@given(schedules())
def test_a_table_says_it_all(schedule: Schedule) -> None:
    assert from_csv(to_csv(schedule), schedule.name, schedule.remat) == schedule


def test_what_a_worker_sends_to_itself_takes_no_time_and_no_link() -> None:
    """Stages 1 and 2 are on worker 1: a message of 10 s each way to and from worker 0 alone."""
    schedule = written("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    step = replay(schedule, {Kind.F: 1, Kind.B: 2}, Link("slow", latency_s=10))
    assert [message.name for message in step.messages] == ["0F0->1", "2F0->3", "3B0->2", "1B0->0"]
    assert step.makespan_s == 4 * 1 + 4 * 2 + 4 * 10
    assert draw(replay(schedule, SLOTS)).splitlines() == [
        "worker 0 | 0F0 .   .   3F0 3B0 3B0 .   .   .   .   0B0 0B0",
        "worker 1 | .   1F0 2F0 .   .   .   2B0 2B0 1B0 1B0",
    ]


def test_any_change_of_a_row_is_refused_or_runs() -> None:
    """Two actions of a worker swapped: `validate` finds what the replay would stop at, and nothing else."""
    generator = random.Random(3)
    refused = 0
    for _ in range(150):
        schedule = named(generator.choice(sorted(NAMED)), generator.randint(2, 3), generator.randint(2, 5))
        worker = generator.randrange(schedule.num_workers)
        row = list(schedule.actions[worker])
        a = generator.randrange(len(row) - 1)
        row[a], row[a + 1] = row[a + 1], row[a]
        rows = (*schedule.actions[:worker], tuple(row), *schedule.actions[worker + 1 :])
        changed = dataclasses.replace(schedule, actions=rows)
        try:
            validate(changed)
        except ValueError:
            refused += 1
            continue
        assert len(replay(changed, SLOTS).events) == sum(map(len, rows))
    assert 10 < refused < 140


@pytest.mark.parametrize("name", ["breadth-first", "interleaved"])
@pytest.mark.parametrize("remat", ["never", "always"])
def test_what_a_worker_holds_is_that_of_real_steps(name: str, remat: str) -> None:
    """Its stages added up action by action, and messages from when they are sent: in one process those of an
    interleaved worker wait for it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 32), nn.GELU(), nn.Linear(32, 160), nn.Identity(),
        nn.Linear(160, 24), nn.Linear(24, 4),
    )  # fmt: skip
    schedule, batch, target = named(name, 2, 4, remat=remat), torch.randn(256, 8), torch.randn(256, 4)
    counted, modelled = compare(model, batch, target, nn.functional.mse_loss, Step(4, 4, remat, schedule))
    assert len(modelled) == schedule.num_workers
    for peak, found in zip(counted.peaks, modelled, strict=True):
        assert found.peak == pytest.approx(peak, rel=0.01)


def test_more_portals_and_micro_batches_than_tags_are_refused() -> None:
    long = Schedule("long", 2**12, 2**12, "never", ((),) * 2**12)
    with pytest.raises(ValueError, match="portals between them with 4096 micro-batches"):
        refuse_edges(long, (), accelerated=False)

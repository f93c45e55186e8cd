"""Copies of graphs to the host and back: both rules, replayed and modelled, against brute force."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_bench.pipeline import (
    SLOTS,
    Boundary,
    Kind,
    Profiler,
    Schedule,
    Timeline,
    bytes_of_stages,
    named,
    peak_bytes,
    replay,
)
from gpipe_bench.pipeline.memory.workers import action_bytes
from gpipe_bench.pipeline.plan.links import BACKWARD, Copy, Offload, at_once, away, in_slots, longest
from gpipe_bench.pipeline.plan.schedule import ends_of

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half")
copy_seconds = st.fractions(min_value=Fraction(1, 16), max_value=6, max_denominator=16)


@st.composite
def offloaded(draw: st.DrawFn) -> tuple[Schedule, Timeline, Offload, Timeline]:
    """A schedule, replayed without copies and with those of some stages."""
    schedule = named(draw(st.sampled_from(NAMES)), draw(st.integers(1, 4)), draw(st.integers(1, 9)))
    plain = replay(schedule, SLOTS)
    stages = draw(st.sets(st.integers(0, schedule.num_stages - 1)))
    copy_s = [draw(copy_seconds) for _ in range(schedule.num_stages)]
    if draw(st.booleans()):
        offload = in_slots(schedule, stages, copy_s, plain)
    else:
        offload = at_once(schedule, stages, copy_s, draw(st.sampled_from((1, 2))))
    return schedule, plain, offload, replay(schedule, SLOTS, offload=offload)


@settings(max_examples=50)
@given(offloaded())
def test_copies_keep_the_rules_and_what_is_alive_is_what_brute_force_counts(case) -> None:
    schedule, plain, offload, timeline = case
    begin = {event.action: event.start_s for event in timeline.events}
    end = {event.action: event.end_s for event in timeline.events}
    assert len(timeline.copies) == sum(map(len, offload.copies))
    for worker, row in enumerate(schedule.actions):
        mine = [span for span in timeline.copies if span.stage in schedule.stages_of(worker)]
        for way in ("out", "in") if offload.engines == 2 else ("",):  # one after another on an engine
            times = sorted((s.start_s, s.end_s) for s in mine if s.name.startswith(way))
            assert all(a[1] <= b[0] for a, b in pairwise(times))
        spans = {span.name: span for span in mine}
        gone = []
        for action in row:
            out, back = (spans.get(f"{way} {action.stage}F{action.microbatch}") for way in ("out", "in"))
            if action.kind is Kind.F and out:
                assert end[action] <= out.start_s < out.end_s <= back.start_s
                assert out.end_s - out.start_s == offload.copy_s[action.stage]
                gone.append((out.end_s, back.start_s))
            if action.kind in BACKWARD and back:
                assert back.end_s <= begin[action]
        lives = [
            (begin[a], end[b]) for a in row if a.kind is Kind.F for b in ends_of(row) if a[::2] == b[::2]
        ]
        alive = dict(timeline.worker_live_activations(worker))
        for at_s, count in alive.items():  # from then on
            held = sum(a <= at_s < b for a, b in lives) - sum(a <= at_s < b for a, b in gone)
            assert count == held, at_s
    if offload.engines == 1 and timeline.copies and _is_in_slots(offload, schedule, plain):
        assert timeline.makespan_s == plain.makespan_s
    assert Timeline.from_data(timeline.to_data()) == timeline


def _is_in_slots(offload: Offload, schedule: Schedule, plain: Timeline) -> bool:
    stages = {copy.stage for row in offload.copies for copy in row}
    return in_slots(schedule, stages, offload.copy_s, plain) == offload


@pytest.mark.parametrize("name", NAMES)
def test_copies_in_slots_never_make_a_step_longer(name: str) -> None:
    """Whatever they take: what does not fit between stays."""
    schedule = named(name, 4, 12)
    plain, counts = replay(schedule, SLOTS), []
    for sixteenths in range(1, 80, 3):
        offload = in_slots(
            schedule, range(schedule.num_stages), [sixteenths / 16] * schedule.num_stages, plain
        )
        counts.append(sum(map(len, offload.copies)))
        assert replay(schedule, SLOTS, offload=offload).makespan_s == plain.makespan_s
    assert counts[0] > 0 == counts[-1] or name in ("gpipe", "interleaved")


def test_one_worker_by_hand() -> None:
    """F F F B B B of 1 and 2 slots, copies of 1: two graphs go out and come in while others are at work.

    F0 F1 F2 B2 B2 B1 B1 B0 B0
       o0 o1 .  i1 .  i0
    """
    schedule = named("gpipe", 1, 3)
    timeline = replay(schedule, SLOTS, offload=at_once(schedule, [0], [1.0]))
    found = [(span.name, span.start_s, span.end_s) for span in timeline.copies]
    assert found == [("out 0F0", 1, 2), ("out 0F1", 2, 3), ("in 0F1", 3, 4), ("in 0F0", 5, 6)]
    assert timeline.makespan_s == 9
    assert [event.start_s for event in timeline.events] == [0, 1, 2, 3, 5, 7]
    assert max(alive for _, alive in timeline.live_activations(0)) == 2
    slow = replay(schedule, SLOTS, offload=at_once(schedule, [0], [4.0], 1))
    assert slow.makespan_s == 4 * 4 + 1 + 2  # F0, four copies on one engine one after another, B0


def test_what_waits_longest_goes_first() -> None:
    schedule = named("interleaved", 2, 4)
    assert longest(replay(schedule, SLOTS), 1) == (0, 1)
    assert longest(replay(schedule, SLOTS), 2) == (0, 1, 2, 3)


def test_the_memory_model_leaves_out_what_is_with_the_host() -> None:
    """Each action holds a graph less for each that is away from its begin to its end."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh())
    example = Boundary.of(torch.empty(16, 8))
    layers, loss = Profiler().model(model, nn.functional.mse_loss, example, example)
    schedule = named("gpipe", 2, 6)
    stages = bytes_of_stages(layers, loss, [range(0, 2), range(2, 4)])
    timeline = replay(schedule, SLOTS, offload=at_once(schedule, [0, 1], [0.5, 0.5]))
    gone = away(timeline)
    plain = action_bytes(stages, schedule, "sgd", receive_ahead=1)
    found = peak_bytes(stages, schedule, "sgd", receive_ahead=1, away=gone)
    for worker in range(2):
        forwards = [plain[action] for action in schedule.actions[worker][:5]]
        (graph,) = {b - a for a, b in pairwise(forwards)}
        expected = [plain[a] - graph * gone[a].get(worker, 0) for a in schedule.actions[worker]]
        assert found[worker] == max(expected) < max(plain[a] for a in schedule.actions[worker])
    assert peak_bytes(stages, schedule, "sgd", receive_ahead=1) == tuple(
        max(plain[a] for a in row) for row in schedule.actions
    )


def test_what_is_recomputed_stays() -> None:
    schedule = named("1f1b", 3, 6, remat="always")
    assert at_once(schedule, range(3), [1.0] * 3).copies == ((), (), ())


OUT, IN = Copy(0, 0, False, 1), Copy(0, 0, True, 2)

"""When receives are posted, and that no buffer is overwritten while it is needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import schedules

from gpipe_bench.pipeline.plan.ring import Ring, activation_ring, gradient_ring
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule, gpipe, one_f_one_b


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


@settings(deadline=None)
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

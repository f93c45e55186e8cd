"""Which connections a schedule needs, who learns what from whom, in which order receives are posted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from gpipe_bench.pipeline import Kind, Schedule, gpipe, named
from gpipe_bench.pipeline.plan.edges import rings_of, turns
from gpipe_bench.pipeline.plan.schedule import ends_of
from gpipe_bench.pipeline.ranks.connect import (
    MOST_TENSORS,
    connection_names,
    first_tag,
    header_chain,
    loss_chain,
    loss_route,
    peers,
    refuse_edges,
)
from gpipe_bench.pipeline.ranks.ends import MessageSpec, ReceiveQueue, Receiver
from gpipe_bench.pipeline.ranks.wire import Connection, TensorSpec

CPU = torch.device("cpu")


class Posted:
    """A backend that keeps the tags of what is posted; every message is there at once."""

    def __init__(self) -> None:
        self.tags: list[int] = []

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        self.tags.append(tag)
        return self

    def wait(self) -> None: ...


def test_who_learns_from_whom() -> None:
    for schedule in (gpipe(3, 2), named("zb-v", 3, 2), named("interleaved", 3, 2)):
        assert header_chain(schedule) == (0, 1, 2)
        for accelerated in (False, True):
            routes = [loss_route(schedule, rank, accelerated=accelerated) for rank in range(3)]
            heard = [(source, rank) for rank, (source, _) in enumerate(routes) if source is not None]
            told = [(rank, target) for rank, (_, targets) in enumerate(routes) for target in targets]
            assert sorted(heard) == sorted(told)
    assert loss_route(gpipe(3, 2), 2, accelerated=False) == (None, (1, 0))
    assert loss_route(gpipe(3, 2), 1, accelerated=False) == (2, ())
    assert loss_route(gpipe(3, 2), 1, accelerated=True) == (2, (0,))
    assert loss_route(named("zb-v", 3, 2), 0, accelerated=False) == (None, (1, 2))
    assert loss_chain(named("zb-v", 3, 2)) == (0, 1, 2)


def test_the_connections_that_a_schedule_needs() -> None:
    plain = {(False, True): "activations", (True, False): "gradients"}
    both = {**plain, (False, False): "activations down", (True, True): "gradients up"}
    assert connection_names(gpipe(3, 2)) == connection_names(gpipe(1, 2)) == plain
    assert connection_names(named("zb-v", 3, 2)) == connection_names(named("interleaved", 2, 2)) == both
    with pytest.raises(ValueError, match="portals between them with 4096 micro-batches"):
        refuse_edges(Schedule("long", 2**12, 2**12, "never", ((),) * 2**12), (), accelerated=False)


def test_peers() -> None:
    """Whoever sends tensors, the header or the loss, and whoever gets them."""
    assert [peers(gpipe(4, 2), rank) for rank in range(4)] == [{1, 3}, {0, 2, 3}, {1, 3}, {0, 1, 2}]
    assert peers(named("interleaved", 4, 4), 0) == {1, 3}
    assert peers(named("zb-v", 4, 4), 3) == {0, 2}
    assert peers(gpipe(1, 2), 0) == set()


@pytest.mark.parametrize("name", ["interleaved", "v-min", "breadth-first", "zb-v"])
def test_receives_are_posted_in_the_order_in_which_messages_leave(name: str) -> None:
    """Walks the row of each worker: over all stages receives are posted in one order."""
    schedule, spec = named(name, 2, 7), MessageSpec((TensorSpec((256,), (1,), torch.float32),))
    for rank, back in itertools.product(range(2), (False, True)):
        backend, row = Posted(), schedule.actions[rank]
        ends, wanted = set(ends_of(row)), turns(schedule, rank, 1 - rank, back=back)
        queue = ReceiveQueue(Connection(backend, 0, {}), 1 - rank, None, back=back)
        receivers = {}
        for stage, _ in wanted:
            direction = stage - (not back), back
            tags = [first_tag(direction, m, 7) for m in range(7)]
            receivers.setdefault(stage, Receiver(queue, rings_of(schedule)[direction], CPU, tags))
        queue.order = [receivers[stage] for stage, _ in wanted]
        for receiver in receivers.values():
            receiver.begin({1: spec}, (1,) * 7, training=True)
        queue.post()
        for action in row:
            if action.stage not in receivers:
                continue
            if action.kind in ((Kind.B, Kind.I) if back else (Kind.F,)):
                receivers[action.stage].take(action.microbatch, action)
            if action in ends:
                receivers[action.stage].release(action.microbatch)
        assert backend.tags == [first_tag((stage - (not back), back), m, 7) for stage, m in wanted]
        assert len(set(backend.tags)) == len(backend.tags)
        assert all(tag % MOST_TENSORS == 0 for tag in backend.tags)

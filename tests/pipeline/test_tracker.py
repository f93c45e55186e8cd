"""Storages are counted once each, from birth to death, whatever looks at them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_bench.pipeline.memory.tracker import EventLog, LiveMemory

KIB = 1024


Empty = Callable[[int], torch.Tensor]


@pytest.fixture(params=["real", "fake", "meta"])
def empty(request: pytest.FixtureRequest) -> Iterator[Empty]:
    """Makes a tensor of so many KiB, of each kind."""
    if request.param == "fake":
        with FakeTensorMode():
            yield lambda kib: torch.empty(kib * KIB // 4)
    else:
        device = "meta" if request.param == "meta" else "cpu"
        yield lambda kib: torch.empty(kib * KIB // 4, device=device)


def test_a_tensor_counts_from_its_operation_to_its_last_reference(empty: Empty) -> None:
    with LiveMemory() as memory:
        a = empty(4)
        b = a + 1
        assert memory.live_bytes[""] == 8 * KIB
        del a
        assert memory.live_bytes[""] == 4 * KIB
        del b
    assert memory.live_bytes[""] == 0
    assert memory.peak_bytes[""] == 8 * KIB


def test_views_and_in_place_results_share_the_storage(empty: Empty) -> None:
    with LiveMemory() as memory:
        a = empty(4)
        views = [a[:10], a.view(2, -1), a.t(), a.detach(), a.expand(3, -1), *a.chunk(2), a.relu_(), a.add_(1)]
        assert memory.live_bytes[""] == 4 * KIB
        del a
        assert memory.live_bytes[""] == 4 * KIB, "a view keeps the whole storage"
        views.clear()
        assert memory.live_bytes[""] == 0


def test_storages_from_before_do_not_count_unless_watched(empty: Empty) -> None:
    old, parameter = empty(4), empty(8)
    with LiveMemory() as memory:
        with memory.owned_by("stage"):
            memory.watch([parameter, parameter[:5]])
        kept = old[:3].add_(1), old.view(-1), parameter.view(-1)
        assert dict(memory.live_bytes) == {"stage": 8 * KIB}
        del kept, parameter
        assert memory.live_bytes["stage"] == 0


def test_all_results_of_an_operation_count() -> None:
    with LiveMemory() as memory:
        pooled, where = nn.functional.max_pool2d_with_indices(torch.zeros(1, 1, 32, 32), 2)
        assert memory.live_bytes[""] == pooled.nbytes + where.nbytes == 16 * 16 * (4 + 8)


def test_the_owner_is_who_was_running_at_birth_and_owners_nest() -> None:
    with LiveMemory() as memory:
        with memory.owned_by(0):
            a = torch.empty(256)
            with memory.owned_by(1):
                b = a.clone()
            c = a.clone()
        with memory.owned_by(1):
            del a, c  # dies while another runs: leaves its owner's account
        assert (memory.live_bytes[0], memory.live_bytes[1]) == (0, KIB)
        assert (memory.peak_bytes[0], memory.peak_bytes[1]) == (2 * KIB, KIB)
        memory.reset_peaks()
        assert (memory.peak_bytes[0], memory.peak_bytes[1]) == (0, KIB)
        del b


def test_an_owner_is_given_back_after_an_error() -> None:
    memory = LiveMemory()
    with memory:
        with pytest.raises(RuntimeError, match="boom"), memory.owned_by(1):
            raise RuntimeError("boom")
        a = torch.empty(256)
        assert dict(memory.live_bytes) == {"": a.nbytes}


def test_the_graph_keeps_what_backward_needs_and_gradients_appear_in_it() -> None:
    layer = nn.Linear(64, 32)
    x = torch.randn(8, 64)
    with LiveMemory() as memory:
        y = layer(x).tanh()
        assert memory.live_bytes[""] == y.nbytes, "tanh keeps its result, linear its input"
        y.sum().backward()
        del y
        gc.collect()
        assert memory.live_bytes[""] == (64 * 32 + 32) * 4, "gradients stay"


def test_an_event_log_tells_births_and_deaths_in_order() -> None:
    with EventLog() as log:
        a = torch.empty(256)
        b = a + a.view(-1)
        del a
        c = b.sigmoid()
        del b, c
    assert log.sizes == [KIB, KIB, KIB]
    assert log.events == [1, 2, -1, 3, -2, -3]
    assert log.alive == set()


def test_an_address_used_again_is_a_new_storage() -> None:
    with EventLog() as log:
        for _ in range(20):
            torch.empty(1000)
    assert log.events == [sign * number for number in range(1, 21) for sign in (1, -1)]

"""Messages through shared memory, between the two ends of one socket, here in one process."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_bench.pipeline.ranks import connect
from gpipe_bench.pipeline.ranks.connect import neighbours
from gpipe_bench.pipeline.ranks.shared_memory import Neighbour

TIMEOUT_S = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[Neighbour, Neighbour]]:
    pair = [Neighbour(link, TIMEOUT_S) for link in socket.socketpair()]
    yield pair[0], pair[1]
    for end in pair:
        end.close()


def buffer_for(end: Neighbour, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Memory to receive a tensor into, and the tensor it will be."""
    memory = end.empty(tensor.numel() * tensor.element_size())
    return memory, memory.view(tensor.dtype).view(tensor.shape)


def test_both_write_more_than_a_socket_holds(ends: tuple[Neighbour, Neighbour]) -> None:
    """Neither reads before it has written: each takes in what the other writes while it waits for room."""
    many = 2000

    def exchange(end: Neighbour) -> list[float]:
        buffers = [buffer_for(end, torch.zeros(1)) for _ in range(many)]
        arrivals = [end.post(0, number, memory) for number, (memory, _) in enumerate(buffers)]
        end.flush()
        departures = [end.send(0, number, torch.tensor([float(number)])) for number in range(many)]
        for each in (*arrivals, *departures):
            each.wait()
        return [float(tensor) for _, tensor in buffers]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, ends)) == [list(range(many))] * 2


def test_shared_memory_is_given_out_again_when_nothing_lives_in_it(ends: tuple[Neighbour, Neighbour]) -> None:
    other, end = ends

    def received() -> Tensor:
        memory, _ = buffer_for(end, torch.zeros(16))
        arrival = end.post(0, 0, memory)
        end.flush()
        other.send(0, 0, torch.ones(16))
        arrival.wait()
        return memory

    memory = received()
    address, view = memory.data_ptr(), memory[8:16]
    del memory
    its_address = received().data_ptr()
    assert its_address != address
    assert received().data_ptr() == its_address
    del view
    assert received().data_ptr() == address


def test_the_end_of_a_neighbour_is_an_error_not_a_wait(ends: tuple[Neighbour, Neighbour]) -> None:
    a, b = ends
    arrival = b.post(0, 0, b.empty(8))
    departure = a.send(0, 1, torch.zeros(2))
    b.close()
    with pytest.raises(RuntimeError, match="closed"):
        departure.wait()
    with pytest.raises(RuntimeError, match="closed"):
        a.send(0, 0, torch.zeros(2)).wait()
    with pytest.raises(RuntimeError, match="closed"):
        arrival.wait()
    link, other = socket.socketpair()
    late = Neighbour(link, 0.05)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.05 s"):
        late.post(0, 0, late.empty(8)).wait()
    other.close()


def test_waiting_for_one_neighbour_moves_the_other_along() -> None:
    """The middle one waits for the right; what it owes the left must not wait with it."""
    left, middle_left = (Neighbour(link, TIMEOUT_S) for link in socket.socketpair())
    middle_right, right = (Neighbour(link, TIMEOUT_S) for link in socket.socketpair())
    middle_left.introduce(middle_right)
    middle_right.introduce(middle_left)
    middle_left.send(0, 0, torch.ones(1))
    wanted = middle_right.post(0, 0, middle_right.empty(4))
    received: list[float] = []

    def others() -> None:
        memory, tensor = buffer_for(left, torch.zeros(1))
        left.post(0, 0, memory).wait()
        received.append(float(tensor))
        right.send(0, 0, torch.zeros(1)).wait()

    thread = threading.Thread(target=others)
    thread.start()
    wanted.wait()
    thread.join()
    assert received == [1.0]


@pytest.mark.parametrize("why", ["another network", "unwilling"])
def test_where_one_rank_is_out_of_reach_all_take_the_network(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Ranks are threads, which exchange what they say."""
    said: dict[str, dict[int, str]] = {}
    networks, barrier = itertools.count(), threading.Barrier(3)
    if why == "another network":
        monkeypatch.setattr(connect, "network_id", lambda: str(next(networks)))

    def meet(rank: int) -> Any:
        def exchange(what: str, mine: str) -> list[str]:
            said.setdefault(what, {})[rank] = mine
            barrier.wait(TIMEOUT_S)
            return [said[what][other] for other in range(3)]

        others, willing = {0, 1, 2} - {rank}, why != "unwilling" or rank != 1
        store: Any = SimpleNamespace(exchange=exchange, ranks=range(3), rank=rank, timeout_s=TIMEOUT_S)
        return neighbours(store, sorted(others), device_type="cpu", willing=willing, meet=lambda: rank)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(meet, range(3))) == [(0, {}), (1, {}), (2, {})]

"""Messages through shared memory, between the two ends of one socket, here in one process."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool, torch.uint8)


def test_messages_come_once_and_in_the_order_of_their_tag(ends: tuple[Neighbour, Neighbour]) -> None:
    """Of every type, both ways, on several channels and tags, posted ahead or sent before: one that waits
    holds up no other.
    """
    keys = list(itertools.product((0, 1), (0, 1), (1, 2, 3)))
    todo = [(key, sends) for key in keys for sends in (True, False) for _ in range(40)]
    random.Random(0).shuffle(todo)
    sent: dict[tuple[int, ...], list[Tensor]] = {key: [] for key in keys}
    received: dict[tuple[int, ...], list[Tensor]] = {key: [] for key in keys}
    waits: list[Any] = []
    for key, sends in todo:
        source, *place = key
        message = (torch.randn(3, 5) * 3).to(DTYPES[keys.index(key) % len(DTYPES)])
        if sends:
            sent[key].append(message)
            waits.append(ends[source].send(*place, message))
        else:
            memory, tensor = buffer_for(ends[1 - source], message)
            received[key].append(tensor)
            waits.append(ends[1 - source].post(*place, memory))
            ends[1 - source].flush()
    for end in (*ends, *ends):
        end.progress()
    for each in waits:
        each.wait()
    for key in keys:
        assert all(map(torch.equal, sent[key], received[key])), key


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


def test_shared_memory_is_given_out_again_when_nothing_lives_in_it(
    ends: tuple[Neighbour, Neighbour],
) -> None:
    _, end = ends
    memory = end.empty(64)
    address, view = memory.data_ptr(), memory[8:16]
    end.give_back(memory)
    del memory
    other = end.empty(64)
    its_address = other.data_ptr()
    assert its_address != address
    end.give_back(other)
    del other
    again = end.empty(64)
    assert again.data_ptr() == its_address
    del view
    assert end.empty(64).data_ptr() == address


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


def meeting(num_ranks: int, peers: list[list[int]], **of_rank: list[Any]) -> list[Any]:
    """What `neighbours` gives to or raises for each rank, in threads that exchange what they say."""
    said: dict[str, dict[int, str]] = {}
    barrier = threading.Barrier(num_ranks)

    def meet(rank: int) -> Any:
        def exchange(what: str, mine: str) -> list[str]:
            said.setdefault(what, {})[rank] = mine
            barrier.wait(TIMEOUT_S)
            return [said[what][other] for other in range(num_ranks)]

        options = {"device_type": "cpu", "willing": True, **{key: of[rank] for key, of in of_rank.items()}}
        return neighbours(exchange, rank, peers[rank], timeout_s=TIMEOUT_S, **options)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(meet, range(num_ranks)))


@pytest.mark.parametrize("why", ["another network", "unwilling"])
def test_where_one_rank_is_out_of_reach_all_take_the_network(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    networks = itertools.count()
    if why == "another network":
        monkeypatch.setattr(connect, "network_id", lambda: str(next(networks)))
    found = meeting(3, [[1, 2], [0, 2], [0, 1]], willing=[True, why != "unwilling", True])
    assert found == [{}, {}, {}]


def test_any_two_ranks_of_a_host_meet() -> None:
    """Ranks 0 to 2 with each other, rank 3 with 0 alone; everybody reaches whom it means."""
    peers = [[1, 2, 3], [0, 2], [0, 1], [0]]
    found = meeting(4, peers)
    for rank, peer in itertools.permutations(range(4), 2):
        if peer not in peers[rank]:
            assert peer not in found[rank]
            continue
        memory, tensor = buffer_for(found[peer][rank], torch.zeros(1))
        arrival = found[peer][rank].post(0, 0, memory)
        found[peer][rank].flush()
        found[rank][peer].send(0, 0, torch.full((1,), 10.0 * rank + peer))
        arrival.wait()
        assert float(tensor) == 10.0 * rank + peer

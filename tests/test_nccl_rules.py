"""The fake network keeps NCCL's rules: what real hardware hangs on or gets wrong, it says."""

from __future__ import annotations

import pytest
import torch
from fakes.nccl import FakeNetwork, run
from fakes.nccl_backend import NcclBackend
from fakes.nccl_world import Deadlock, RuleBroken
from torch import Tensor


def backend(network: FakeNetwork, name: str = "way") -> NcclBackend:
    return network.backend(None, name, accelerated=True, timeout_s=10.0)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values)


def test_messages_are_matched_by_order_whatever_their_tags() -> None:
    def exchange(network: FakeNetwork) -> list[float]:
        way = backend(network)
        if network.rank == 0:
            sent = [numbers(1.0), numbers(2.0)]
            for work in [way.send([tensor], 1, tag) for tensor, tag in zip(sent, (7, 8), strict=True)]:
                work.wait()
            return []
        places = [numbers(0.0), numbers(0.0)]
        for work in [way.recv([place], 0, tag) for place, tag in zip(places, (8, 7), strict=True)]:
            work.wait()
        return [float(place) for place in places]

    assert run(2, exchange)[1] == [1.0, 2.0]


def test_the_first_message_waits_for_the_other_host() -> None:
    with pytest.raises(Deadlock, match="rank 0 waits for the communicator 'way.*' between ranks 0 and 1"):
        run(2, lambda network: network.rank == 0 and backend(network).send([numbers(1.0)], 1, 0))


@pytest.mark.parametrize("received", [1, 2])
def test_a_send_ends_when_it_is_received(received: int) -> None:
    def exchange(network: FakeNetwork) -> list[float]:
        way, kept = backend(network), [numbers(1.0), numbers(2.0)]
        if network.rank == 0:
            for work in [way.send([tensor], 1, 0) for tensor in kept]:
                work.wait()
        else:
            for place in kept[:received]:
                way.recv([place.zero_()], 0, 0).wait()
        return [float(each) for each in kept]

    if received == 2:
        assert run(2, exchange)[1] == [1.0, 2.0]
    else:
        with pytest.raises(Deadlock, match="rank 0 waits for a message"):
            run(2, exchange)


def test_two_sends_to_each_other_wait_for_ever() -> None:
    def both(network: FakeNetwork) -> None:
        way, other = backend(network), 1 - network.rank
        kept = [numbers(1.0), numbers(0.0)]
        way.send([kept[0]], other, 0)
        way.recv([kept[1]], other, 0).wait()

    with pytest.raises(Deadlock):
        run(2, both)


@pytest.mark.parametrize("early", [False, True])
def test_a_wait_for_the_device_waits_for_every_kernel_on_it(early: bool) -> None:
    """Rank 1 answers what rank 0 sends, and rank 0 has posted the receive of the answer before."""

    def exchange(network: FakeNetwork) -> float:
        way, back, kept, place = backend(network, "a"), backend(network, "b"), numbers(1.0), numbers(0.0)
        if network.rank == 0:
            answers = [back.recv([place], 1, 0)]
            answers[0].wait()  # the first is no answer, but makes the communicator
            answers.append(back.recv([place], 1, 0))
            if early:
                network.synchronize()
            work = way.send([kept], 1, 0)
            network.synchronize()
            work.wait()
        else:
            back.send([place], 0, 0).wait()
            way.recv([kept], 0, 0).wait()
            place += kept
            back.send([place], 0, 0).wait()
        return float(place)

    if not early:
        assert run(2, exchange) == [1.0, 1.0]
    else:
        with pytest.raises(Deadlock, match="rank 0 waits for its whole device"):
            run(2, exchange)


def test_sizes_must_be_equal() -> None:
    def exchange(network: FakeNetwork) -> None:
        kept = torch.zeros(2 + network.rank)
        way = backend(network)
        (way.send([kept], 1, 0) if network.rank == 0 else way.recv([kept], 0, 0)).wait()

    with pytest.raises(RuleBroken, match="8 bytes are sent and 12 expected over 'way"):
        run(2, exchange)


def test_a_message_must_stay_until_it_has_left() -> None:
    def exchange(network: FakeNetwork) -> None:
        way = backend(network)
        if network.rank == 0:
            way.send([numbers(1.0)], 1, 0).wait()
        else:
            place = numbers(0.0)
            way.recv([place], 0, 0).wait()

    with pytest.raises(RuleBroken, match="freed before it had left"):
        run(2, exchange)


@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64, torch.uint16])
def test_some_types_are_refused(dtype: torch.dtype) -> None:
    (found,) = run(1, lambda network: backend(network).send([torch.zeros(1, dtype=dtype)], 0, 0))
    assert isinstance(found, TypeError)


def test_after_an_abort_waits_end_and_what_came_is_garbage() -> None:
    def exchange(network: FakeNetwork) -> bool | None:
        way, place = backend(network), numbers(0.0)
        if network.rank == 0:
            work = way.recv([place], 1, 0)
            network.watch(lambda: way.abort() or True, 1.0)
            work.wait()
            network.synchronize()
            with pytest.raises(RuntimeError, match="aborted"):
                way.send([place], 1, 0)
            return bool(place.isnan())
        way.recv([place], 0, 0)  # comes, and sends nothing
        return None

    assert run(2, exchange)[0] is True


def test_the_order_of_the_ranks_may_be_any() -> None:
    """A choice of who goes on next changes nothing but the order."""

    def exchange(network: FakeNetwork) -> float:
        way, kept = backend(network), [numbers(float(network.rank)), numbers(0.0)]
        works = []
        if network.rank < 2:
            works.append(way.send([kept[0]], network.rank + 1, 0))
        if network.rank > 0:
            works.append(way.recv([kept[1]], network.rank - 1, 0))
        for work in works:
            work.wait()
        return float(kept[1])

    for choose in (lambda number: 0, lambda number: number - 1):
        assert run(3, exchange, choose=choose) == [0.0, 0.0, 1.0]

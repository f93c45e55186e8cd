"""What a rank asks of real NCCL, how ranks meet, and their signs of life: without a network."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from gpipe_bench.pipeline import Action
from gpipe_bench.pipeline.errors import PeerError
from gpipe_bench.pipeline.ranks.connect import in_turn
from gpipe_bench.pipeline.ranks.store import bounded
from gpipe_bench.pipeline.ranks.wire import Connection, DeviceWaits, TensorSpec, nccl_options, unreachable

DUPLICATE = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000
"""


def test_the_last_line_of_nccl_is_kept() -> None:
    found = unreachable(None, 1, RuntimeError(DUPLICATE))
    assert found.cause == (
        "rank 1 is not reached by NCCL: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
    )
    assert not found.timed_out


@pytest.mark.parametrize(
    ("text", "cause", "timed_out"),
    [
        ("[place.cc:3] Timed out waiting 20ms", "rank 2 did not answer: Timed out waiting 20ms", True),
        ("[place.cc:3] Closed by peer. This is typically", "rank 2 disappeared: Closed by peer", False),
        ("", "rank 2 disappeared: RuntimeError", False),
    ],
)
def test_what_else_a_network_says(text: str, cause: str, timed_out: bool) -> None:
    found = unreachable(None, 2, RuntimeError(text))
    assert (found.cause, found.timed_out) == (cause, timed_out)


@pytest.mark.parametrize("config", [SimpleNamespace(max_ctas=None), SimpleNamespace(), None])
def test_messages_take_few_thread_blocks_where_torch_can_say_so(config: object) -> None:
    """Sums as many as they like; and NCCL's watchdog, which ends the process, is to give up on neither."""
    made = SimpleNamespace() if config is None else SimpleNamespace(config=config)
    nccl = SimpleNamespace(Options=lambda *, is_high_priority_stream: made)
    assert nccl_options(nccl, sums=True)._timeout > timedelta(days=365)
    assert getattr(config, "max_ctas", None) is None
    assert nccl_options(nccl, sums=False)._timeout > timedelta(days=365)
    assert getattr(config, "max_ctas", 4) == 4


class Wire:
    """A backend that keeps what it is given."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> None:
        self.tensors += tensors

    recv = send


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16, torch.float32])
def test_types_of_the_network_travel_as_they_are_and_others_as_bytes(dtype: torch.dtype) -> None:
    wire = Wire()
    connection = Connection(wire, 0, {}, frozenset({torch.float32}))
    buffer = connection.buffer(TensorSpec((), (), dtype), 0, torch.device("cpu"))
    connection.receive(buffer, 0, 0)
    connection.send(buffer.flat, 0, 0)
    for tensor in wire.tensors:
        assert tensor.dtype == (torch.float32 if dtype == torch.float32 else torch.uint8)
        assert tensor.numel() * tensor.element_size() == dtype.itemsize
        assert tensor.data_ptr() == buffer.tensor.data_ptr()


def test_neighbours_meet_first_and_the_even_pairs_before_the_odd_ones() -> None:
    """Every rank takes its pairs in this order: nobody waits in a ring, and a chain takes two turns."""
    assert in_turn({(0, 1), (1, 2), (2, 3), (3, 4)}) == [(0, 1), (2, 3), (1, 2), (3, 4)]
    assert in_turn([(0, 3), (2, 3), (1, 2), (0, 1)]) == [(0, 1), (2, 3), (1, 2), (0, 3)]


def test_a_call_that_is_given_up_is_left_behind() -> None:
    asked: list[int] = []

    def given_up() -> bool:
        asked.append(1)
        return len(asked) > 2

    waiting = threading.Event()
    with pytest.raises(TimeoutError):
        bounded(waiting.wait, 600.0, given_up)
    waiting.set()
    assert bounded(lambda: 7, 600.0, lambda: False) == 7


class Device:
    """What an accelerator has yet to reach; each look is half a second after the one before."""

    def __init__(self) -> None:
        self.now_s, self.reached = 0.0, 0
        self.waits = DeviceWaits(lambda: self.now_s)
        self.given = 0
        self.waits.begin(self._mark)

    def _mark(self) -> object:
        self.given += 1
        return SimpleNamespace(query=lambda number=self.given: self.reached >= number)

    def look(self, times: int) -> list[PeerError | None]:
        found = []
        for _ in range(times):
            self.now_s += 0.5
            found.append(self.waits.overdue(10.0))
        return found


def test_a_device_that_stands_still_is_told_from_one_that_is_slow() -> None:
    device = Device()
    with device.waits.waiting(Action.parse("1F2"), 1):
        pass
    device.waits.note()
    assert device.look(20) == [None] * 20
    device.reached = 1  # the next mark has its own time
    assert device.look(20) == [None] * 20
    (late,) = device.look(2)[1:]
    assert late is not None
    assert (late.action, late.peer, late.timed_out) == (None, None, True)
    device.reached = 2
    assert device.look(100) == [None] * 100, "nothing is awaited"


def test_who_did_not_run_has_not_waited() -> None:
    device = Device()
    with device.waits.waiting(Action.parse("1F2"), 1):
        pass
    device.now_s += 1000.0
    assert device.look(18) == [None] * 18
    late = device.look(2)[1]
    assert late is not None
    assert str(late) == "rank 1 did not answer: a device has waited for 10 s"

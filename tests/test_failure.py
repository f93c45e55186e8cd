"""Who is blamed when ranks wait for each other in vain, and a store that answers nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from refused import refused
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from gpipe_bench.pipeline import Action, ActionError
from gpipe_bench.pipeline.errors import PeerError, StoreError
from gpipe_bench.pipeline.ranks import failure
from gpipe_bench.pipeline.ranks import store as store_module
from gpipe_bench.pipeline.ranks.failure import Board, missing, peer_error_of
from gpipe_bench.pipeline.ranks.store import Store, bounded


class Keys:
    """The store of some threads; may be made silent or gone."""

    host, is_in_rank = 0, True

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.broken: StoreError | None = None
        self.num_asked = self.num_said = 0
        self.on_get: Callable[[], None] = lambda: None

    def set(self, key: str, value: str, limit_s: float = 1.0) -> None:
        self._check()
        self._values[key] = value.encode()
        self._saying(key)

    def append(self, key: str, value: str) -> None:
        self._check()
        with self._lock:
            self._values[key] = self._values.get(key, b"") + value.encode()
        self._saying(key)

    def get(self, key: str, limit_s: float = 1.0) -> bytes | None:
        self._check()
        self.on_get()
        return self._values.get(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def set_first(self, key: str, value: str) -> bytes:
        self._check()
        with self._lock:
            return self._values.setdefault(key, value.encode())

    def _saying(self, key: str) -> None:
        with self._lock:
            self.num_said += key.startswith("waiting")

    def _check(self) -> None:
        with self._lock:
            self.num_asked += 1
        if self.broken is not None:
            raise self.broken


def waits_for(peer: int | None, action: str = "") -> PeerError:
    found = Action.parse(action) if action else None
    return PeerError(found, peer, "did not answer: timed out", timed_out=True)


def explain_all(errors: dict[int, PeerError], size: int, board: Keys | None = None) -> list[ActionError]:
    """What the ranks that wait conclude, each in a thread."""
    board = board or Keys()
    with ThreadPoolExecutor(len(errors)) as pool:
        boards = {rank: Board(board, rank, range(size)) for rank in errors}
        return list(pool.map(lambda rank: boards[rank].explain(errors[rank]), errors))


def test_the_rank_that_everybody_waits_for_in_the_end_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has stopped; 3 waits for 2, which waits for 1."""
    monkeypatch.setattr(failure, "EXPLANATION_S", 600.0)  # they need not wait for more than each other
    errors = {0: waits_for(1, "1B0"), 2: waits_for(1, "1F2"), 3: waits_for(2, "2F2")}
    found = explain_all(errors, 4)
    assert [error.rank for error in found] == [1, 1, 1]
    assert len({str(error) for error in found}) == 1
    assert str(found[0].action) in ("1B0", "1F2")


def test_a_rank_that_closed_its_connections_because_it_timed_out_is_not_blamed() -> None:
    """As gloo does: rank 2 has stopped, 1 waits for it, and 0 for 1 until that connection is closed."""
    closed = PeerError(Action.parse("1B2"), 1, "disappeared: connection closed", timed_out=False)
    found = explain_all({0: closed, 1: waits_for(2, "2B2")}, 3)
    assert [str(error.action) for error in found] == ["2B2", "2B2"]
    assert [error.rank for error in found] == [2, 2]


def test_a_rank_that_waits_for_an_unknown_one_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "EXPLANATION_S", 0.5)
    found = explain_all({0: waits_for(1), 1: waits_for(None), 3: waits_for(None)}, 4)
    assert [error.rank for error in found] == [2, 2, 2]
    assert "rank 2 did not answer" in str(found[0])


def test_who_waited_in_vain_hears_of_the_failure_that_a_rank_writes_meanwhile() -> None:
    board, told = Keys(), ActionError(Action.parse("1F0"), "told", 1)
    board.on_get = lambda: setattr(board, "on_get", lambda: None) or Board(board, 1, range(3)).report(told)
    assert str(Board(board, 2, range(3)).explain(waits_for(0))) == str(told)


@pytest.mark.parametrize("alive", [False, True])
def test_of_many_ranks_the_right_one_is_blamed_after_a_few_questions(
    monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    """Rank 300 of 512 has stopped, and all others wait in vain for a neighbour. One process answers them."""
    size, stopped, board, all_said = 512, 300, Keys(), threading.Event()
    monkeypatch.setattr(failure, "EXPLANATION_S", 600.0)
    board.on_get = lambda: all_said.set() if board.num_said == size - 1 else None

    def conclude(rank: int) -> ActionError:
        ours = Board(board, rank, range(size), alive=alive, sleep=lambda _: all_said.wait())
        return ours.explain(waits_for(rank + 1 if rank < stopped else rank - 1))

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(conclude, [rank for rank in range(size) if rank != stopped]))
    assert {error.rank for error in found} == {stopped}
    assert board.num_asked < 16 * size


def of_grid(board: Keys, rank: int, size: int = 4) -> Board:
    return Board(board, rank, range(size), alive=True, coordinates=lambda r: f"dp={r // 2} pp={r % 2}")


def in_a_sum() -> PeerError:
    return PeerError(None, None, "a collective failed: timed out", timed_out=True)


def test_of_those_who_may_be_meant_the_silent_one_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in a sum, and does not know for whom; 1 and 2 have not waited long enough to say so, but
    live. Rank 3 does not.
    """
    monkeypatch.setattr(failure, "EXPLANATION_S", 0.3)
    board, looks = Keys(), []

    def live() -> None:
        looks.append(0)
        for rank in range(3):
            board._values[f"alive {rank}"] = str(len(looks)).encode()

    board._values["alive 3"] = b"7"
    board.on_get = live
    found = of_grid(board, 0).explain(in_a_sum())
    assert found.rank == 3
    assert str(found).startswith("dp=1 pp=1, a step on rank 3 failed: rank 3 gave no answer: a collective")


def test_who_waits_in_a_sum_believes_a_neighbour_of_the_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure, "EXPLANATION_S", 0.3)
    board = Keys()
    with ThreadPoolExecutor(2) as pool:
        gone = PeerError(Action.parse("0B1"), 2, "disappeared: closed", timed_out=False)
        closed = PeerError(None, None, "a collective failed: closed", timed_out=False)
        found = list(
            pool.map(lambda pair: of_grid(board, pair[0]).explain(pair[1]), [(1, closed), (3, gone)])
        )
    assert [str(error) for error in found] == [
        "dp=1 pp=0, action 0B1 on rank 2 failed: rank 2 disappeared: closed"
    ] * 2


def test_the_rank_that_holds_the_store_stays_until_the_others_know() -> None:
    """But for the one that failed. The others need not stay."""
    board, known = Keys(), ActionError(None, "told", 2)
    to_come = [1, 3]

    def others_come(_: float) -> None:
        Board(board, to_come.pop(), range(4), sleep=others_come).linger(known)

    Board(board, 0, range(4), now=lambda: 0.0, sleep=others_come).linger(known)
    assert to_come == []


@pytest.mark.parametrize(
    "text",
    [
        "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically so",
        "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
        "Application timeout caused pair closure",
    ],
)
def test_what_collectives_say(text: str) -> None:
    found = missing(RuntimeError(text))
    assert found.peer is None
    assert found.timed_out == ("closed by peer" not in text)


def test_an_error_of_a_collective_is_no_failure_of_the_action() -> None:
    """And what says the same is one if it comes from anywhere else, such as a network of the user's own."""
    keys, limit = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda rank: dist.ProcessGroupGloo(keys, rank, 2, limit), range(2)))
    dist.Backend.register_backend("one end", lambda *_: ends[0], devices="cpu")
    dist.init_process_group("one end", store=dist.HashStore(), rank=0, world_size=1)
    del ends[1]  # the process at the other end
    mine = torch.ones(1)
    of_collectives: list[Callable[[], object]] = [
        lambda: dist.all_reduce(mine),
        lambda: functional.all_reduce(mine, "sum", dist.group.WORLD) + 1,
    ]
    try:
        for collective in of_collectives:
            with pytest.raises(RuntimeError) as caught:
                collective()
            assert peer_error_of(caught.value) is not None
    finally:
        dist.destroy_process_group()
    with pytest.raises(RuntimeError) as again:
        raise RuntimeError(str(caught.value))
    assert peer_error_of(again.value) is None


@pytest.mark.parametrize(("silent", "what"), [(True, "did not answer"), (False, "disappeared")])
def test_a_store_that_cannot_be_asked_is_its_hosts_failure(silent: bool, what: str) -> None:
    board = Keys()
    board.broken = StoreError("is not there", silent=silent)
    found = explain_all({1: waits_for(0, "0F1"), 2: waits_for(1, "1F1")}, 3, board)
    assert [error.rank for error in found] == [0, 0]
    assert str(found[0].action) == "0F1"  # the neighbour knows which action
    assert found[1].cause == f"the process that held the store {what}"


def test_a_store_of_the_launcher_that_cannot_be_asked_leaves_what_is_known_here() -> None:
    board = Keys()
    board.host, board.is_in_rank = None, False
    board.broken = StoreError("is not there", silent=True)
    (found,) = explain_all({2: waits_for(1, "1F1")}, 3, board)
    assert (found.rank, str(found.action)) == (1, "1F1")


def test_what_does_not_answer_is_left_behind() -> None:
    never = threading.Event()
    with refused(TimeoutError):
        bounded(never.wait, 0.01)
    never.set()
    assert bounded(lambda: 3, 600.0) == 3
    with pytest.raises(KeyError, match="lost"):
        bounded(lambda: {}["lost"], 600.0)


def test_a_silent_store_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays locked, so each further question would take as long in vain."""
    asked, never = [], threading.Event()
    store = Store.__new__(Store)
    store._failed = None
    store._store = SimpleNamespace(check=lambda keys: asked.append(keys) or never.wait())
    monkeypatch.setattr(store_module, "ANSWER_S", 0.01)
    for _ in range(2):
        with refused(StoreError) as caught:
            store.get("failure", 0.01)
        assert caught.value.silent
    never.set()
    assert asked == [["failure"]]

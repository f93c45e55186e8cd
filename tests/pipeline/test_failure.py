"""What ranks say that wait for each other in vain, and a store that answers nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from gpipe_bench.pipeline import Action, ActionError
from gpipe_bench.pipeline.errors import PeerError, StoreError
from gpipe_bench.pipeline.ranks import failure
from gpipe_bench.pipeline.ranks import store as store_module
from gpipe_bench.pipeline.ranks.failure import FailureDetector, missing, peer_error_of
from gpipe_bench.pipeline.ranks.store import Store


class Keys:
    """The store of some threads; may be made silent or gone."""

    host, is_in_rank = 0, True

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.broken: StoreError | None = None
        self.on_get: Callable[[], None] = lambda: None

    def set(self, key: str, value: str, limit_s: float = 1.0) -> None:
        self._check()
        self._values[key] = value.encode()

    def append(self, key: str, value: str) -> None:
        self._check()
        with self._lock:
            self._values[key] = self._values.get(key, b"") + value.encode()

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

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken


def waits_for(peer: int | None, action: str = "") -> PeerError:
    found = Action.parse(action) if action else None
    return PeerError(found, peer, "did not answer: timed out", timed_out=True)


def detector(store: Keys, rank: int, size: int = 3, **options: Any) -> FailureDetector:
    return FailureDetector(store, rank, range(size), **options)  # type: ignore[arg-type]


def explain_all(errors: dict[int, PeerError], size: int, store: Keys | None = None) -> list[ActionError]:
    """What the ranks that wait conclude, each in a thread."""
    keys = store or Keys()
    with ThreadPoolExecutor(len(errors)) as pool:
        return list(pool.map(lambda rank: detector(keys, rank, size).explain(errors[rank]), errors))


def test_all_who_wait_in_vain_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has stopped; 3 waits for 2, which waits for 1. Who says it first names whom it awaited."""
    monkeypatch.setattr(failure, "EXPLANATION_S", 0.05)
    errors = {0: waits_for(1, "1B0"), 2: waits_for(1, "1F2"), 3: waits_for(2, "2F2")}
    found = explain_all(errors, 4)
    assert len({str(error) for error in found}) == 1
    assert (found[0].rank, str(found[0].action)) in ((1, "1B0"), (1, "1F2"), (2, "2F2"))


def test_who_waited_in_vain_hears_of_the_failure_that_a_rank_writes_meanwhile() -> None:
    keys, told = Keys(), ActionError(Action.parse("1F0"), "told", 1)
    keys.on_get = lambda: setattr(keys, "on_get", lambda: None) or detector(keys, 1).report(told)
    assert str(detector(keys, 2).explain(waits_for(0))) == str(told)


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
    assert peer_error_of(RuntimeError("the layer's own")) is None


@pytest.mark.parametrize(("silent", "what"), [(True, "did not answer"), (False, "disappeared")])
def test_a_store_that_cannot_be_asked_is_its_hosts_failure(silent: bool, what: str) -> None:
    keys = Keys()
    keys.broken = StoreError("is not there", silent=silent)
    found = explain_all({1: waits_for(0, "0F1"), 2: waits_for(1, "1F1")}, 3, keys)
    assert [error.rank for error in found] == [0, 0]
    assert str(found[0].action) == "0F1"  # the neighbour knows which action
    assert found[1].cause == f"the process that held the store {what}"


def test_a_store_of_the_launcher_that_cannot_be_asked_leaves_what_is_known_here() -> None:
    keys = Keys()
    keys.host, keys.is_in_rank = None, False
    keys.broken = StoreError("is not there", silent=True)
    (found,) = explain_all({2: waits_for(1, "1F1")}, 3, keys)
    assert (found.rank, str(found.action)) == (1, "1F1")


def test_a_silent_store_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays locked, so each further question would take as long in vain."""
    asked, never = [], threading.Event()
    store = Store.__new__(Store)
    store._failed, store._whole = None, store
    store._group = threading.Event()  # type: ignore[assignment]  # anything that can be a key
    store._store = SimpleNamespace(check=lambda keys: asked.append(keys) or never.wait())
    monkeypatch.setattr(store_module, "ANSWER_S", 0.01)
    for _ in range(2):
        with pytest.raises(StoreError, match="the store of the process group") as caught:
            store.get("failure", 0.01)
        assert caught.value.silent
    never.set()
    assert asked == [["failure"]]

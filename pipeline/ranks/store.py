"""The process group's store, asked in bounded time.

Under plain `env://` rendezvous the store lives in a thread of rank 0. If that process is stopped (a debugger,
a full swap, SIGSTOP) its kernel still accepts requests, and no answer comes back: `check`, `compare_set`,
`get` and `wait` then hang, whatever `set_timeout` says, and hold the lock of their connection. So every
question is put by a thread of its own, which is left behind if no answer comes, and through a connection that
nobody else uses.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import distributed as dist

from ..errors import PeerError, StoreError

# The longest that a store takes to answer while its host lives, once all are connected. Its process may be
# short of processor time, but it needs microseconds of it. (While somebody connects it may look up a name,
# and answers nobody for the five seconds of a lost request.)
ANSWER_S = 1.5
_ASK_S = 0.1  # between two questions whether a call is given up
T = TypeVar("T")
# Two connections for all pipelines of a group: for questions, and for what waits in the store for long and
# holds the lock of its connection, such as a backend. Where one is given up, its thread still holds that
# lock, so the next pipeline connects anew.
_connections: WeakKeyDictionary[dist.ProcessGroup, tuple[Any, Any]] = WeakKeyDictionary()


def bounded(call: Callable[[], T], limit_s: float, given_up: Callable[[], bool] | None = None) -> T:
    """Returns or raises what `call` does. `TimeoutError` if it takes longer than `limit_s`, or if
    `given_up`, which is called now and then, returns true.

    `call` runs in a thread, which a timeout leaves behind; the thread does not keep the process from ending.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="pipeline store", daemon=True).start()
    deadline_s = time.monotonic() + limit_s
    while not wait([outcome], limit_s if given_up is None else _ASK_S).done:
        if given_up is None or given_up() or time.monotonic() > deadline_s:
            raise TimeoutError(f"no answer within {limit_s:g} s")
    return outcome.result()


class Store:
    """The keys of one pipeline, or of one grid, in the store through which its process group was set up.

    Ranks that begin their pipelines on the group in the same order get the same keys, so `connect` is the
    first thing that a pipeline does, before anything of its own can fail. Where only some of the group's
    ranks build one, `name` says which. `host` is the rank of the group whose process holds the store; None if
    that is the launcher or a process outside of the group. Every method raises `StoreError` when the store
    does not answer or is gone.
    """

    def __init__(self, group: dist.ProcessGroup, name: str = "") -> None:
        # torchrun's store lives in its agent, any other in the first process of the job.
        self.is_in_rank = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        ranks = dist.get_process_group_ranks(group)
        self.host = ranks.index(0) if 0 in ranks and self.is_in_rank else None
        self._group, self._name = group, name
        self._whole = self  # which has what is said of failures
        self._store: Any = None
        self._backends: Any = None
        self._failed: StoreError | None = None

    def connect(self, timeout_s: float) -> None:
        """Connects to the store, apart from the connection of the group itself."""
        group, rank = self._group, dist.get_rank(self._group)

        def prepare() -> tuple[Any, ...]:
            if group not in _connections:
                store: Any = group.get_group_store()
                _connections[group] = store.clone(), store.clone()
            questions, backends = _connections[group]
            number = questions.add(f"{self._name}pipelines of rank {rank}", 1)
            name = f"{self._name}pipeline {number}"
            return tuple(dist.PrefixStore(name, store) for store in (questions, backends))  # type: ignore[attr-defined]

        self._store, self._backends = self._ask(prepare, timeout_s)

    def part(self, group: dist.ProcessGroup) -> Store:
        """Returns a connected store's own key space for a group of some of its ranks."""
        found = Store(group)
        name = f"part of {' '.join(map(str, dist.get_process_group_ranks(group)))}"
        found._store, found._backends = [
            dist.PrefixStore(name, store)  # type: ignore[attr-defined]
            for store in (self._store, self._backends)
        ]
        found._whole = self
        return found

    def has_failed(self) -> bool:
        """Whether a rank has said that it failed (`ranks.failure`), so that no wait need go on."""
        return self._whole.get("failure") is not None

    def give_up(self) -> None:
        """Drops cached connections on which a thread may still wait; the next pipeline makes new ones."""
        _connections.pop(self._whole._group, None)

    def set(self, key: str, value: str, limit_s: float = ANSWER_S) -> None:
        self._ask(lambda: self._store.set(key, value), limit_s)

    def get(self, key: str, limit_s: float = ANSWER_S) -> bytes | None:
        """The value of a key, None if it has none."""
        return self.get_all([key], limit_s)[0]

    def get_all(self, keys: Sequence[str], limit_s: float = ANSWER_S) -> list[bytes | None]:
        """The value of each key, in one question."""

        def get() -> list[bytes | None]:
            return [self._store.get(key) if self._store.check([key]) else None for key in keys]

        return self._ask(get, limit_s)

    def append(self, key: str, value: str) -> None:
        """Adds to the value of a key."""
        self._ask(lambda: self._store.append(key, value))

    def set_first(self, key: str, value: str) -> bytes:
        """Sets a key if it has no value yet. Returns the value that the key has afterwards."""
        return self._ask(lambda: self._store.compare_set(key, "", value))  # type: ignore[no-any-return]

    def exchange(self, what: str, mine: str, *, rank: int, size: int, timeout_s: float) -> list[str]:
        """Returns the `mine` of each of `size` ranks; every rank must call it. Errors as in `await_all`."""
        self.set(f"{what} of {rank}", mine, timeout_s)
        keys = {other: f"{what} of {other}" for other in range(size)}
        return [value.decode() for value in self.await_all(keys, timeout_s)]

    def await_all(self, keys: Mapping[int, str], timeout_s: float) -> list[bytes]:
        """The value that each rank gives to its key; `PeerError` names the first that has given none after
        `timeout_s`, and comes earlier if a rank has failed.
        """

        def get() -> list[bytes]:
            try:
                self._backends.wait([*keys.values()], timedelta(seconds=timeout_s))
            except dist.DistStoreError:
                for rank, key in keys.items():
                    if not self._backends.check([key]):
                        what = f"did not answer: timed out after {timeout_s:g} s, nothing came from it"
                        raise PeerError(None, rank, what, timed_out=True) from None
            return [self._backends.get(key) for key in keys.values()]

        try:
            return bounded(get, timeout_s + ANSWER_S, self.has_failed)
        except TimeoutError as error:
            self.give_up()
            if self.has_failed():
                raise PeerError(None, None, "another rank has failed", timed_out=False) from None
            raise StoreError(f"did not answer: {error}", silent=True) from None
        except PeerError:
            raise
        except RuntimeError as error:
            raise StoreError(f"is gone: {error}", silent=False) from error

    def under(self, name: str) -> Any:
        """The store as torch's backends take it, with keys below `name`. They wait in it themselves."""
        return dist.PrefixStore(name, self._backends)  # type: ignore[attr-defined]

    def _ask(self, question: Callable[[], T], limit_s: float = ANSWER_S) -> T:
        if self._failed is not None:  # the lock of its connection is still held
            raise self._failed
        try:
            return bounded(question, limit_s)
        except TimeoutError as error:
            self._failed = StoreError(f"did not answer: {error}", silent=True)
            self.give_up()
        except PeerError:
            raise
        except RuntimeError as error:
            self._failed = StoreError(f"is gone: {error}", silent=False)
        raise self._failed

"""One failure, known to every rank at once.

When a rank raises, its neighbours wait for messages that will never come; torch's engines leave them there
until the timeout of the process group, ten or thirty minutes by default. Here the ranks tell each other by
keys of the process group's store:

    failure     what happened. The first that any rank writes is what all ranks raise

A rank that raises writes the failure and then closes its connections. A wait on a closed connection fails at
once; its rank reads the failure, raises the same error and closes its own connections, and so on along the
pipeline. A rank that was killed or stopped writes nothing. Then the first that waits for it in vain writes
whom it waited for, and that rank may itself only wait. If the store does not answer either, it is the process
that holds it.

Under plain `env://` rendezvous the store lives in a thread of rank 0. If that process is stopped (a debugger,
a full swap, SIGSTOP) its kernel still accepts requests, and no answer comes back: `check`, `compare_set`,
`get` and `wait` then hang, whatever `set_timeout` says, and hold the lock of their connection. So every
question is put by a thread of its own, which is left behind if no answer comes, and through a connection that
nobody else uses.

Backends are torch.distributed's own, made directly on the process group's store. `dist.new_group` would do
the same, but names a group by how many the process has seen already, so that ranks with different pasts wait
for each other forever.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import distributed as dist

from ..errors import ActionError, PeerError, StoreError, summary
from ..plan.schedule import Action
from .wire import Connection, DeviceWaits, ObjectCollectives, cleaned

# How long a rank that waited in vain waits for another one to say why: one that raises writes it before it
# closes anything.
EXPLANATION_S = 2.0
_AGAIN_S = 0.02  # between two questions
_LOOK_S = 0.5  # between two looks of the thread that watches
_LAST_LOOK_S = 0.2  # how long the end waits for a look: torch must not be broken off in the middle of a call

T = TypeVar("T")
Watch = Callable[[Callable[[], bool], float], Callable[[], None]]
"""Function that calls its argument every so many seconds until it is true; returns a function to stop it."""


class FailureDetector:
    """Knows the failures among processes that end together, and reports those of this process to the others.

    For a pipeline alone these are its ranks. On a grid they are those of all its pipelines, because these
    wait for each other once a step; each rank then has its number in the job. Code outside the pipeline may
    use the groups of a mesh in the middle of an action (`fully_shard`, tensor-parallel layers). So these
    groups wait no longer than the pipeline does, and are closed with it.

    `store` has the keys that all `ranks` share; `members` are those of this process's pipeline, in the order
    of the pipeline's ranks; `coordinates` says where a rank is on the grid, if there is one.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        *,
        members: Sequence[int] | None = None,
        coordinates: Callable[[int], str] | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store, self.rank, self.ranks = store, rank, tuple(ranks)
        self.is_grid = coordinates is not None
        self._coordinates = coordinates or (lambda rank: "")
        self._members = tuple(ranks if members is None else members)
        self._now, self._sleep = now, sleep
        self.noticed = False  # a failure elsewhere, by the thread that watches
        self.device_waits = DeviceWaits(now)  # of the accelerator of this rank
        self._late: PeerError | None = None  # which of the device's waits has not ended in time
        self._connections: list[tuple[Connection, bool]] = []  # and whether they are cut at a notice
        self._groups: list[Connection] = []  # of the user's mesh: cut, but not closed
        self._of_all: ObjectCollectives | None = None
        self._stop: Callable[[], None] | None = None
        self._is_over = False

    @contextmanager
    def building(self) -> Iterator[None]:
        """For all of the making of a pipeline: whatever is raised ends it on all ranks. `ActionError` where
        another rank has failed or is missing.
        """
        try:
            yield
        except ActionError:  # which all know already
            raise
        except BaseException as error:
            failure = self.end(None, error)
            if self.peer_error(error) is None:
                raise
            raise failure from error

    def meet(self, timeout_s: float) -> None:
        """Waits for all to come. `PeerError` names one that does not within the timeout, or says that one has
        failed.
        """
        rank, size = self.ranks.index(self.rank), len(self.ranks)
        try:
            self.store.exchange("here", "", rank=rank, size=size, timeout_s=timeout_s)
        except PeerError as error:
            raise error.numbered(self.ranks) from error

    def bounded(self, call: Callable[[], T], timeout_s: float) -> T:
        """Returns the result of `call`, in which torch connects processes and would wait as long as the
        user's process group says. `PeerError` if it takes longer than the timeout, or if a rank has failed.
        """
        try:
            return bounded(call, timeout_s, self.store.has_failed)
        except TimeoutError as error:
            what = f"not all ranks connected within {timeout_s:g} s"
            raise PeerError(None, None, what, timed_out=True) from error

    def object_collectives(self, timeout_s: float) -> ObjectCollectives:
        """Returns collectives for rare work of all ranks together; all must call. The first call connects."""
        if self._of_all is None:
            rank, size = self.ranks.index(self.rank), len(self.ranks)
            connected = backend(self.store, rank, size, name="all", accelerated=False, timeout_s=timeout_s)
            connection = Connection(connected, 0, {})
            self.cuts(connection)
            self._of_all = ObjectCollectives(connection, rank, size)
        return self._of_all

    def watch_over(self, groups: Iterable[dist.ProcessGroup], device_type: str, timeout_s: float) -> None:
        """Bounds every wait in these groups from now on, and closes the groups if a rank fails."""
        for group in groups:
            for kind in dict.fromkeys(("cpu", device_type)):
                with suppress(RuntimeError):  # a group need not have a backend for each
                    found: Any = group._get_backend(torch.device(kind))
                    bound_waits(found, timeout_s)
                    self._groups.append(Connection(found, 0, {}))

    def cuts(self, connection: Connection, *, at_notice: bool = True) -> None:
        """Another connection that is cut when a rank fails, be it this one, or only this one, and closed at
        the end.
        """
        self._connections.append((connection, at_notice))

    # A failure

    def peer_error(self, error: BaseException) -> PeerError | StoreError | None:
        """Returns the error if it reports a missing rank, None if it is this rank's own failure."""
        if isinstance(error, PeerError | StoreError):
            return error
        return peer_error_of(error) if self.is_grid else None

    def error(self, action: Action | None, cause: str, rank: int | None) -> ActionError:
        """A failure, with the place of the rank on the grid."""
        return ActionError(action, cause, rank, self._coordinates(rank) if rank in self.ranks else "")

    def failure(self, action: Action | None, error: BaseException) -> ActionError:
        """Returns the error that reports `error` as a failure of this rank."""
        return self.error(action, summary(error), self.rank)

    def end(self, action: Action | None, error: BaseException) -> ActionError:
        """Ends everything because of an error on any rank. Returns what happened, as far as it is known."""
        self.stop_watching()
        missing = self.peer_error(error)
        if missing is None:
            failure = self.report(self.failure(action, error))
        elif self._late is not None:  # the error is of a connection that was cut because of that
            failure = self.explain(self._late)
        else:
            if isinstance(missing, StoreError):
                missing = PeerError(None, None, str(missing), timed_out=False)
            failure = self.explain(missing.numbered(self._members))
        self._cut_all()
        return failure

    def _cut_all(self) -> None:
        for connection in (*(connection for connection, _ in self._connections), *self._groups):
            connection.cut()

    def report(self, error: ActionError) -> ActionError:
        """Writes a failure and returns the one that counts: the first that any rank wrote."""
        mine = {"action": str(error.action or ""), "rank": error.rank, "cause": error.cause}
        try:
            return self._read(self.store.set_first("failure", json.dumps(mine)))
        except StoreError:
            return error

    def explain(self, error: PeerError) -> ActionError:
        """Returns why a peer cannot be reached: the failure that some rank writes within a moment, else that
        the peer is missing, which this rank then writes.
        """
        mine = self.error(error.action, error.cause, error.peer)
        deadline_s = self._now() + EXPLANATION_S
        try:
            while self._now() < deadline_s:
                if (written := self.store.get("failure")) is not None:
                    return self._read(written)
                self._sleep(_AGAIN_S)
        except StoreError as gone:
            host = self.store.host
            if self.store.is_in_rank and (error.peer is None or error.peer != host):
                what = "did not answer" if gone.silent else "disappeared"
                return self.error(None, f"the process that held the store {what}", host)
            return mine
        return self.report(mine)

    def _read(self, written: bytes) -> ActionError:
        found = json.loads(written)
        action = Action.parse(found["action"]) if found["action"] else None
        return self.error(action, found["cause"], found["rank"])

    def refuse_after_notice(self) -> None:
        """`PeerError` if there is a failure elsewhere."""
        if self.noticed:
            raise self._late or PeerError(None, None, "another rank has failed", timed_out=False)

    def notice(self) -> None:
        """Makes this rank's waits fail, including a current one, because of a failure elsewhere."""
        self.noticed = True
        at_notice = [connection for connection, cut_now in tuple(self._connections) if cut_now]
        for connection in (*at_notice, *self._groups):
            connection.cut(beside=True)

    # Watching

    def watch(self, limit_s: float, watch: Watch | None = None) -> None:
        """Looks for failures beside everything else from now on.

        On CPUs a rank waits for its neighbours' connections, which break when they fail. A GPU waits without
        its host knowing, so on GPUs somebody has to look; and on a grid, where a rank may wait for one that
        only waits for the one that failed. A store that has not answered for `limit_s` is a failure too, and
        so is a device that has waited for as long. `watch` is how to look again and again; a thread by
        default.
        """
        look = WeakMethod(self._look)  # the thread must not keep a pipeline alive
        self._stop = (watch or watch_in_thread)(lambda: (mine := look()) is None or mine(limit_s), _LOOK_S)

    def _look(self, limit_s: float) -> bool:
        """Whether there is nothing to look for any more."""
        try:
            failed = self._is_over or self.store.get("failure", limit_s) is not None
            if not failed and (late := self.device_waits.overdue(limit_s)) is not None:
                # The step decides later which failure is written.
                self._late = late.numbered(self._members)
                failed = True
        except StoreError:  # and what held it
            failed = True
        if failed and not self._is_over:
            self.notice()
        return failed

    def stop_watching(self) -> None:
        """Stops watching for failures elsewhere."""
        self._is_over = True
        if self._stop is not None:
            self._stop()

    def close(self) -> None:
        """Ends all connections in good order, or cuts what is left where there was a failure elsewhere."""
        self.stop_watching()
        if self.noticed:
            self._cut_all()
            return
        # All at once, or who builds another pipeline waits long for each.
        ends = [threading.Thread(target=connection.close) for connection, _ in self._connections]
        for end in ends:
            end.start()
        for end in ends:
            end.join()


def watch_in_thread(look: Callable[[], bool], interval_s: float) -> Callable[[], None]:
    """Calls `look` every `interval_s` from a thread, until it is true; returns a function to stop earlier."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(interval_s):
            if look():
                return

    thread = threading.Thread(target=run, name="pipeline lookout", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        if thread is not threading.current_thread():
            thread.join(_LAST_LOOK_S)

    return stop


def peer_error_of(error: BaseException) -> PeerError | None:
    """The `PeerError` for an exception of a collective of torch's; None for any other.

    Collectives that are not ours (those of `fully_shard`, of tensor-parallel layers) run in the middle of an
    action and must not pass for a failure of the action. torch has types for some of these exceptions, and
    those of gloo name it.
    """
    if isinstance(error, PeerError):
        return error
    is_of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return missing(error) if is_of_gloo or isinstance(error, dist.DistError) else None


def missing(error: BaseException) -> PeerError:
    """Returns a `PeerError` for the error of a collective, which does not tell which rank it waited for."""
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    what = cleaned(next(lines, type(error).__name__))
    timed_out = "timed out" in what.lower() or "timeout" in what.lower()
    remedy = "where no replica has failed, give all of them equally many mini-batches"
    return PeerError(None, None, f"a collective failed: {what}; {remedy}", timed_out=timed_out)


# The store

# The longest that a store takes to answer while its host lives, once all are connected. Its process may be
# short of processor time, but it needs microseconds of it. (While somebody connects it may look up a name,
# and answers nobody for the five seconds of a lost request.)
ANSWER_S = 1.5
_ASK_S = 0.1  # between two questions whether a call is given up
# Two connections for all pipelines of a group, which outlive them: for questions, and for what waits in the
# store for long and holds the lock of its connection, such as a backend. Where one is given up, its thread
# still holds that lock, so the next pipeline connects anew.
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

    def get(self, key: str, limit_s: float = ANSWER_S) -> bytes | None:
        """The value of a key, None if it has none."""
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None, limit_s)

    def set_first(self, key: str, value: str) -> bytes:
        """Sets a key if it has no value yet. Returns the value that the key has afterwards."""
        return self._ask(lambda: self._store.compare_set(key, "", value))  # type: ignore[no-any-return]

    def exchange(self, what: str, mine: str, *, rank: int, size: int, timeout_s: float) -> list[str]:
        """Returns the `mine` of each of `size` ranks; every rank must call it. Errors as in `await_all`."""
        self._ask(lambda: self._store.set(f"{what} of {rank}", mine), timeout_s)
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


# Thread blocks of a kernel that sends or receives. Each spins on a multiprocessor until its message has gone,
# and a rank may have one kernel in each direction to each neighbour at a time. Sums take what they like.
_MOST_CTAS = 4
# When torch's own watchdog gives up, it ends the process a minute later, without an exception; so it is not
# to, and `DeviceWaits` does. It also ends it when NCCL has an error, unless this says 0 while a backend is
# made.
_NEVER = timedelta(days=1000)
_ENDS_PROCESSES = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def backend(
    store: Store,
    rank: int,
    size: int,
    *,
    name: str,
    accelerated: bool,
    timeout_s: float,
    sums: bool = False,
) -> Any:
    """gloo, or NCCL where `accelerated`, between all ranks of the store; all must call. `sums`: it is for
    collectives, not for messages. Waits in gloo end after the timeout, those of a device are `DeviceWaits`.

    `PeerError`, which cannot say of whom, if they are not all there in time or one of them has failed.
    """
    keys = store.under(name)

    def connect() -> Any:
        if not accelerated:
            return dist.ProcessGroupGloo(keys, rank, size, timedelta(seconds=timeout_s))
        before = os.environ.get(_ENDS_PROCESSES)
        os.environ[_ENDS_PROCESSES] = "0"
        try:
            return dist.ProcessGroupNCCL(keys, rank, size, nccl_options(dist.ProcessGroupNCCL, sums=sums))
        finally:
            del os.environ[_ENDS_PROCESSES]
            if before is not None:
                os.environ[_ENDS_PROCESSES] = before

    try:
        # Its own timeout does not cover a store that is silent.
        return bounded(connect, timeout_s + 1, store.has_failed)
    except (RuntimeError, TimeoutError) as error:
        store.give_up()
        cause = f"not all ranks connected within {timeout_s:g} s: {str(error).splitlines()[0]}"
        raise PeerError(None, None, cause, timed_out=True) from error


def nccl_options(nccl: Any, *, sums: bool) -> Any:
    """Streams of high priority, and few thread blocks for messages, where this torch can say so."""
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = _NEVER
    config: Any = getattr(options, "config", None)
    if not sums and hasattr(config, "max_ctas"):
        config.max_ctas = _MOST_CTAS
    return options


def bound_waits(group: Any, timeout_s: float) -> None:
    """Sets the timeout of a process group that the pipeline did not make, if its host waits. With NCCL the
    device waits, torch's watchdog would end the process, and `DeviceWaits` bounds the waits instead.
    """
    group.set_timeout(_NEVER if group.name() == "nccl" else timedelta(seconds=timeout_s))

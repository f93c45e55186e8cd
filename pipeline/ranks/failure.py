"""Spreads one rank's failure to all ranks, so that all raise the same error.

A rank that raises writes the failure into the process group's store, where the first one counts, and then
closes its connections. A wait on a closed connection fails at once; its rank reads the failure, raises the
same error and closes its own connections, and so on along the pipeline. A rank that was killed or stopped
writes nothing. Then the first that waits for it in vain writes whom it waited for, and that rank may itself
only wait. Where a connection breaks and the store is gone too, it is the process that held it.

Under plain `env://` rendezvous the store lives in a thread of rank 0. If that process is stopped (a debugger,
a full swap, SIGSTOP) its kernel still accepts requests, and no answer comes back: `check`, `compare_set`,
`get` and `wait` then hang, whatever `set_timeout` says, and hold the lock of their connection. So every
question is put by a thread of its own, which is left behind if no answer comes, and through a connection that
nobody else uses.

Backends are torch.distributed's own, made directly on the process group's store. `dist.new_group` names a
group by how many the process has seen, so that ranks with different pasts wait for each other forever.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from copy import copy
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

    For a pipeline alone these are its ranks, on a grid those of all its pipelines, because these wait for
    each other once a step; each rank then has its number in the job. `store` has the keys that all of them
    share, and `of_pipeline` those of this process's pipeline; `coordinates` says where a rank is on the grid.
    """

    def __init__(
        self,
        store: Store,
        of_pipeline: Store | None = None,
        *,
        coordinates: Callable[[int], str] | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store, self.of_pipeline = store, of_pipeline or store
        self.is_grid = coordinates is not None
        self._coordinates = coordinates or (lambda rank: "")
        self._now, self._sleep = now, sleep
        self.noticed = False  # a failure elsewhere, by the thread that watches
        self.device_waits = DeviceWaits(now)  # of the accelerator of this rank
        self._late: PeerError | None = None  # which of the device's waits has not ended in time
        self._connections: list[tuple[Connection, bool]] = []  # and whether they are cut at a notice
        self._groups: list[Connection] = []  # of the user's mesh: cut, but not closed
        self._of_all: ObjectCollectives | None = None
        self._stop: Callable[[], None] | None = None
        self._failed: ActionError | None = None
        self._is_over = False
        self._process = os.getpid()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around the making of a pipeline: whatever is raised ends it on all ranks, as an `ActionError` where
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

    def object_collectives(self) -> ObjectCollectives:
        """Returns collectives for rare work of all ranks together; all must call. The first call connects."""
        if self._of_all is None:
            connection = Connection(backend(self.store, "all", accelerated=False), self.store.ranks)
            self.cuts(connection)
            self._of_all = ObjectCollectives(connection, self.store.rank)
        return self._of_all

    def watch_over(self, groups: Iterable[dist.ProcessGroup], device_type: str) -> None:
        """Bounds every wait in these groups, which code outside the pipeline (`fully_shard`, tensor-parallel
        layers) uses in the middle of an action, and closes the groups if a rank fails.
        """
        for group in groups:
            for kind in dict.fromkeys(("cpu", device_type)):
                with suppress(RuntimeError):  # a group need not have a backend for each
                    found: Any = group._get_backend(torch.device(kind))
                    # With NCCL the device waits, which `DeviceWaits` bounds.
                    limit = _NEVER if found.name() == "nccl" else timedelta(seconds=self.store.timeout_s)
                    found.set_timeout(limit)
                    self._groups.append(Connection(found, ()))

    def cuts(self, connection: Connection, *, at_notice: bool = True) -> None:
        """Another connection that is closed at the end, and cut when any rank fails, or only this one."""
        self._connections.append((connection, at_notice))

    # A failure

    def peer_error(self, error: BaseException) -> PeerError | StoreError | None:
        """Returns the error if it reports a missing rank, None if it is this rank's own failure."""
        if isinstance(error, PeerError | StoreError):
            return error
        return peer_error_of(error) if self.is_grid else None

    def end(self, action: Action | None, error: BaseException) -> ActionError:
        """Ends everything because of an error on any rank, once, and returns what happened. An error after
        the end in good order stays on this rank.
        """
        if self._failed is not None:
            return self._failed
        mine = self._failure(action, summary(error), self.store.ranks[self.store.rank])
        if self.is_over:
            return mine
        self._stop_watching()
        missing = self.peer_error(error)
        if isinstance(missing, StoreError):
            missing = PeerError(None, None, str(missing))
        # A wait of the device that was late is why other connections were cut.
        self._failed = self._report(mine) if missing is None else self.explain(self._late or missing)
        self._cut_all()
        return self._failed

    def _failure(self, action: Action | None, cause: str, rank: int | None) -> ActionError:
        """A failure, with the place of the rank on the grid."""
        return ActionError(action, cause, rank, self._coordinates(rank) if rank in self.store.ranks else "")

    def _report(self, error: ActionError) -> ActionError:
        """Writes a failure and returns the first that any rank wrote."""
        mine = {"action": str(error.action or ""), "rank": error.rank, "cause": error.cause}
        try:
            return self._read(self.store.set_failure(json.dumps(mine)))
        except StoreError:
            return error

    def explain(self, error: PeerError) -> ActionError:
        """Returns why a peer cannot be reached: the failure that some rank writes within a moment, else that
        the peer is missing, which this rank then writes.
        """
        mine = self._failure(error.action, error.cause, error.peer)
        deadline_s = self._now() + EXPLANATION_S
        try:
            while self._now() < deadline_s:
                if (written := self.store.failure()) is not None:
                    return self._read(written)
                self._sleep(_AGAIN_S)
        except StoreError as gone:
            host = self.store.host
            is_known = error.peer is not None and (error.timed_out or error.peer == host)
            if self.store.is_in_rank and not is_known:
                what = "did not answer" if gone.silent else "disappeared"
                return self._failure(None, f"the process that held the store {what}", host)
            return mine
        return self._report(mine)

    def _read(self, written: bytes) -> ActionError:
        found = json.loads(written)
        action = Action.parse(found["action"]) if found["action"] else None
        return self._failure(action, found["cause"], found["rank"])

    def refuse(self) -> None:
        """`RuntimeError` if the pipeline has ended, `PeerError` if another rank has failed."""
        if self._failed is not None:
            raise RuntimeError(
                f"this pipeline has failed before ({self._failed}); build a new one on every rank"
            )
        if self._is_over or self._process != os.getpid():
            raise RuntimeError("this pipeline is closed; build a new one on every rank")
        if self.noticed:
            raise self._late or PeerError(None, None, "another rank has failed")

    @property
    def is_over(self) -> bool:
        """Whether everything is closed, or belongs to the parent of a forked process."""
        return self._is_over or self._process != os.getpid()

    # Watching

    def watch(self, watch: Watch) -> None:
        """Looks for failures beside everything else from now on.

        On CPUs a rank waits for its neighbours' connections, which break when they fail. Somebody has to look
        on GPUs, which wait without their host knowing, and on a grid, where a rank may wait for one that only
        waits for the one that failed. A store that has not answered for the timeout is a failure too, and so
        is a device that has waited as long. `watch` is how to look again and again.
        """
        look = WeakMethod(self._look)  # the thread must not keep a pipeline alive
        self._stop = watch(lambda: (mine := look()) is None or mine(), _LOOK_S)

    def _look(self) -> bool:
        """Looks for a failure; returns whether looking may stop."""
        limit_s = self.store.timeout_s
        try:
            failed = self._is_over or self.store.failure(limit_s) is not None
            if not failed:  # the step decides later which failure is written
                self._late = self.device_waits.overdue(limit_s)
                failed = self._late is not None
        except StoreError:  # and what held it
            failed = True
        if failed and not self._is_over:
            # Makes this rank's waits fail, including a current one.
            self.noticed = True
            at_notice = [connection for connection, cut_now in tuple(self._connections) if cut_now]
            for connection in (*at_notice, *self._groups):
                connection.cut(beside=True)
        return failed

    def _stop_watching(self) -> None:
        self._is_over = True
        if self._stop is not None:
            self._stop()

    def _cut_all(self) -> None:
        for connection in (*(connection for connection, _ in self._connections), *self._groups):
            connection.cut()

    def close(self) -> None:
        """Closes all connections, once; after a failure of another rank it cuts what is still open."""
        if self.is_over:
            return
        self._stop_watching()
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
    """The `PeerError` for an exception of a collective of torch's, which must not pass for a failure of the
    action in which it runs; None for any other. torch has types for some of them, and those of gloo name it.
    """
    is_of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return missing(error) if is_of_gloo or isinstance(error, dist.DistError) else None


def missing(error: BaseException) -> PeerError:
    """Returns a `PeerError` for the error of a collective, which does not tell which rank it waited for."""
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    what = cleaned(next(lines, type(error).__name__))
    remedy = "where no replica has failed, give all of them equally many mini-batches"
    return PeerError(None, None, f"a collective failed: {what}; {remedy}")


# The store

# The longest that a store takes to say what is known of failures, on a busy machine, while its host lives.
ANSWER_S = 10.0
_ASK_S = 0.1  # between two questions whether a call is given up
# Two connections for all pipelines of a group: for questions, and for what waits in the store for long and
# holds the lock of its connection. Where one is given up, its thread still holds that lock, so the next
# pipeline connects anew.
_connections: WeakKeyDictionary[dist.ProcessGroup, tuple[Any, Any]] = WeakKeyDictionary()


def bounded(call: Callable[[], T], limit_s: float, given_up: Callable[[], object] | None = None) -> T:
    """Returns or raises what `call` does in a thread of its own. `TimeoutError`, which leaves the thread
    behind, after `limit_s` seconds, or if `given_up()`, which is asked now and then, is true.
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

    Ranks that begin their pipelines on the group in the same order get the same keys, so a store is the first
    thing that a pipeline makes. `ranks` are those that do, if not all of the group, by their numbers in it.
    A store that does not answer or is gone is a `StoreError`, and while it connects an `ActionError`.

    Attributes:
        ranks: what errors call the ranks
        rank: which of them is this process's, from 0
        timeout_s: how long any rank is waited for
        host: the rank of the group whose process holds the store; None if that is the launcher or a process
            outside of the group
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, ranks: Sequence[int] = ()) -> None:
        own, members = dist.get_rank(group), dist.get_process_group_ranks(group)
        self.ranks, self.timeout_s = tuple(ranks) or tuple(range(len(members))), timeout_s
        self.rank = self.ranks.index(own)
        # torchrun's store lives in its agent, any other in the first process of the job.
        self.is_in_rank = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.host = members.index(0) if 0 in members and self.is_in_rank else None
        self._group = group
        self._failed: StoreError | None = None

        def connect() -> list[Any]:
            if group not in _connections:
                store: Any = group.get_group_store()
                _connections[group] = store.clone(), store.clone()
            # Grids beside each other in one job, each of some of its ranks, have keys of their own.
            name = f"pipeline of {' '.join(map(str, ranks))} " if ranks else "pipeline "
            number = _connections[group][0].add(f"{name}on rank {own}", 1)
            return [_below(f"{name}{number}", store) for store in _connections[group]]

        try:
            self._store, self._backends = self._ask(connect, timeout_s)
        except StoreError as error:
            raise ActionError(None, str(error), self.host) from error
        self._of_all = self._store  # has what is said of failures

    def part(self, group: dist.ProcessGroup) -> Store:
        """Returns the key space of a group of some of the ranks, which has the failures of all."""
        found = copy(self)
        found.ranks, found.rank = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
        name = f"part of {' '.join(map(str, found.ranks))}"
        found._store, found._backends = [_below(name, store) for store in (self._store, self._backends)]
        return found

    def give_up(self) -> None:
        """Drops cached connections on which a thread may still wait; the next pipeline makes new ones."""
        _connections.pop(self._group, None)

    def failure(self, limit_s: float = ANSWER_S) -> bytes | None:
        """The first failure that a rank has written, None if none has."""
        store = self._of_all
        return self._ask(lambda: store.get("failure") if store.check(["failure"]) else None, limit_s)

    def set_failure(self, text: str) -> bytes:
        """Writes a failure if there is none yet. Returns the first failure."""
        return self._ask(lambda: self._of_all.compare_set("failure", "", text), ANSWER_S)  # type: ignore[no-any-return]

    def exchange(self, what: str, mine: str) -> list[str]:
        """Returns the `mine` of each rank; every rank must call it. `PeerError` names the first that has
        given none after the timeout, and comes earlier if a rank has failed.
        """
        keys = {rank: f"{what} of {rank}" for rank in self.ranks}

        def meet() -> list[str]:
            self._backends.set(keys[self.ranks[self.rank]], mine)
            try:
                self._backends.wait([*keys.values()], timedelta(seconds=self.timeout_s))
            except dist.DistStoreError:
                for rank, key in keys.items():
                    if not self._backends.check([key]):
                        why = f"did not answer: timed out after {self.timeout_s:g} s, nothing came from it"
                        raise PeerError(None, rank, why, timed_out=True) from None
            return [self._backends.get(key).decode() for key in keys.values()]

        return self._ask(meet, self.timeout_s + 1, self.failure)

    def under(self, name: str) -> Any:
        """The store as torch's backends take it, with keys below `name`. They wait in it themselves."""
        return _below(name, self._backends)

    def _ask(
        self, question: Callable[[], T], limit_s: float, given_up: Callable[[], object] | None = None
    ) -> T:
        if self._failed is not None:  # the lock of its connection is still held
            raise self._failed
        try:
            return bounded(question, limit_s, given_up)
        except TimeoutError as error:
            self.give_up()
            if given_up is not None and given_up():
                raise PeerError(None, None, "another rank has failed") from None
            self._failed = StoreError(f"did not answer: {error}", silent=True)
        except (PeerError, StoreError):
            raise
        except RuntimeError as error:
            self._failed = StoreError(f"is gone: {error}", silent=False)
        raise self._failed


def _below(name: str, store: Any) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


# Thread blocks of a kernel that sends or receives. Each spins on a multiprocessor until its message has gone,
# and a rank may have one kernel in each direction to each neighbour at a time. Sums take what they like.
_MOST_CTAS = 4
# When torch's own watchdog gives up, it ends the process a minute later, without an exception; so it is not
# to, and `DeviceWaits` does. It also ends it when NCCL has an error, unless this says 0 while a backend is
# made.
_NEVER = timedelta(days=1000)
_ENDS_PROCESSES = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def backend(store: Store, name: str, *, accelerated: bool, sums: bool = False) -> Any:
    """gloo, or NCCL where `accelerated`, between all ranks of the store; all must call. `sums`: it is for
    collectives, not for messages. Waits in gloo end after the timeout, those of a device are `DeviceWaits`.

    `PeerError`, which cannot say of whom, if they are not all there in time or one of them has failed.
    """
    keys, place, timeout_s = store.under(name), (store.rank, len(store.ranks)), store.timeout_s

    def connect() -> Any:
        if not accelerated:
            return dist.ProcessGroupGloo(keys, *place, timedelta(seconds=timeout_s))
        before = os.environ.get(_ENDS_PROCESSES)
        os.environ[_ENDS_PROCESSES] = "0"
        try:
            return dist.ProcessGroupNCCL(keys, *place, nccl_options(dist.ProcessGroupNCCL, sums=sums))
        finally:
            del os.environ[_ENDS_PROCESSES]
            if before is not None:
                os.environ[_ENDS_PROCESSES] = before

    try:
        # Its own timeout does not cover a store that is silent.
        return bounded(connect, timeout_s + 1, store.failure)
    except (RuntimeError, TimeoutError) as error:
        store.give_up()
        cause = f"not all ranks connected within {timeout_s:g} s: {str(error).splitlines()[0]}"
        raise PeerError(None, None, cause) from error


def nccl_options(nccl: Any, *, sums: bool) -> Any:
    """Streams of high priority, and few thread blocks for messages, where this torch can say so."""
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = _NEVER
    config: Any = getattr(options, "config", None)
    if not sums and hasattr(config, "max_ctas"):
        config.max_ctas = _MOST_CTAS
    return options

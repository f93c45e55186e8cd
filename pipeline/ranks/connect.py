"""The connections between the ranks of a pipeline: opened before the first step, in the same order on every
rank, and closed after the last step.

A pipeline ends in one of three ways. A failure closes the connections of every rank at once
(`ranks.failure`). Closing it in good order waits for the device first, because a message that was sent leaves
an accelerator only when its receiver's kernel is there, and shutting down earlier would take it back. And one
that is dropped, or whose process ends, is closed in good order too.

Everything that a transport asks of the world outside of its process goes through `Network`, so that it can
run in another world: one that keeps the rules of an accelerator's network, but in one process, without a
device and without a clock.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from .. import devices
from ..errors import ActionError, PeerError
from ..plan.edges import Direction
from ..plan.schedule import Action, Schedule
from ..plan.walk import channels
from .failure import FailureDetector, Store, backend, bounded, watch_in_thread
from .launch import machine_id
from .shared_memory import Neighbour
from .wire import NCCL_TYPES, Connection, ObjectCollectives, TensorSpec, Transit

_FIRST_TAG, _FIRST_SPEC = 2**29 + 1, TensorSpec((1,), (1,), torch.float32)
T = TypeVar("T")
FirstMessage = tuple[Connection, int, int]
"""The first message on a connection from one rank to another."""


class Network:
    """The processes of a process group of torch.distributed, seen from one of them."""

    now = staticmethod(time.monotonic)  # seconds of a clock that never goes back
    sleep = staticmethod(time.sleep)  # lets the others go on
    watch = staticmethod(watch_in_thread)  # looks at something beside everything else

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def store(self, timeout_s: float) -> Store:
        """Returns a connected store with keys for one more pipeline."""
        store = Store(self._group)
        store.connect(timeout_s)
        return store

    def part(self, store: Store) -> Store:
        """Returns the part of the grid's store that the pipeline of these processes uses."""
        return store.part(self._group)

    def is_accelerated(self, device: torch.device) -> bool:
        """Whether messages from and to the device are waited for by the device, behind the host."""
        return devices.is_accelerator(device)

    def synchronize(self, device: torch.device) -> None:
        """Waits until the device has done all it was given."""
        devices.synchronize(device)

    def mark(self, device: torch.device) -> Any:
        """Returns an event that the device reaches when it has done its work so far; `query()` tells."""
        return devices.mark(device)

    def backend(self, store: Store, name: str, *, accelerated: bool, timeout_s: float) -> Any:
        """Connects all ranks for messages of one kind; all must call."""
        return backend(store, self.rank, self.size, name=name, accelerated=accelerated, timeout_s=timeout_s)

    def bounded(
        self, device: torch.device, call: Callable[[], T], limit_s: float, given_up: Callable[[], bool]
    ) -> T:
        """Runs `call` in a thread with `device` as the current one, and returns or raises what it does.
        `TimeoutError` if it takes longer than `limit_s` or if `given_up()` is true.
        """

        def on_device() -> T:
            with devices.on(device):
                return call()

        return bounded(on_device, limit_s, given_up)


def network_of(group: dist.ProcessGroup | Network) -> Network:
    """The network of a process group; one that is given stays as it is."""
    return group if isinstance(group, Network) else Network(group)


def detector_of(network: Network, timeout_s: float) -> FailureDetector:
    """Returns a failure detector for the ranks of a single pipeline."""
    ranks, store = range(network.size), network.store(timeout_s)
    return FailureDetector(store, network.rank, ranks, now=network.now, sleep=network.sleep)


class Session:
    """The connections of the rank of `network` in a pipeline. The first is the one that the host reads.

    `detector` is of the ranks of the network, or of the grid that they are a part of.
    """

    def __init__(
        self, network: Network, device: torch.device, detector: FailureDetector, *, timeout_s: float
    ) -> None:
        self.network, self.device, self.timeout_s = network, device, timeout_s
        self.is_accelerated = network.is_accelerated(device)
        self.detector = detector
        self.store = network.part(detector.store) if detector.is_grid else detector.store
        if self.is_accelerated:
            detector.device_waits.begin(partial(network.mark, device))
        self._process = os.getpid()
        self._connections: list[Connection] = []  # of which the first has the shared memory
        self._failed: ActionError | None = None
        self._closed = False

    def connect(self, name: str, near: dict[int, Neighbour], *, accelerated: bool = False) -> Connection:
        """One more connection between all ranks; all must call."""
        found = self.network.backend(self.store, name, accelerated=accelerated, timeout_s=self.timeout_s)
        types, waits = (NCCL_TYPES, self.detector.device_waits) if accelerated else (None, None)
        connection = Connection(found, len(self._connections), near, types, waits)
        # The host does not wait for an accelerator's messages, so when a failure elsewhere is noticed these
        # are cut to release the device: what it receives from then on is garbage, and the step raises when it
        # ends, or else whatever is called next. For the first connection the host does wait, and the rank
        # that it waits for closes that.
        self.detector.cuts(connection, at_notice=not self.is_accelerated or bool(self._connections))
        self._connections.append(connection)
        return connection

    def watch(self) -> None:
        """Watches for failures elsewhere from now on, on accelerators; on a grid that has begun before."""
        if self.is_accelerated and not self.detector.is_grid:
            self.detector.watch(self.timeout_s, self.network.watch)

    @property
    def shared_bytes(self) -> int:
        """Size of the buffers in shared memory. Only the first connection has them, for all neighbours."""
        return self._connections[0].shared_bytes if self._connections else 0

    def synchronize(self) -> None:
        """Waits until the device has done all it was given."""
        if self.is_accelerated:
            self.network.synchronize(self.device)

    def refuse_after_failure(self) -> None:
        if self._process != os.getpid():  # one that was forked: the connections are its parent's
            self._closed = True
        if self._failed is not None:
            raise RuntimeError(
                f"this pipeline has failed before ({self._failed}); build a new one on every rank"
            )
        if self._closed:
            raise RuntimeError("this pipeline is closed; build a new one on every rank")

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        """Ends everything because of an error on any rank. Returns what happened, as far as any rank knows.

        A closed session has ended: an error after that stays on this rank.
        """
        if self._closed:
            return self.detector.failure(action, error)
        if self._failed is None:
            self._failed = self.detector.end(action, error)
        return self._failed

    def close(self) -> None:
        """Waits until everything sent is gone and shuts down; once."""
        if self._closed or self._failed is not None or self._process != os.getpid():
            return  # in a process that was forked the connections are its parent's
        self._closed = True
        if not self.detector.noticed:
            self.synchronize()
        self.detector.close()


def open_connections(
    session: Session, schedule: Schedule, *, share_memory: bool
) -> tuple[Connection, ObjectCollectives, dict[tuple[bool, bool], Connection], Connection]:
    """Connects the rank of the session with all others, which must call too, and watches them from then on.

    Returns connections that go ways of their own, so that none queues behind another: for headers and
    specs, which the host reads; for what all ranks exchange outside of steps; for activations and
    gradients, by the way that they take; and for the loss.

    `PeerError` or `StoreError` for a rank that does not come within the timeout; `ValueError`, on every rank
    alike, where one uses a GPU and another none.
    """
    network, accelerated = session.network, session.is_accelerated
    near = neighbours(
        partial(session.store.exchange, rank=network.rank, size=network.size, timeout_s=session.timeout_s),
        network.rank,
        peers(schedule, network.rank),
        device_type=session.device.type,
        willing=share_memory and not accelerated,
        timeout_s=session.timeout_s,
    )
    # Headers and specs are read by the host, so they never go through NCCL.
    control = session.connect("control", near)
    collectives = ObjectCollectives(control, network.rank, network.size)
    by_heading = {
        heading: session.connect(name, near, accelerated=accelerated)
        for heading, name in connection_names(schedule).items()
    }
    # What each connection takes first, from which rank to which.
    first_messages: list[FirstMessage] = [
        (by_heading[gradients, target > source], source, target)
        for source, target, gradients in sorted(channels(schedule))
    ]
    # Where hosts wait for messages it goes by `control`; with the gradients where these go the same way.
    loss = by_heading[True, False]
    if accelerated and schedule.placement:
        loss = session.connect("loss", near, accelerated=accelerated)
        first_messages += [(loss, *pair) for pair in pairwise(loss_chain(schedule))]
    session.watch()
    if accelerated:
        warm_up(session, first_messages)
    return control, collectives, by_heading, loss


def warm_up(session: Session, first_messages: Iterable[FirstMessage]) -> None:
    """Sends the first message of every pair of ranks that will talk over NCCL, before any step;
    `first_messages` are those of all ranks, in one order. `PeerError` names the rank that does not come
    within the timeout; a failure elsewhere that is noticed meanwhile ends it too.

    NCCL connects two ranks when the first message passes between them, and the host stands still until both
    are there, for ever if one of them has failed. In a step that would hold up the pipeline, without a bound.
    So the ranks meet in pairs, each meeting in a thread that is left behind if the other rank does not come
    in time. (All connections at once, by collective initialization, would be simpler; but then one stream
    would carry the messages to both neighbours, one after another.)
    """
    network, device = session.network, session.device
    pairs: dict[tuple[int, int], list[FirstMessage]] = {}
    for connection, source, target in first_messages:
        pairs.setdefault((min(source, target), max(source, target)), []).append((connection, source, target))
    deadline_s = network.now() + session.timeout_s
    # In one order for all, so of the pairs that have yet to meet the first always can. Neighbours come first,
    # the even pairs before the odd ones: a chain takes two turns.
    for pair in sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair[0] % 2, pair)):
        if network.rank not in pair:
            continue
        peer = sum(pair) - network.rank

        def exchange(first_messages: list[FirstMessage] = pairs[pair], peer: int = peer) -> None:
            works: list[tuple[Connection, Transit, Tensor]] = []  # the tensors stay until they are gone
            for connection, source, target in first_messages:
                buffer = connection.buffer(_FIRST_SPEC, source, device)
                if network.rank == source:
                    work = connection.send(buffer.flat.zero_(), target, _FIRST_TAG)
                else:
                    work = connection.receive(buffer, source, _FIRST_TAG)
                works.append((connection, work, buffer.flat))
            for connection, work, _ in works:
                connection.wait(work, None, peer)
            session.synchronize()

        try:
            network.bounded(device, exchange, deadline_s - network.now(), lambda: session.detector.noticed)
        except TimeoutError as error:
            what = f"did not answer: it did not come to connect within {session.timeout_s:g} s"
            raise PeerError(None, peer, what, timed_out=True) from error
        session.detector.refuse_after_notice()


# Ranks on one host


def neighbours(
    exchange: Callable[[str, str], list[str]],
    rank: int,
    peers: Collection[int],
    *,
    device_type: str,
    willing: bool,
    timeout_s: float,
) -> dict[int, Neighbour]:
    """The `peers`, by rank, connected through local sockets, if all ranks are on this host and `willing`;
    else none, and the ranks talk through the network. All ranks call, each among the peers of its peers.

    By `exchange` all learn what each of them says of something. Each rank listens on a socket for each of its
    peers that come after it, says its name and where such names are known, and the peers connect. With a
    socket for each nobody is taken for another.

    `PeerError` for a peer that listens no more.

    `ValueError`, on every rank alike, where ranks are on devices of different types.
    """
    willing = willing and sys.platform == "linux"
    token = secrets.token_hex(16) if willing else ""
    found: dict[int, Neighbour] = {}
    with ExitStack() as stack:
        listeners: dict[int, socket.socket] = {}
        for peer in [peer for peer in peers if peer > rank and willing]:
            listeners[peer] = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listeners[peer].bind(_name(token, peer))
            listeners[peer].listen(1)
        said = exchange("address", json.dumps([device_type, network_id(), token]))
        types, networks, tokens = zip(*map(json.loads, said), strict=True)
        if (other := next((r for r, each in enumerate(types) if each != types[0]), None)) is not None:
            raise ValueError(
                f"the stages of rank 0 are on {types[0]} and those of rank {other} on {types[other]}, and "
                "messages between ranks go from one type of device to the same; move the layers, or pass "
                "devices= on every rank"
            )
        if not all(tokens) or len(set(networks)) > 1:
            return {}
        for peer in [peer for peer in peers if peer < rank]:
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                link.connect(_name(tokens[peer], rank))
            except OSError as error:  # it has given up, because this rank has come too late
                raise PeerError(None, peer, f"disappeared: {error}", timed_out=False) from error
            found[peer] = Neighbour(link.dup(), timeout_s)
        exchange("connected", "")  # so that nothing is waited for at a socket
        for peer, listener in listeners.items():
            found[peer] = Neighbour(listener.accept()[0], timeout_s)
    for one, other_one in permutations(found.values(), 2):
        one.introduce(other_one)
    return found


def network_id() -> str:
    """Returns a text that is equal for two processes only if they share a kernel and a network namespace."""
    namespace = Path("/proc/self/ns/net")
    return f"{machine_id()} {namespace.readlink() if namespace.is_symlink() else ''}"


def _name(token: str, rank: int) -> str:
    """Where a rank connects to: abstract, so that no file could stay behind. The token's 128 random bits come
    from the store alone, so only the right rank can listen there.
    """
    return f"\0pipeline-{token}-{rank}"


# Which ranks send to which, and over which connections: the messages of edges, the header of a step and its
# loss.
#
# A connection takes what is sent between two ranks in one order, so activations and gradients have one
# each. Where ranks have several stages, activations also go down the ranks and gradients up, which gets
# connections of its own: over NCCL a rank that waits on a connection cannot send on it.
#
# Only the rank of the first stage sees the mini-batch. A header is known before anything happens, so it
# passes from rank to rank, in the order of their first stages, along connections that are there anyway. The
# loss becomes known in the middle of a step, while the other ranks compute; a rank that had to pass it on
# could do so only between two actions, so the rank of the last stage tells each other rank itself. On
# accelerators, where it is told when a step ends, it passes in the reverse order of the last stages, behind
# the gradients.
#
#     one stage each    header 0 1 2 3    loss 3 to 0, 1 and 2    on accelerators 3 2 1 0
#     in a V            header 0 1 2 3    loss 0 to 1, 2 and 3    on accelerators 0 1 2 3

# Tensors of a message have tags of their own (`first_tag` + position).
MOST_TENSORS = 64
# Below the tags of what is no activation and no gradient.
MOST_MESSAGES = 2**28 // MOST_TENSORS


def first_tag(direction: Direction, microbatch: int, num_microbatches: int) -> int:
    """The tag of the first tensor of a message."""
    number, back = direction
    return ((2 * number + back) * num_microbatches + microbatch) * MOST_TENSORS


def connection_names(schedule: Schedule) -> dict[tuple[bool, bool], str]:
    """The names of the connections that messages of the chain take, by whether they are gradients and whether
    they go to a higher rank.
    """
    names = {(False, True): "activations", (True, False): "gradients"}
    for source, target, back in channels(schedule):
        names.setdefault((back, target > source), "gradients up" if back else "activations down")
    return names


def refuse_too_many(schedule: Schedule) -> None:
    """`ValueError` for more messages than there are tags."""
    if 2 * schedule.num_stages * schedule.num_microbatches > MOST_MESSAGES:
        raise ValueError(
            f"{schedule.num_stages} stages with {schedule.num_microbatches} micro-batches are more than "
            f"{MOST_MESSAGES} messages a step; choose fewer micro-batches"
        )


def peers(schedule: Schedule, rank: int) -> set[int]:
    """The ranks that `rank` exchanges messages with in a step, where hosts wait for them: tensors, the header
    and the loss.
    """
    pairs = {(source, target) for source, target, _ in channels(schedule)}
    pairs |= set(pairwise(header_chain(schedule)))
    pairs |= {(loss_chain(schedule)[0], other) for other in loss_chain(schedule)}
    return {end for pair in pairs if rank in pair for end in pair} - {rank}


class Route(NamedTuple):
    """The rank that tells a rank something, None if it knows already, and the ranks that it tells."""

    source: int | None
    targets: tuple[int, ...]


def header_chain(schedule: Schedule) -> tuple[int, ...]:
    """The ranks in the order in which they learn of a step."""
    return tuple(dict.fromkeys(map(schedule.worker, range(schedule.num_stages))))


def loss_chain(schedule: Schedule) -> tuple[int, ...]:
    """The ranks in the order in which accelerators learn of the loss; it begins with the one that has it."""
    return tuple(dict.fromkeys(map(schedule.worker, reversed(range(schedule.num_stages)))))


def loss_route(schedule: Schedule, rank: int, *, accelerated: bool) -> Route:
    """Returns the route of the loss at `rank`."""
    chain = loss_chain(schedule)
    if accelerated:
        return along(chain, rank)
    return Route(None, chain[1:]) if rank == chain[0] else Route(chain[0], ())


def along(chain: Sequence[int], rank: int) -> Route:
    """Returns the route at `rank` where each rank of a chain tells the next."""
    position = chain.index(rank)
    return Route(chain[position - 1] if position else None, tuple(chain[position + 1 : position + 2]))

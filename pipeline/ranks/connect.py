"""The connections between the ranks of a pipeline: opened before the first step, in the same order on every
rank, and closed after the last step.

A pipeline ends in one of two ways. A failure closes the connections of every rank at once (`ranks.failure`).
Closing it in good order, which dropping it and the end of the process do too, waits for the device first,
because a message that was sent leaves an accelerator only when its receiver's kernel is there, and shutting
down earlier would take it back.

Everything that a transport asks of the world outside of its process goes through `Network`, so that it can
run in another world: one that keeps the rules of an accelerator's network, but in one process, without a
device and without a clock.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, pairwise, permutations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from .. import devices
from ..errors import PeerError
from ..plan.edges import Direction
from ..plan.schedule import Schedule
from ..plan.walk import channels
from .failure import FailureDetector, Store, backend, bounded, watch_in_thread
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
    backend = staticmethod(backend)  # connects all ranks for messages of one kind; all must call
    is_accelerated = staticmethod(devices.is_accelerator)  # whether messages are waited for behind the host
    synchronize = staticmethod(devices.synchronize)  # waits until the device has done all it was given
    mark = staticmethod(devices.mark)  # an event that the device reaches when it has done its work so far

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def store(self, timeout_s: float) -> Store:
        """Returns a connected store with keys for one more pipeline."""
        return Store(self._group, timeout_s)

    def detector(self, timeout_s: float) -> FailureDetector:
        """Returns a failure detector for the ranks of one more pipeline."""
        return FailureDetector(self.store(timeout_s), now=self.now, sleep=self.sleep)

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


class Connections(NamedTuple):
    """The connections of a rank. They go ways of their own, so that none queues behind another."""

    control: Connection  # headers and specs, which the host reads, so never NCCL's
    collectives: ObjectCollectives  # what all ranks exchange outside of steps
    by_heading: dict[tuple[bool, bool], Connection]  # activations and gradients, as `connection_names` says
    loss: Connection


def open_connections(
    network: Network,
    device: torch.device,
    detector: FailureDetector,
    schedule: Schedule,
    *,
    share_memory: bool,
) -> Connections:
    """Connects this rank with all others, which must call too, and watches them from then on.

    `PeerError` or `StoreError` for a rank that does not come within the timeout; `ValueError`, on every rank
    alike, where one uses a GPU and another none.
    """
    store, is_accelerated = detector.of_pipeline, network.is_accelerated(device)
    if is_accelerated:
        detector.device_waits.begin(partial(network.mark, device))
    control_backend, near = neighbours(
        store,
        peers(schedule, network.rank),
        device_type=device.type,
        willing=share_memory and not is_accelerated,
        meet=partial(network.backend, store, "control", accelerated=False),
    )
    channels_of_memory = count()

    def connection_over(backend: Any, *, accelerated: bool) -> Connection:
        types, waits = (NCCL_TYPES, detector.device_waits) if accelerated else (None, None)
        connection = Connection(
            backend, store.ranks, near, next(channels_of_memory), types=types, waits=waits
        )
        # The host does not wait for an accelerator's messages, so when a failure elsewhere is noticed these
        # are cut to release the device: what it receives from then on is garbage, and the step raises when it
        # ends, or else whatever is called next. For others the host does wait, and the rank that it waits for
        # closes them.
        detector.cuts(connection, at_notice=accelerated or not is_accelerated)
        return connection

    def connect(name: str) -> Connection:
        backend = network.backend(store, name, accelerated=is_accelerated)
        return connection_over(backend, accelerated=is_accelerated)

    control = connection_over(control_backend, accelerated=False)
    of_hosts = Connection(control_backend, store.ranks)
    detector.cuts(of_hosts, at_notice=not is_accelerated)
    by_heading = {heading: connect(name) for heading, name in connection_names(schedule).items()}
    # What each connection takes first, from which rank to which.
    first_messages: list[FirstMessage] = [
        (by_heading[gradients, target > source], source, target)
        for source, target, gradients in sorted(channels(schedule))
    ]
    # Where hosts wait for messages it goes by `control`; with the gradients where these go the same way.
    loss = by_heading[True, False]
    if is_accelerated and schedule.placement:
        loss = connect("loss")
        first_messages += [(loss, *pair) for pair in pairwise(loss_chain(schedule))]
    if is_accelerated:
        if not detector.is_grid:  # which has begun before
            detector.watch(network.watch)
        warm_up(network, device, detector, first_messages)
    return Connections(control, ObjectCollectives(of_hosts, network.rank), by_heading, loss)


def warm_up(
    network: Network, device: torch.device, detector: FailureDetector, first_messages: Iterable[FirstMessage]
) -> None:
    """Sends the first message of every pair of ranks that will talk over NCCL, before any step;
    `first_messages` are those of all ranks, in one order. `PeerError` names the rank that does not come
    within the timeout; a failure elsewhere that is noticed meanwhile ends it too.

    NCCL connects two ranks when the first message passes between them, and the host stands still until both
    are there, for ever if one of them has failed. In a step that would hold up the pipeline, without a bound.
    So the ranks meet in pairs, each meeting in a thread that is left behind if the other rank does not come
    in time.
    """
    pairs: dict[tuple[int, int], list[FirstMessage]] = {}
    for connection, source, target in first_messages:
        pairs.setdefault((min(source, target), max(source, target)), []).append((connection, source, target))
    store = detector.of_pipeline
    deadline_s = network.now() + store.timeout_s
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
            network.synchronize(device)

        try:
            network.bounded(device, exchange, deadline_s - network.now(), lambda: detector.noticed)
        except TimeoutError as error:
            what = f"did not answer: it did not come to connect within {store.timeout_s:g} s"
            raise PeerError(None, store.ranks[peer], what, timed_out=True) from error
        detector.refuse()


def close(network: Network, device: torch.device, detector: FailureDetector) -> None:
    """Waits until everything sent is gone and shuts down; once."""
    if not detector.is_over and not detector.noticed:
        network.synchronize(device)
    detector.close()


# Ranks on one host


def neighbours(
    store: Store, peers: Collection[int], *, device_type: str, willing: bool, meet: Callable[[], T]
) -> tuple[T, dict[int, Neighbour]]:
    """The `peers`, by rank, connected through local sockets, if all ranks are on this host and `willing`;
    else none, and the ranks talk through the network. All ranks call, each among the peers of its peers.

    Each rank listens on a socket for each of its peers that come after it and says where, and the peers
    connect: with a socket for each nobody is taken for another. Then all ranks `meet`, so that nothing is
    waited for at a socket; what this returns comes first. `PeerError` for a peer that listens no more, or has
    not connected; `ValueError`, on every rank alike, where ranks are on devices of different types.
    """
    willing, rank = willing and sys.platform == "linux", store.rank
    token = secrets.token_hex(16) if willing else ""
    found: dict[int, Neighbour] = {}
    with ExitStack() as stack:
        listeners: dict[int, socket.socket] = {}
        for peer in [peer for peer in peers if peer > rank and willing]:
            listeners[peer] = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listeners[peer].bind(_name(token, peer))
            listeners[peer].listen(1)
            listeners[peer].settimeout(store.timeout_s)
        said = store.exchange("address", json.dumps([device_type, network_id(), token]))
        types, networks, tokens = zip(*map(json.loads, said), strict=True)
        if (other := next((r for r, each in enumerate(types) if each != types[0]), None)) is not None:
            raise ValueError(
                f"the stages of rank 0 are on {types[0]} and those of rank {other} on {types[other]}, and "
                "messages between ranks go from one type of device to the same; move the layers, or pass "
                "devices= on every rank"
            )
        if not all(tokens) or len(set(networks)) > 1:
            return meet(), {}
        for peer in [peer for peer in peers if peer < rank]:
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                link.connect(_name(tokens[peer], rank))
            except OSError as error:  # it has given up, because this rank has come too late
                raise PeerError(None, store.ranks[peer], f"disappeared: {error}") from error
            found[peer] = Neighbour(link.dup(), store.timeout_s)
        met = meet()
        for peer, listener in listeners.items():
            try:
                link, _ = listener.accept()
            except TimeoutError as error:
                what = f"did not answer: it did not connect within {store.timeout_s:g} s"
                raise PeerError(None, store.ranks[peer], what, timed_out=True) from error
            found[peer] = Neighbour(link, store.timeout_s)
    for one, other_one in permutations(found.values(), 2):
        one.introduce(other_one)
    return met, found


def network_id() -> str:
    """Returns a text that is equal for two processes only if they share a kernel and a network namespace."""
    kernel, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    host = kernel.read_text().strip() if kernel.exists() else socket.gethostname()
    return f"{host} {namespace.readlink() if namespace.is_symlink() else ''}"


def _name(token: str, rank: int) -> str:
    """Where a rank connects to; abstract, so that no file could stay behind."""
    return f"\0pipeline-{token}-{rank}"


# Which ranks send to which, and over which connections.
#
# A connection takes what is sent between two ranks in one order, so activations and gradients have one
# each, in each direction: over NCCL a rank that waits on a connection cannot send on it.
#
# A step's header passes from rank to rank, in the order of their first stages. The loss becomes known while
# the other ranks compute, who could pass it on only between two actions, so the rank of the last stage tells
# each other rank itself. On accelerators it passes in the reverse order of the last stages when a step ends.
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
    """The ranks that `rank` exchanges messages with in a step, where hosts wait for them."""
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

"""How ranks that exchange messages find out that they share a host, and connect.

Each rank listens on a local socket for each of its peers that come after it and publishes their names; the
peers connect if they are on the same machine, and say whether they did. Who answers has connected, so
nothing is waited for at a socket, and with a socket for each nobody is taken for another. Whatever is missing
(another host, another network namespace, another system) ends in an answer of no, and the ranks talk through
the network.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
from collections.abc import Collection
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path

from gpipe_bench.pipeline.ranks.shared_memory import Neighbour
from gpipe_bench.pipeline.ranks.store import Store

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Equal for two processes only if one kernel runs both."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def meet(
    store: Store, rank: int, peers: Collection[int], *, willing: bool, timeout_s: float
) -> dict[int, Neighbour]:
    """Those of the `peers` that share this rank's host, by rank; they must call with this rank among theirs.

    `PeerError` names a peer of whom nothing is heard for `timeout_s`.
    """
    willing = willing and sys.platform == "linux"
    before = sorted(peer for peer in peers if peer < rank)
    behind = sorted(peer for peer in peers if peer > rank)
    found: dict[int, Neighbour] = {}
    token = secrets.token_hex(16)
    with ExitStack() as stack:
        listeners = {peer: stack.enter_context(_listen(_name(token, peer))) for peer in behind if willing}
        if behind:
            address = {"machine": machine_id(), "token": token} if willing else {}
            store.set(f"address of rank {rank}", json.dumps(address), timeout_s)
        for peer in before:
            heard = store.await_from(peer, f"address of rank {peer}", timeout_s)
            link = _connect(json.loads(heard), rank) if willing else None
            answer = "yes" if link is not None else "no"
            store.set(f"answer of rank {rank} to rank {peer}", answer, timeout_s)
            if link is not None:
                found[peer] = Neighbour(link, timeout_s)
        for peer in behind:
            answered = store.await_from(peer, f"answer of rank {peer} to rank {rank}", timeout_s)
            if answered == b"yes" and peer in listeners:
                found[peer] = Neighbour(listeners[peer].accept()[0], timeout_s)
    for one, other in permutations(found.values(), 2):
        one.introduce(other)
    return found


def _name(token: str, rank: int) -> str:
    """Where a rank connects to: abstract, so that no file could stay behind. The token's 128 random bits come
    from the store alone, so whoever listens there is the right one.
    """
    return f"\0pipeline-{token}-{rank}"


def _listen(name: str) -> socket.socket:
    """A local socket that one rank can connect to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    listener.listen(1)
    return listener


def _connect(address: dict[str, str], rank: int) -> socket.socket | None:
    """The connection to whoever published the address, if that is on this machine."""
    if address.get("machine") != machine_id():
        return None
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.connect(_name(address["token"], rank))
    except OSError:
        link.close()
        return None
    return link

"""How ranks that exchange messages find out that they share a host, and connect.

Each rank listens on a local socket and publishes its name; those of its peers that come after it connect if
they are on the same machine, and say whether they did. Whatever is missing (another host, another network
namespace, another system) ends in an answer of no, and the ranks talk through the network.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import sys
from collections.abc import Collection
from contextlib import nullcontext
from itertools import permutations
from pathlib import Path

from gpipe_bench.pipeline.ranks.messages.neighbour import Neighbour
from gpipe_bench.pipeline.ranks.store import Store

_RANK = struct.Struct("<I")
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
    listener = _listen(len(behind), timeout_s) if willing and behind else None
    with listener[0] if listener is not None else nullcontext():
        if behind:
            address = {"machine": machine_id(), "token": listener[1]} if listener is not None else {}
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
            if answered == b"yes" and listener is not None:
                link, _ = listener[0].accept()  # who answers has connected, though perhaps not as the next
                found[_RANK.unpack(link.recv(_RANK.size, socket.MSG_WAITALL))[0]] = Neighbour(link, timeout_s)
    for one, other in permutations(found.values(), 2):
        one.introduce(other)
    return found


def _listen(num_peers: int, timeout_s: float) -> tuple[socket.socket, str]:
    """A local socket that so many ranks can connect to, and its name."""
    token = secrets.token_hex(16)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0pipeline-{token}")  # abstract: no file that could stay behind
    listener.listen(num_peers)
    listener.settimeout(timeout_s)
    return listener, token


def _connect(address: dict[str, str], rank: int) -> socket.socket | None:
    """The connection, on which the other side has been told who this is."""
    if address.get("machine") != machine_id():
        return None
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The name holds 128 random bits that only the store tells, so whoever listens there is the right one.
        link.connect(f"\0pipeline-{address['token']}")
        link.sendall(_RANK.pack(rank))
    except OSError:
        link.close()
        return None
    return link

"""How neighbouring ranks find out that they share a host, and connect.

Each rank but the last listens on a local socket and publishes its name; the next rank connects if it is on
the same machine and says whether it did. Whatever is missing (another host, another network namespace,
another system) ends in an answer of no, and the ranks talk through the network.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

from gpipe_bench.pipeline.ranks.messages.neighbour import Neighbour
from gpipe_bench.pipeline.ranks.store import Store

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Equal for two processes only if one kernel runs both."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def meet(store: Store, rank: int, size: int, *, willing: bool, timeout_s: float) -> dict[int, Neighbour]:
    """The neighbours of this rank that share its host, by rank. All ranks of the store must call.

    `PeerError` names a neighbour of whom nothing is heard for `timeout_s`.
    """
    willing = willing and sys.platform == "linux"
    found: dict[int, Neighbour] = {}
    listener = _listen(timeout_s) if willing and rank + 1 < size else None
    with listener[0] if listener is not None else nullcontext():
        if rank + 1 < size:
            address = {"machine": machine_id(), "token": listener[1]} if listener is not None else {}
            store.set(f"address of rank {rank}", json.dumps(address), timeout_s)
        if rank > 0:
            before = store.await_from(rank - 1, f"address of rank {rank - 1}", timeout_s)
            link = _connect(json.loads(before)) if willing else None
            store.set(f"answer of rank {rank}", "yes" if link is not None else "no", timeout_s)
            if link is not None:
                found[rank - 1] = Neighbour(link, timeout_s)
        if rank + 1 < size:
            answer = store.await_from(rank + 1, f"answer of rank {rank + 1}", timeout_s)
            if answer == b"yes" and listener is not None:
                link, _ = listener[0].accept()  # who answers has connected
                found[rank + 1] = Neighbour(link, timeout_s)
    if len(found) == 2:
        left, right = found.values()
        left.introduce(right)
        right.introduce(left)
    return found


def _listen(timeout_s: float) -> tuple[socket.socket, str]:
    """A local socket that the next rank can connect to, and its name."""
    token = secrets.token_hex(16)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0pipeline-{token}")  # abstract: no file that could stay behind
    listener.listen(1)
    listener.settimeout(timeout_s)
    return listener, token


def _connect(address: dict[str, str]) -> socket.socket | None:
    if address.get("machine") != machine_id():
        return None
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The name holds 128 random bits that only the store tells, so whoever listens there is the right one.
        link.connect(f"\0pipeline-{address['token']}")
    except OSError:
        link.close()
        return None
    return link

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
from pathlib import Path
from typing import Any

from gpipe_bench.pipeline.ranks.neighbour import Neighbour

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Equal for two processes only if one kernel runs both."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def meet(store: Any, rank: int, size: int, *, willing: bool, timeout_s: float) -> dict[int, Neighbour]:
    """The neighbours of this rank that share its host, by rank. All ranks of the store must call."""
    willing = willing and sys.platform == "linux"
    listener, token = None, secrets.token_hex(16)
    if rank + 1 < size:
        if willing:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0pipeline-{token}")  # abstract: no file that could stay behind
            listener.listen(1)
            listener.settimeout(timeout_s)
        address = {"machine": machine_id(), "token": token} if willing else {}
        store.set(f"address of rank {rank}", json.dumps(address))
    found: dict[int, Neighbour] = {}
    if rank > 0:
        link = _connect(json.loads(store.get(f"address of rank {rank - 1}"))) if willing else None
        store.set(f"answer of rank {rank}", "yes" if link is not None else "no")
        if link is not None:
            found[rank - 1] = Neighbour(link, timeout_s)
    if rank + 1 < size and store.get(f"answer of rank {rank + 1}") == b"yes" and listener is not None:
        link, _ = listener.accept()
        found[rank + 1] = Neighbour(link, timeout_s)
    if listener is not None:
        listener.close()
    if len(found) == 2:
        before, after = found.values()
        before.introduce(after)
        after.introduce(before)
    return found


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

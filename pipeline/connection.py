"""Point-to-point connections between the ranks of one pipeline, and how to cut them.

They are torch.distributed's own backends, made directly on the process group's store. `dist.new_group` would
do the same, but names a group by how many the process has seen already, so that ranks with different pasts
wait for each other forever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from pipeline.errors import PeerError
from pipeline.schedule import Action

# No message has this tag, so a receive of it can only time out.
_NEVER_SENT = 2**30


class Connection(Protocol):
    """What the transport needs of a backend; calls return at once, the work they give can be waited for."""

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def abort(self) -> None: ...


def store_of(group: dist.ProcessGroup) -> Any:
    """The store through which a process group was set up, for keys of one more pipeline on it.

    Ranks that build their pipelines on the group in the same order get the same keys.
    """
    store = group.get_group_store()
    number = store.add(f"pipelines of rank {dist.get_rank(group)}", 1)
    return dist.PrefixStore(f"pipeline {number}", store)  # type: ignore[attr-defined]


def connect(store: Any, rank: int, size: int, *, name: str, cuda: bool, timeout_s: float) -> Connection:
    """Connects all ranks: gloo, or NCCL with streams of high priority. Every rank of the store must call."""
    store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    if not cuda:
        return dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[return-value]
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)  # type: ignore[return-value]


def cut(connections: Iterable[Connection]) -> None:
    """Makes every wait on these connections fail, here and on the other ranks; they cannot be used again."""
    for connection in connections:
        if not isinstance(connection, dist.ProcessGroupGloo):
            connection.abort()
            continue
        # gloo closes all connections to other ranks when a wait for one of them times out; with those that
        # are closed already there is no wait.
        for peer in range(connection.size()):
            if peer != connection.rank():
                with contextlib.suppress(RuntimeError):
                    connection.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def unreachable(action: Action | None, peer: int, error: RuntimeError) -> PeerError:
    """What a backend's error means: the peer is gone, or has not answered in time."""
    text = str(error).splitlines()[0]
    text = text.partition("] ")[2] or text  # without the place in gloo's source, and without its advice
    text = text.partition(". This is typically")[0]
    if "timed out" in text.lower():
        return PeerError(action, peer, f"rank {peer} did not answer: {text}", timed_out=True)
    return PeerError(action, peer, f"rank {peer} disappeared: {text}", timed_out=False)

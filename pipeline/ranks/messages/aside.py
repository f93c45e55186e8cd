"""Waiting for the network and for neighbours at once.

A wait for the network blocks the process, and nobody but the process moves its messages to neighbours along.
To hand these over first would make every neighbour's turn to receive a condition for going on, and two
processes that each wait for a network of their own would wait for each other. So where something is still to
be handed over, a thread waits for the network.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from typing import Protocol

from gpipe_bench.pipeline.ranks.messages.neighbour import Neighbour, move_along


class _Work(Protocol):
    def wait(self) -> object: ...


def wait_aside(work: _Work, neighbours: Collection[Neighbour]) -> None:
    """Waits for `work` and moves the messages of the neighbours along; raises what `work` raises."""
    errors: list[BaseException] = []
    done = os.eventfd(0)

    def wait() -> None:
        try:
            work.wait()
        except BaseException as error:
            errors.append(error)
        os.eventfd_write(done, 1)

    thread = threading.Thread(target=wait, name="pipeline: network", daemon=True)
    thread.start()
    move_along(neighbours, until=done)  # if interrupted, `done` stays open for the thread
    thread.join()
    os.close(done)
    if errors:
        raise errors[0]

"""Looking at something again and again while the process does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable


def watch_in_thread(look: Callable[[], bool], interval_s: float) -> Callable[[], None]:
    """Calls `look` every `interval_s` from a thread, until it is true; returns how to end that earlier."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(interval_s):
            if look():
                return

    threading.Thread(target=run, name="pipeline lookout", daemon=True).start()
    return over.set

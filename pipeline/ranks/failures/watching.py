"""Looking at something again and again while the process does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable

# How long the end waits for a look that is being taken: a process that ends meanwhile would break it off in
# the middle of a call into torch.
_LAST_LOOK_S = 0.2


def watch_in_thread(look: Callable[[], bool], interval_s: float) -> Callable[[], None]:
    """Calls `look` every `interval_s` from a thread, until it is true; returns how to end that earlier."""
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

"""One failure, known to every rank at once.

When a rank raises, its neighbours wait for messages that will never come; torch's engines leave them there
until the timeout of the process group, ten or thirty minutes by default. Here the failing rank first writes
what happened on a blackboard (the process group's store; the first writer wins) and then closes its
connections. A wait on a closed connection fails at once, its rank reads the blackboard, raises the same error
and closes its own connections, and so on along the pipeline. A rank that was killed writes nothing; then the
first neighbour to notice writes that it disappeared.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch import distributed as dist

from gpipe_bench.pipeline.errors import ActionError, PeerError
from gpipe_bench.pipeline.plan.schedule import Action

# How long a rank whose connection broke waits for an explanation. A rank that raises writes it before it
# closes anything, so this only has to cover the store's round trip.
EXPLANATION_S = 1.0


class Blackboard:
    """Where the ranks of one pipeline leave the first failure."""

    def __init__(self, store: Any, group: dist.ProcessGroup) -> None:
        self._store, self._rank = store, dist.get_rank(group)
        # Where the store lives: with the launcher, or in the first process of the job, which need not be in
        # the group.
        self._store_is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        ranks = dist.get_process_group_ranks(group)
        self._store_rank = ranks.index(0) if 0 in ranks else None

    def report(self, error: ActionError) -> ActionError:
        """Writes a failure and returns the one that counts: the first that any rank wrote."""
        mine = {"action": str(error.action or ""), "rank": error.rank, "cause": error.cause}
        try:
            return _read(self._store.compare_set("failure", "", json.dumps(mine)))
        except RuntimeError:  # the store is gone
            return error

    def has_failure(self) -> bool:
        """Whether any rank has written a failure."""
        try:
            return bool(self._store.check(["failure"]))
        except RuntimeError:  # the store is gone, and what held it
            return True

    def explain(self, error: PeerError) -> ActionError:
        """What happened, as far as anybody knows, when a peer cannot be reached."""
        found: dict[str, Any] = {
            "action": str(error.action or ""), "rank": error.peer, "cause": error.cause,
        }  # fmt: skip
        try:
            if error.timed_out:
                self._store.set(f"waiting {self._rank}", json.dumps(found))
            deadline = time.monotonic() + EXPLANATION_S
            while time.monotonic() < deadline:
                if self._store.check(["failure"]):
                    return _read(self._store.get("failure"))
                time.sleep(0.01)
            # A rank that waits in vain is not the one to blame: follow the waiting to its end.
            blamed = {self._rank}
            while found["rank"] not in blamed and self._store.check([f"waiting {found['rank']}"]):
                blamed.add(found["rank"])
                found = json.loads(self._store.get(f"waiting {found['rank']}"))
        except RuntimeError:  # the store died with the process that held it, which must have been the first
            if not self._store_is_launchers and error.peer != self._store_rank:
                return ActionError(None, "the process that held the store disappeared", self._store_rank)
        return self.report(_read(json.dumps(found)))


class Lookout:
    """Looks at the blackboard from a thread and calls `on_failure` once, when there is something on it.

    On CPUs a rank waits for its neighbours' connections, which break when they fail. A GPU waits without its
    host knowing, so on GPUs somebody has to look.
    """

    def __init__(
        self, blackboard: Blackboard, on_failure: Callable[[], None], interval_s: float = 0.5
    ) -> None:
        self._blackboard, self._interval_s = blackboard, interval_s
        self._on_failure = weakref.WeakMethod(on_failure)  # the thread must not keep a pipeline alive
        self._over = threading.Event()
        threading.Thread(target=self._look, name="pipeline lookout", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(self._interval_s):
            on_failure = self._on_failure()
            if on_failure is None:
                return
            if self._blackboard.has_failure():
                on_failure()
                return
            del on_failure


def _read(text: bytes | str) -> ActionError:
    record = json.loads(text)
    action = Action.parse(record["action"]) if record["action"] else None
    return ActionError(action, record["cause"], record["rank"])

"""The one error that a failed step raises, on every rank alike."""

from __future__ import annotations

from gpipe_bench.pipeline.plan.schedule import Action


class ActionError(RuntimeError):
    """An action failed. `action` is which (`2F0`, None outside of any), `rank` the process (None if there is
    but one), and `cause` what happened.

    In the process in which it was raised, the original exception with its traceback is `__cause__`.
    """

    def __init__(self, action: Action | None, cause: str, rank: int | None = None) -> None:
        self.action, self.cause, self.rank = action, cause, rank
        where = f"action {action}" if action is not None else "a step"
        if rank is not None:
            where += f" on rank {rank}"
        super().__init__(f"{where} failed: {cause}")


class PeerError(RuntimeError):
    """A message between this rank and rank `peer` did not get through, because of `cause`; `action` of the
    peer should have produced or taken it. `peer` is None where all that is known is that somebody is missing.
    """

    def __init__(self, action: Action | None, peer: int | None, cause: str, *, timed_out: bool) -> None:
        super().__init__(cause)
        self.action, self.peer, self.cause, self.timed_out = action, peer, cause, timed_out


class StoreError(RuntimeError):
    """The process group's store cannot be asked: its host is `silent`, or else gone."""

    def __init__(self, what: str, *, silent: bool) -> None:
        super().__init__(f"the store of the process group {what}")
        self.silent = silent


def summary(error: BaseException) -> str:
    """An exception in one line: its type and its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

"""The one error that a failed step raises, on every rank alike."""

from __future__ import annotations

from collections.abc import Sequence

from .plan.schedule import Action


class ActionError(RuntimeError):
    """An action failed: `action` names it (`2F0`; None outside of actions), `rank` the process (None in a
    single process), `cause` the reason, and `coordinates` the place on the grid (`dp=1 pp=0`). In the process
    in which it was raised, `__cause__` is the original exception with its traceback.
    """

    def __init__(
        self, action: Action | None, cause: str, rank: int | None = None, coordinates: str = ""
    ) -> None:
        self.action, self.cause, self.rank, self.coordinates = action, cause, rank, coordinates
        where = f"{coordinates}, " * bool(coordinates)
        where += f"action {action}" if action is not None else "a step"
        where += f" on rank {rank}" if rank is not None else ""
        super().__init__(f"{where} failed: {cause}")


class VerifyError(RuntimeError):
    """A step of a pipeline differs from the plain model's: what differs first, where, the likely cause."""


class PeerError(RuntimeError):
    """A message between this rank and rank `peer` did not get through; `action` of the peer should have
    produced or taken it. `what` says why. Where `peer` is None, all that is known is that some rank is
    missing. On a grid `peer` is numbered in the job.
    """

    def __init__(
        self, action: Action | None, peer: int | None, what: str, *, timed_out: bool = False
    ) -> None:
        self.action, self.peer, self.timed_out = action, peer, timed_out
        self.cause = what if peer is None else f"rank {peer} {what}"
        super().__init__(self.cause)


class StoreError(RuntimeError):
    """The process group's store does not answer: its host is `silent`, or else gone."""

    def __init__(self, what: str, *, silent: bool) -> None:
        super().__init__(f"the store of the process group {what}")
        self.silent = silent


# What torch says, and what it means in a pipeline.
_MEANS = {
    "cannot register a hook on a tensor that doesn't require gradient": (
        "under re-materialization forwards run without a graph; register the hook where "
        "tensor.requires_grad, or use remat='never'"
    ),
    "backward through the graph a second time": (
        "a layer or loss_fn uses a tensor that another layer, stage or micro-batch has computed and left in "
        "an attribute, whose graph is gone; pass it on from layer to layer, or detach it"
    ),
    "modified by an inplace operation": (
        "a pipeline takes other micro-batches forward before this one goes back; where a layer changes a "
        "buffer or an attribute that it computes with, let it make a new one (self.n = self.n + 1), or use "
        "remat='always'"
    ),
}


def summary(error: BaseException) -> str:
    """An exception in one line: its type and text, and for some of torch's what they mean in a pipeline."""
    text = str(error).strip()
    means = next((f" (here: {meaning})" for words, meaning in _MEANS.items() if words in text), "")
    return f"{type(error).__name__}: {text}{means}" if text else type(error).__name__


def check_equal(found: Sequence[object], who: str = "rank") -> None:
    """`ValueError`, on every rank alike, if what the ranks (or what `who` says) build is not the same."""
    if others := [rank for rank, other in enumerate(found) if other != found[0]]:
        raise ValueError(
            f"{who} {others[0]} builds another pipeline than {who} 0: its layers, cuts, schedule or seed "
            "differ; give all ranks the same arguments"
        )

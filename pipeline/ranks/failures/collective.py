"""Whether an error is that of a collective of torch's, which says that another rank is missing.

Collectives that are not ours (those of `fully_shard`, of tensor-parallel layers) run in the middle of an
action and raise what their network says, of which nobody can tell from outside for whom they waited. It must
not pass for a failure of the action. What counts is where it was raised, not what it says: a layer that reads
from a network of its own may say the same. (Where a layer itself waits for what it began with
`async_op=True`, the error is raised in the layer and is the layer's.)
"""

from __future__ import annotations

from traceback import walk_tb

from torch import distributed as dist

from gpipe_bench.pipeline.errors import PeerError

# Through which every collective goes that Python calls; behind them there is only the call of the operator.
_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")
_OPERATORS = "torch._ops"


def let_down(error: BaseException) -> PeerError | None:
    """The `PeerError` for an exception of a collective; None for any other."""
    if isinstance(error, PeerError):
        return error
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _place(error) in _COLLECTIVES
    ):
        return missing(error)
    return None


def missing(error: RuntimeError) -> PeerError:
    """What it says, of nobody knows whom."""
    what = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    what = (what.partition("] ")[2] or what).partition(". This is typically")[0]
    timed_out = "timed out" in what.lower() or "timeout" in what.lower()
    return PeerError(None, None, f"a collective failed: {what}", timed_out=timed_out)


def _place(error: BaseException) -> str:
    """The module that raised it."""
    names = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    return next((name for name in reversed(names) if name != _OPERATORS), "")

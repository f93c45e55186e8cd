"""What the error of a collective of torch means: that another rank is missing.

Collectives that are not ours (those of `fully_shard`, of tensor-parallel layers) run in the middle of an
action and raise what their network says, of which nobody can tell from outside for whom they waited. It must
not pass for a failure of the action.
"""

from __future__ import annotations

import re

from torch import distributed as dist

from gpipe_bench.pipeline.errors import PeerError

_OF_NETWORK = re.compile(
    r"gloo/|pair closure|Connection (closed|reset) by peer|Socket closed|Timed out waiting"
)


def let_down(error: BaseException) -> PeerError | None:
    """The `PeerError` for an exception that says that another rank is missing; None for any other."""
    if isinstance(error, PeerError):
        return error
    text = str(error)
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _OF_NETWORK.search(text)):
        what = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
        what = (what.partition("] ")[2] or what).partition(". This is typically")[0]
        timed_out = "timed out" in what.lower() or "timeout" in what.lower()
        return PeerError(None, None, f"a collective failed: {what}", timed_out=timed_out)
    return None

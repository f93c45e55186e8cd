"""What launched processes are forked with: the fork server imports this once, from the root of the project.

torch takes two seconds to import, and what its first optimizer imports two more. Whatever lives by then is
frozen, so that a collection of garbage, which timed steps ask for each time, does not look through it.

After `HANGING_S` a process says where it hangs, with the stacks of all its threads, and so do those that wait
for it; a little later they end, and with them the launch and the test, sooner than `faulthandler_timeout`.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal

import hypothesis  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.launcher.api
import torch.distributed.tensor  # noqa: F401

import gpipe_bench.models
import gpipe_bench.pipeline.api
import gpipe_bench.pipeline.ranks.launch  # noqa: F401

HANGING_S = 600.0  # several times as long as the cases of any file take all together


def end_if_it_hangs(after_s: float = HANGING_S) -> None:
    faulthandler.dump_traceback_later(after_s)
    signal.setitimer(signal.ITIMER_REAL, after_s + 30)  # the first to end takes the others with it


os.register_at_fork(after_in_child=end_if_it_hangs)
gc.freeze()

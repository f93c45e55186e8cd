"""What launched processes are forked with: the fork server imports this once, from the root of the project.

torch takes two seconds to import, and what its first optimizer imports two more. Whatever lives by then is
frozen, so that a collection of garbage, which timed steps ask for each time, does not look through it.

What is forked from here ends if it hangs, but not what that forks in its turn.
"""

from __future__ import annotations

import gc
import os

import hypothesis  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.launcher.api
import torch.distributed.tensor  # noqa: F401

import gpipe_bench.models
import gpipe_bench.pipeline.api
import gpipe_bench.pipeline.ranks.launch  # noqa: F401
from tests.support.forked import end_if_it_hangs

SERVER = os.getpid()
os.register_at_fork(after_in_child=lambda: end_if_it_hangs() if os.getppid() == SERVER else None)
gc.freeze()

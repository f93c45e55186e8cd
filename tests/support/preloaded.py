"""Modules that the fork server imports once, from the project's root, for all processes it forks.

torch takes two seconds to import, and modules of its first optimizer two more. All objects are frozen, so
that garbage collections, which timed steps run each time, skip them.

Processes forked from here end if they hang; processes that they fork do not.
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

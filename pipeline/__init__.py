"""GPipe pipeline parallelism as a small exact engine: schedules as data, stages, transports, timelines.

The names that users need most are resolved on first use, so that what needs only the standard library
(`pipeline.plan`: schedules, replay, timelines, partitions) stays importable without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_bench.pipeline.api import Pipeline
    from gpipe_bench.pipeline.memory.cut import StagePeaks
    from gpipe_bench.pipeline.memory.profile import Profiler
    from gpipe_bench.pipeline.memory.workers import pipeline_memory
    from gpipe_bench.pipeline.model.layers_of import layers_of
    from gpipe_bench.pipeline.model.split import split
    from gpipe_bench.pipeline.ranks.launch import launch, start_process
    from gpipe_bench.pipeline.stage.portals import Pop, PortalSequential, Stash

_HOMES = {
    "Pipeline": "api",
    "layers_of": "model.layers_of",
    "split": "model.split",
    "launch": "ranks.launch",
    "start_process": "ranks.launch",
    "Stash": "stage.portals",
    "Pop": "stage.portals",
    "PortalSequential": "stage.portals",
    "Profiler": "memory.profile",
    "pipeline_memory": "memory.workers",
    "StagePeaks": "memory.cut",
}

__all__ = [
    "Pipeline", "layers_of", "split", "launch", "start_process", "Profiler", "pipeline_memory", "StagePeaks",
    "Stash", "Pop", "PortalSequential",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

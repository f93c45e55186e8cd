"""GPipe pipeline parallelism as a small exact engine: schedules as data, stages, transports, timelines.

`Pipeline` is resolved on first use, so that the parts that need only the standard library (schedules, replay,
timelines, partitions) stay importable without loading torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_bench.pipeline.api import Pipeline

__all__ = ["Pipeline"]


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from gpipe_bench.pipeline.api import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

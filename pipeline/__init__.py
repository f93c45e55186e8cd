"""GPipe pipeline parallelism as a small exact engine: schedules as data, stages, transports, timelines.

The names below are the interface; where they live may change. They are looked up on first use, so that what
needs only the standard library (schedules, replay, timelines, partitions) does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Pipeline
    from .errors import ActionError, VerifyError
    from .memory.grids import grid_peak_bytes
    from .memory.peaks import StageMemory
    from .memory.profile import Profiler
    from .memory.trace import Boundary
    from .memory.workers import StagePeaks, Transport, bytes_of_stages, peak_bytes, pipeline_memory
    from .model.layers_of import layers_of
    from .model.split import split
    from .plan.generate import generate
    from .plan.links import FREE, LINKS, Link
    from .plan.named import NAMED, gpipe, naive, named, one_f_one_b
    from .plan.partition import partition
    from .plan.schedule import Action, Kind, Schedule, from_csv, to_csv
    from .plan.simulate import SLOTS, replay
    from .plan.timeline import Event, Timeline, draw
    from .plan.walk import validate
    from .ranks.launch import launch, start_process
    from .stage.layers import run_plain
    from .stage.trees import Pop, PortalSequential, Stash
    from .transport import InProcess

# Where the names are: here, above, and in `__all__`.
_NAMES = {
    "api": ("Pipeline",),
    "errors": ("ActionError", "VerifyError"),
    "memory.trace": ("Boundary",),
    "memory.grids": ("grid_peak_bytes",),
    "memory.peaks": ("StageMemory",),
    "memory.profile": ("Profiler",),
    "memory.workers": ("StagePeaks", "Transport", "bytes_of_stages", "peak_bytes", "pipeline_memory"),
    "model.layers_of": ("layers_of",),
    "model.split": ("split",),
    "plan.generate": ("generate",),
    "plan.links": ("FREE", "LINKS", "Link"),
    "plan.named": ("NAMED", "gpipe", "naive", "named", "one_f_one_b"),
    "plan.partition": ("partition",),
    "plan.schedule": ("Action", "Kind", "Schedule", "from_csv", "to_csv"),
    "plan.simulate": ("SLOTS", "replay"),
    "plan.timeline": ("Event", "Timeline", "draw"),
    "plan.walk": ("validate",),
    "ranks.launch": ("launch", "start_process"),
    "stage.layers": ("run_plain",),
    "stage.trees": ("Pop", "PortalSequential", "Stash"),
    "transport": ("InProcess",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "FREE", "LINKS", "NAMED", "SLOTS", "Action", "ActionError", "Boundary", "Event", "InProcess", "Kind",
    "Link", "Pipeline", "Pop", "PortalSequential", "Profiler", "Schedule", "StageMemory", "StagePeaks",
    "Stash", "Timeline", "Transport", "VerifyError", "bytes_of_stages", "draw", "from_csv", "generate",
    "gpipe", "grid_peak_bytes", "launch", "layers_of", "naive", "named", "one_f_one_b", "partition",
    "peak_bytes", "pipeline_memory", "replay", "run_plain", "split", "start_process", "to_csv",
    "validate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

"""GPipe pipeline parallelism as a small exact engine: schedules as data, stages, transports, timelines.

The names below are the interface; where they live may change. They are looked up on first use, so that what
needs only the standard library (schedules, replay, timelines, partitions) does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Pipeline as Pipeline
    from .errors import ActionError as ActionError
    from .errors import VerifyError as VerifyError
    from .memory.grids import grid_peak_bytes as grid_peak_bytes
    from .memory.peaks import StageMemory as StageMemory
    from .memory.profile import Profiler as Profiler
    from .memory.trace import Boundary as Boundary
    from .memory.workers import StagePeaks as StagePeaks
    from .memory.workers import Transport as Transport
    from .memory.workers import bytes_of_stages as bytes_of_stages
    from .memory.workers import peak_bytes as peak_bytes
    from .memory.workers import pipeline_memory as pipeline_memory
    from .model.layers_of import layers_of as layers_of
    from .model.split import split as split
    from .plan.generate import generate as generate
    from .plan.links import FREE as FREE
    from .plan.links import LINKS as LINKS
    from .plan.links import Link as Link
    from .plan.named import NAMED as NAMED
    from .plan.named import gpipe as gpipe
    from .plan.named import naive as naive
    from .plan.named import named as named
    from .plan.named import one_f_one_b as one_f_one_b
    from .plan.partition import partition as partition
    from .plan.schedule import Action as Action
    from .plan.schedule import Kind as Kind
    from .plan.schedule import Schedule as Schedule
    from .plan.schedule import from_csv as from_csv
    from .plan.schedule import to_csv as to_csv
    from .plan.simulate import SLOTS as SLOTS
    from .plan.simulate import replay as replay
    from .plan.timeline import Event as Event
    from .plan.timeline import Timeline as Timeline
    from .plan.timeline import draw as draw
    from .plan.walk import validate as validate
    from .ranks.launch import launch as launch
    from .ranks.launch import start_process as start_process
    from .stage.layers import run_plain as run_plain
    from .stage.trees import Pop as Pop
    from .stage.trees import PortalSequential as PortalSequential
    from .stage.trees import Stash as Stash
    from .transport import InProcess as InProcess

# Where the names are; a line here and a line above.
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

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

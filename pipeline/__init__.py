"""GPipe pipeline parallelism as a small exact engine: schedules as data, stages, transports, timelines.

The names below are the interface; where they live may change. They are looked up on first use, so that what
needs only the standard library (schedules, replay, timelines, partitions) does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_bench.pipeline.api import Pipeline as Pipeline
    from gpipe_bench.pipeline.errors import ActionError as ActionError
    from gpipe_bench.pipeline.errors import VerifyError as VerifyError
    from gpipe_bench.pipeline.memory.boundary import Boundary as Boundary
    from gpipe_bench.pipeline.memory.cut import StagePeaks as StagePeaks
    from gpipe_bench.pipeline.memory.grids import grid_peak_bytes as grid_peak_bytes
    from gpipe_bench.pipeline.memory.peaks import StageMemory as StageMemory
    from gpipe_bench.pipeline.memory.profile import Profiler as Profiler
    from gpipe_bench.pipeline.memory.workers import Transport as Transport
    from gpipe_bench.pipeline.memory.workers import bytes_of_stages as bytes_of_stages
    from gpipe_bench.pipeline.memory.workers import peak_bytes as peak_bytes
    from gpipe_bench.pipeline.memory.workers import pipeline_memory as pipeline_memory
    from gpipe_bench.pipeline.model.layers_of import layers_of as layers_of
    from gpipe_bench.pipeline.model.split import split as split
    from gpipe_bench.pipeline.plan.files import draw as draw
    from gpipe_bench.pipeline.plan.files import from_csv as from_csv
    from gpipe_bench.pipeline.plan.files import to_csv as to_csv
    from gpipe_bench.pipeline.plan.generate import generate as generate
    from gpipe_bench.pipeline.plan.links import FREE as FREE
    from gpipe_bench.pipeline.plan.links import LINKS as LINKS
    from gpipe_bench.pipeline.plan.links import Link as Link
    from gpipe_bench.pipeline.plan.named import NAMED as NAMED
    from gpipe_bench.pipeline.plan.named import gpipe as gpipe
    from gpipe_bench.pipeline.plan.named import naive as naive
    from gpipe_bench.pipeline.plan.named import named as named
    from gpipe_bench.pipeline.plan.named import one_f_one_b as one_f_one_b
    from gpipe_bench.pipeline.plan.partition import partition as partition
    from gpipe_bench.pipeline.plan.schedule import Action as Action
    from gpipe_bench.pipeline.plan.schedule import Kind as Kind
    from gpipe_bench.pipeline.plan.schedule import Schedule as Schedule
    from gpipe_bench.pipeline.plan.schedule import validate as validate
    from gpipe_bench.pipeline.plan.simulate import SLOTS as SLOTS
    from gpipe_bench.pipeline.plan.simulate import replay as replay
    from gpipe_bench.pipeline.plan.timeline import Event as Event
    from gpipe_bench.pipeline.plan.timeline import Timeline as Timeline
    from gpipe_bench.pipeline.plan.timeline import svg as svg
    from gpipe_bench.pipeline.ranks.launch import launch as launch
    from gpipe_bench.pipeline.ranks.launch import start_process as start_process
    from gpipe_bench.pipeline.stage.layers import run_plain as run_plain
    from gpipe_bench.pipeline.stage.portals import Pop as Pop
    from gpipe_bench.pipeline.stage.portals import PortalSequential as PortalSequential
    from gpipe_bench.pipeline.stage.portals import Stash as Stash
    from gpipe_bench.pipeline.transport import InProcess as InProcess

# Where the names are; a line here and a line above.
_NAMES = {
    "api": ("Pipeline",),
    "errors": ("ActionError", "VerifyError"),
    "memory.boundary": ("Boundary",),
    "memory.cut": ("StagePeaks",),
    "memory.grids": ("grid_peak_bytes",),
    "memory.peaks": ("StageMemory",),
    "memory.profile": ("Profiler",),
    "memory.workers": ("Transport", "bytes_of_stages", "peak_bytes", "pipeline_memory"),
    "model.layers_of": ("layers_of",),
    "model.split": ("split",),
    "plan.files": ("draw", "from_csv", "to_csv"),
    "plan.generate": ("generate",),
    "plan.links": ("FREE", "LINKS", "Link"),
    "plan.named": ("NAMED", "gpipe", "naive", "named", "one_f_one_b"),
    "plan.partition": ("partition",),
    "plan.schedule": ("Action", "Kind", "Schedule", "validate"),
    "plan.simulate": ("SLOTS", "replay"),
    "plan.timeline": ("Event", "Timeline", "svg"),
    "ranks.launch": ("launch", "start_process"),
    "stage.layers": ("run_plain",),
    "stage.portals": ("Pop", "PortalSequential", "Stash"),
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

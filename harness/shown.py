"""What an experiment gives a report to show: words for the paper's tables, plots, timelines.

All of it is data until somebody draws. A report thus knows a plot's caption without drawing it, takes the
file that a run left behind, and needs to know no experiment by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpipe_bench.harness.records.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTable:
    """A table of paper.csv in words: its heading, a name for where room is scarce, a sentence about it."""

    title: str
    short: str
    about: str


class Drawing(Protocol):
    """What a plot draws: a matplotlib figure, or whatever can be saved like one."""

    def savefig(self, fname: Path, /, *, dpi: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A figure that can be drawn of some records.

    Args:
        name: of its files, without ending
        caption: what it shows, in a line below it
        alt: what a reader who can't see it should know
        draw: makes the drawing; only this may need matplotlib
        suffixes: of the files: "png", "svg" or both
        style: what drawing and saving happen in, such as a theme
        of_timelines: it shows timelines, which a page has as charts to point at where `timelines` offers them
    """

    name: str
    caption: str
    alt: str
    draw: Callable[[], Drawing]
    suffixes: tuple[str, ...] = ("png", "svg")
    style: Callable[[], AbstractContextManager[object]] = nullcontext
    of_timelines: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTimeline:
    """A timeline that a record keeps, to be shown as a chart.

    Args:
        record: that keeps it
        data: as `Timeline.to_data` gives it
        title: of the chart
        where: what tells it from other timelines of the same record, in words that follow the title
        unit: of its times, in words; empty for seconds
    """

    record: Record
    data: Mapping[str, Any]
    title: str
    where: tuple[str, ...] = ()
    unit: str = ""

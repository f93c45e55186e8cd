"""Charts of who did what when, in coordinates a page can draw: shares of the width, one lane below another.

Positions are percentages, so that one drawing fits a phone, a screen and paper without being made again.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LANE_PX = 26
BOX_PX = 22
_ROOM_FOR_TEXT = 1.9
"""Percent of the width below which a box is too narrow for two digits on a screen."""
_LAST_CENTRED = 96.0
_TICKS = 6
_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """One action on a lane, in the chart's unit of time. `title` says all, `text` is what fits inside."""

    lane: int
    start: float
    length: float
    kind: str
    text: str
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A box in percent of the width and pixels from the top."""

    x: str
    width: str
    y: float
    kind: str
    title: str
    text: str
    middle: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A Gantt chart, ready to be drawn; without boxes it is only its trace. `facts` are its caption."""

    name: str
    title: str
    facts: str
    machine: str
    lanes: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    span: float = 0.0
    unit: str = "ms"
    legend: tuple[tuple[str, str], ...] = ()
    trace: str = ""

    @property
    def height(self) -> int:
        return LANE_PX * len(self.lanes)

    @property
    def drawn(self) -> list[Drawn]:
        """The boxes in the page's coordinates, in their order."""
        return [self._drawn(box) for box in self.boxes]

    @property
    def ticks(self) -> list[tuple[str, str]]:
        """(place in percent, label) of the axis; few and round."""
        if not self.span > 0:
            return []
        raw = self.span / _TICKS
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(s for s in _STEPS if s * power >= raw * (1 - 1e-9)) * power
        count = math.floor(self.span / step * (1 + 1e-9))
        return [(_percent(100 * n * step / self.span), f"{n * step:.6g}") for n in range(count + 1)]

    @property
    def full_to_the_end(self) -> bool:
        """Whether the last label of the axis lies so far right that it has to end there."""
        return bool(self.ticks) and float(self.ticks[-1][0].rstrip("%")) > _LAST_CENTRED

    def _drawn(self, box: Box) -> Drawn:
        scale = 100 / self.span if self.span > 0 else 0.0
        width = box.length * scale
        return Drawn(
            x=_percent(box.start * scale),
            width=_percent(width),
            y=box.lane * LANE_PX + (LANE_PX - BOX_PX) / 2,
            kind=box.kind,
            title=box.title,
            text=box.text if width >= _ROOM_FOR_TEXT else "",
            middle=_percent((box.start + box.length / 2) * scale),
        )


def data_url(content: bytes, kind: str) -> str:
    """The bytes as a URL that needs no network."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def trace_url(trace: Mapping[str, Any]) -> str:
    """A trace object as a gzip file to download; the same trace always gives the same bytes."""
    text = json.dumps(trace, separators=(",", ":"), sort_keys=True)
    return data_url(gzip.compress(text.encode(), mtime=0), "application/gzip")


def within(charts: Sequence[Chart], most_boxes: int) -> list[bool]:
    """Which charts to draw so that the page stays light: in order, until so many boxes are drawn."""
    drawn, chosen = 0, []
    for chart in charts:
        fits = drawn + len(chart.boxes) <= most_boxes
        drawn += len(chart.boxes) if fits else 0
        chosen.append(fits)
    return chosen


def _percent(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") + "%"

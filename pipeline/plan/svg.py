"""A timeline as a picture that a browser opens, without a plotting library.

A row for each worker, a box for each action, its width the time that it takes; what is left white is idle.
Portals, which go past stages, are lines from box to box.
Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType

from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.schedule import Action, Kind
from gpipe_bench.pipeline.plan.timeline import Timeline

# Forward light, backward dark, as in the reports.
COLORS: dict[Kind, str] = {
    Kind.F: "#9ecae1", Kind.R: "#fdd49e", Kind.B: "#3182bd", Kind.I: "#3182bd", Kind.W: "#756bb1",
}  # fmt: skip
_DARK = (Kind.B, Kind.I, Kind.W)
_ROW, _GAP, _MARGIN, _LEFT = 22, 4, 8, 76  # pixels
_WIDTH = 1400


def svg(
    timeline: Timeline,
    title: str,
    portals: Sequence[Edge] = (),
    stands: Mapping[int, Action] = MappingProxyType({}),
) -> str:
    """The picture as the text of an SVG file; `title` stands above the rows, and behind the last box of a
    worker, in red, the action that it `stands` at for good.

    Each message of the `portals` is a line from the forward that stashes to the one that pops, and back from
    backward to backward.

    A box names kind and micro-batch, where there is room, and all of it in its tooltip. The second, third ...
    stage of a worker has a darker frame.
    """
    room = 48 if stands else 0  # for what stands behind the boxes
    scale = (_WIDTH - _LEFT - _MARGIN - room) / (timeline.makespan_s or 1)
    top = 2 * _MARGIN + 14
    height = top + timeline.num_workers * (_ROW + _GAP) + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN + 12}">{escape(title)}</text>',
    ]
    for worker in range(timeline.num_workers):
        y = top + worker * (_ROW + _GAP)
        stages = timeline.stages_of(worker)
        lines.append(f'<text x="{_MARGIN}" y="{y + 15}">{"stage " + ", ".join(map(str, stages))}</text>')
        for event in timeline.of_worker(worker):
            action = event.action
            x, width = _LEFT + event.start_s * scale, event.duration_s * scale
            frame = 0.5 + stages.index(action.stage)
            label = f"{action.kind.value}{action.microbatch}"
            lines.append(
                f'<g><title>{action}: {event.start_s:g} to {event.end_s:g}</title><rect x="{x:.2f}" y="{y}" '
                f'width="{width:.2f}" height="{_ROW}" fill="{COLORS[action.kind]}" stroke="#222222" '
                f'stroke-width="{frame}"/>'
            )
            if width >= 7 * len(label):
                ink = "white" if action.kind in _DARK else "black"
                lines.append(
                    f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle" fill="{ink}">'
                    f"{label}</text>"
                )
            lines.append("</g>")
        if worker in stands:
            end_s = max((event.end_s for event in timeline.of_worker(worker)), default=0)
            x = _LEFT + end_s * scale + 4
            lines.append(f'<text x="{x:.2f}" y="{y + 15}" fill="#d62728">{stands[worker]}</text>')
    lines += _arrows(timeline, portals, scale, top)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _arrows(timeline: Timeline, portals: Sequence[Edge], scale: float, top: int) -> list[str]:
    """From the end of the action that makes a message to the beginning of the one that needs it."""
    workers = {
        stage: worker for worker in range(timeline.num_workers) for stage in timeline.stages_of(worker)
    }
    events = {
        (event.action.stage, event.action.kind is Kind.F, event.action.microbatch): event
        for event in timeline.events
        if event.action.kind in (Kind.F, Kind.B, Kind.I)
    }
    found = []
    for line in portals:
        for forward, source, target in ((True, line.source, line.target), (False, line.target, line.source)):
            y = [top + workers[stage] * (_ROW + _GAP) + _ROW // 2 for stage in (source, target)]
            for (stage, kind, m), event in events.items():
                if (stage, kind) != (source, forward) or (target, forward, m) not in events:
                    continue
                needs = events[target, forward, m]
                names = escape(", ".join(line.names))
                found.append(
                    f"<g><title>{names}: {event.action} -> {needs.action}</title>"
                    f'<line x1="{_LEFT + event.end_s * scale:.2f}" y1="{y[0]}" '
                    f'x2="{_LEFT + needs.start_s * scale:.2f}" y2="{y[1]}" stroke="#d62728" '
                    f'stroke-opacity="0.6" stroke-dasharray="{"none" if forward else "4 3"}"/></g>'
                )
    return found

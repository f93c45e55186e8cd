"""A timeline as a picture that a browser opens, without a plotting library.

A row for each worker, a box for each action, its width the time that it takes; what is left white is idle.
Only the standard library is imported.
"""

from __future__ import annotations

from html import escape

from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.timeline import Timeline

# Forward light, backward dark, as in the reports.
COLORS: dict[Kind, str] = {
    Kind.F: "#9ecae1", Kind.R: "#fdd49e", Kind.B: "#3182bd", Kind.I: "#3182bd", Kind.W: "#756bb1",
}  # fmt: skip
_DARK = (Kind.B, Kind.I, Kind.W)
_ROW, _GAP, _MARGIN, _LEFT = 22, 4, 8, 76  # pixels
_WIDTH = 1400


def svg(timeline: Timeline, title: str) -> str:
    """The picture as the text of an SVG file; `title` stands above the rows.

    A box names kind and micro-batch, where there is room, and all of it in its tooltip. The second, third ...
    stage of a worker has a darker frame.
    """
    scale = (_WIDTH - _LEFT - _MARGIN) / (timeline.makespan_s or 1)
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
    return "\n".join([*lines, "</svg>"]) + "\n"

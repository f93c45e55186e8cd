"""The report: one HTML page that needs nothing beside itself, and the same in markdown.

Rendering adds no facts. No time of day goes in either, so that the same records always give the same bytes
and a report can be kept under version control.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.report import table
from gpipe_bench.harness.report.grid import escaped, without_html
from gpipe_bench.harness.report.page import Page, cells_csv
from gpipe_bench.harness.report.side import entry_text
from gpipe_bench.harness.verdict import JUDGED, QUESTIONS, VERDICTS, Comparison

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

TEMPLATES = Path(__file__).resolve().parent / "templates"
MARKS = {
    "reproduced": "✓", "identity": "=", "undecided": "?", "above": "▲", "below": "▼", "not judged": "·",
    "not comparable": "◇", "not run": "○",
}  # fmt: skip
"""A shape beside each verdict, because colour alone reaches not everybody and no printer."""

MEANINGS = {
    "reproduced": "our range meets what the printed number stands for and is narrow: at most 20 % to either "
    "side of its middle",
    "identity": "the number follows by arithmetic from others, and does; it confirms nothing else",
    "undecided": "our range meets it and is wider, so that it would have met much else",
    "above": "all of our range lies above it",
    "below": "all of our range lies below it, or memory ran out",
    "not judged": "a cell of a table that small models ran here, shown with what it is made of; the paper's "
    "sentences about the table are judged",
    "not comparable": "the paper contradicts itself there, or what the number depends on is different here",
    "not run": "there is no number of ours; what it would take stands beside it",
}

_PLOT_MOST = 3.0
"""Ratios up to this, and down to its inverse, have a place on the scale beside a number."""

_BETWEEN_CELLS = re.compile(r"(</(?:td|tr|th|thead|tbody|table)>|<(?:tr|tbody|thead)[^>]*>)\s*\n\s*(?=<)")
"""Line ends that a reader cannot see, in a page with thousands of cells that is sent by mail."""


def html(page: Page) -> str:
    """The page as one file: styles, script, figures and traces inside, nothing fetched from anywhere."""
    style, script, bibtex = (
        (TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.css", "report.js", "cite.bib")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    packed = gzip.compress(cells_csv(page.tables).encode(), mtime=0)  # without a time of day
    cells = data_url(packed, "application/gzip")
    text = _rendered(
        "report.html.j2", page, style=style, script=script, script_digest=f"sha256-{digest}",
        cells_url=cells, bibtex=bibtex,
    )  # fmt: skip
    return _BETWEEN_CELLS.sub(r"\1", text)


def markdown(page: Page) -> str:
    """The same numbers, verdicts and reasons as markdown."""
    return _rendered("report.md.j2", page)


def data_url(content: bytes, kind: str) -> str:
    """The bytes as a URL that needs no network."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def plot(cell: Comparison) -> dict[str, Any] | None:
    """Where ours and our range lie beside the paper's number, and between which numbers the paper's would not
    have been contradicted, in percent of a small scale.

    The scale is logarithmic, the paper's number is in the middle; beyond a factor of 3 the mark sticks to the
    edge and `clipped` says so. None where there is nothing to place.
    """
    target = cell.paper if cell.corrected is None else cell.corrected
    if cell.ratio is None or cell.ratio <= 0 or not target or cell.verdict not in MARKS:
        return None

    def place(ratio: float) -> float:
        if ratio <= 0:
            return 0.0
        share = math.log(ratio) / math.log(_PLOT_MOST)
        return 50 + 46 * max(-1.0, min(1.0, share))

    def edge(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else place(value / target)

    at = place(cell.ratio)
    judged = cell.verdict in JUDGED
    low, high = (edge(cell.fails_below, 0.0), edge(cell.fails_above, 100.0)) if judged else (50.0, 50.0)
    return {
        "at": f"{at:.1f}",
        "band": f"{low:.1f}",
        "band_width": f"{max(high - low, 0.8):.1f}",
        "low": f"{edge(cell.range_low, at):.1f}",
        "length": f"{edge(cell.range_high, at) - edge(cell.range_low, at):.1f}",
        "clipped": "left" if cell.ratio < 1 / _PLOT_MOST else "right" if cell.ratio > _PLOT_MOST else "",
    }


def _rendered(name: str, page: Page, **more: str) -> str:
    import jinja2

    environment: jinja2.Environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=name.endswith(".html.j2"),
        finalize=without_html if name.endswith(".md.j2") else None,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ours=table.ours_text, interval=table.interval_text, range=table.range_text, parts=table.parts_text,
        fails=table.fails_text, evidence=table.evidence, paper=table.paper_text,
        plot=plot, ratio=lambda ratio: f"×{table.times_text(ratio)}", entry=entry_text,
        times=lambda factor: table.times_text(max(factor, 1 / factor)), key=lambda cell: "|".join(cell.key),
        capital=lambda text: text[:1].upper() + text[1:], slug=lambda text: re.sub(r"[^a-z]+", "-", text),
        pipes=escaped, emphasis=_emphasis, breakable=_breakable, ticks=_ticks,
    )  # fmt: skip
    return environment.get_template(name).render(
        page=page, names=page.names, verdicts=VERDICTS, marks=MARKS, meanings=MEANINGS, questions=QUESTIONS,
        verdict_text=table.verdict_text, asked=table.ASKED, judged=JUDGED,
        evidences=table.EVIDENCE, **more,
    )  # fmt: skip


def _ticks(text: str) -> Markup:
    """Text whose commands in backticks become code; everything else of it is escaped."""
    from markupsafe import Markup, escape

    parts = text.split("`")
    if len(parts) % 2 == 0:  # a lone backtick is just that
        return Markup(escape(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if n % 2 else escape(part) for n, part in enumerate(parts)
    )


def _emphasis(text: str) -> Markup:
    """Text whose words between asterisks are stressed."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"\*(.+?)\*", r"<em>\1</em>", str(escape(text))))


def _breakable(text: str) -> Markup:
    """Text with places to break a line after the marks in long names and paths; it copies as it is."""
    from markupsafe import Markup, escape

    pieces = re.split(r"(?<=[/_=])", text)
    return Markup("<wbr>").join(escape(piece) for piece in pieces)

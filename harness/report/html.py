"""The report: one HTML page that needs nothing beside itself, and the same in markdown.

Rendering adds no facts. No time of day goes in either, so that the same records always give the same bytes
and a report can be kept under version control.
"""

from __future__ import annotations

import base64
import gzip
import re
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_bench.harness.report import table
from gpipe_bench.harness.report.grid import escaped, without_html
from gpipe_bench.harness.report.page import Page, cells_csv
from gpipe_bench.harness.report.table import ANSWERS, MEANINGS, Answer

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

TEMPLATES = Path(__file__).resolve().parent / "templates"
MARKS: dict[Answer, str] = {
    "agrees": "✓", "follows": "=", "differs": "≠", "no test": "?", "not judged": "·", "not run": "○",
}  # fmt: skip
"""A shape beside each answer, because colour alone reaches not everybody and no printer."""

_BETWEEN_CELLS = re.compile(r"(</(?:td|tr|th|thead|tbody|table)>|<(?:tr|tbody|thead)[^>]*>)\s*\n\s*(?=<)")
"""Line ends that a reader cannot see, in a page with thousands of cells that is sent by mail."""


def html(page: Page) -> str:
    """The page as one file: styles and figures inside, no script, nothing fetched from anywhere."""
    style, bibtex = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.css", "cite.bib"))
    packed = gzip.compress(cells_csv(page.tables).encode(), mtime=0)  # without a time of day
    cells = data_url(packed, "application/gzip")
    text = _rendered("report.html.j2", page, style=style, cells_url=cells, bibtex=bibtex)
    return _BETWEEN_CELLS.sub(r"\1", text)


def markdown(page: Page) -> str:
    """The same numbers, answers and reasons as markdown."""
    return _rendered("report.md.j2", page)


def data_url(content: bytes, kind: str) -> str:
    """The bytes as a URL that needs no network."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


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
        paper=table.paper_text, ours=table.ours_text, spread=table.spread_text, ratio=table.ratio_text,
        answer=table.answer, why=table.reason_text, key=lambda cell: "|".join(cell.key),
        capital=lambda text: text[:1].upper() + text[1:], slug=lambda text: re.sub(r"[^a-z]+", "-", text),
        pipes=escaped, emphasis=_emphasis, breakable=_breakable, ticks=_ticks,
    )  # fmt: skip
    return environment.get_template(name).render(
        page=page, names={each.name: each.info.short for each in page.tables}, answers=ANSWERS,
        marks=MARKS, meanings=MEANINGS, asked=table.ASKED, **more,
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
    """Text whose words between two asterisks are stressed."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", str(escape(text))))


def _breakable(text: str) -> Markup:
    """Text with places to break a line after the marks in long names and paths; it copies as it is."""
    from markupsafe import Markup, escape

    pieces = re.split(r"(?<=[/_=])", text)
    return Markup("<wbr>").join(escape(piece) for piece in pieces)

"""The report: one HTML page that needs nothing beside itself, and the same in markdown.

Rendering adds no facts. No time of day goes in either, so that the same records always give the same bytes
and a report can be kept under version control.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.judging.compare import Comparison
from gpipe_bench.harness.judging.verdict import JUDGED, VERDICTS
from gpipe_bench.harness.report.chart import Chart
from gpipe_bench.harness.report.grid import escaped
from gpipe_bench.harness.report.page import TableView
from gpipe_bench.harness.report.side import SideBySide, entry_text, side_markdown, value_text
from gpipe_bench.harness.report.summary import Summary
from gpipe_bench.harness.report.table import Counts, interval_text, ours_text, paper_text, verdict_text

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

TEMPLATES = Path(__file__).resolve().parent / "templates"
MARKS = {
    "reproduced": "✓", "identity": "=", "undecided": "?", "above": "▲", "below": "▼", "not comparable": "◇",
    "not run": "○",
}  # fmt: skip
"""A shape beside each verdict, because colour alone reaches not everybody and no printer."""

MEANINGS = {
    "reproduced": "our range is narrow and meets what the printed number stands for",
    "identity": "the number follows by arithmetic from others, and does; it confirms nothing else",
    "undecided": "our range meets it and is too wide to say something",
    "above": "all of our range lies above it",
    "below": "all of our range lies below it, or memory ran out",
    "not comparable": "the paper contradicts itself there, or what the number depends on is different here",
    "not run": "there is no number of ours, with the reason",
}

_FIELDS = (
    ("cpu_model", "processor"), ("cores_logical", "cores"), ("memory_total_gib", "memory, GiB"),
    ("gpus", "GPUs"), ("system", "system"), ("container", "container"), ("python", "Python"),
    ("versions", "packages"), ("torch_threads", "threads of torch"), ("cuda", "CUDA"),
    ("variables", "variables"), ("git_commit", "commit"), ("git_dirty", "uncommitted changes"),
    ("code_sha256", "digest of the code"),
)  # fmt: skip
_PLOT_MOST = 3.0
"""Ratios up to this, and down to its inverse, have a place on the scale beside a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where numbers come from. `facts` are (label, text) of its environment."""

    name: str
    own: bool
    place: str
    records: int
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentView:
    """An experiment's own words, pictures and charts. `runs`: machine, profile, what it does, its records."""

    name: str
    title: str
    source: str
    describe: str
    runs: tuple[tuple[str, str, str, str], ...]
    text: str
    pictures: tuple[Any, ...] = ()
    charts: tuple[Chart, ...] = ()
    traces: tuple[Chart, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """All of the report."""

    tables: tuple[TableView, ...]
    narrow: Counts
    counts: Counts
    wide: Counts
    summary: Summary
    experiments: tuple[ExperimentView, ...]
    machines: tuple[Machine, ...]
    side: SideBySide | None
    warnings: tuple[str, ...]
    command: str


def environment_facts(environments: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Label and text of every known field; where records differ, all values."""
    found = []
    for name, label in _FIELDS:
        texts = dict.fromkeys(
            value_text(each[name]) for each in environments if each.get(name) not in (None, [], {})
        )
        if texts:
            found.append((label, " | ".join(texts)))
    return tuple(found)


def html(page: Page) -> str:
    """The page as one file: styles, script, figures and traces inside, nothing fetched from anywhere."""
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _environment(autoescape=True).get_template("report.html.j2")
    return template.render(page=page, style=style, script=script, script_digest=f"sha256-{digest}")


def markdown(page: Page) -> str:
    """The same numbers, verdicts and reasons as markdown."""
    return _environment(autoescape=False).get_template("report.md.j2").render(page=page)


def ratio_text(ratio: float) -> str:
    """`×0.98`, to two digits after the point near one and to two digits elsewhere."""
    return f"×{ratio:.2f}" if 0.1 <= ratio < 10 else f"×{ratio:.2g}"


def plot(cell: Comparison) -> dict[str, Any] | None:
    """Where ours, our interval and the band lie beside the paper's number, in percent of a small scale.

    The scale is logarithmic, the paper's number is in the middle; beyond a factor of 3 the mark sticks to the
    edge and `clipped` says so. None where there is nothing to place.
    """
    target = cell.paper if cell.corrected is None else cell.corrected
    if cell.ratio is None or cell.ratio <= 0 or not target or cell.verdict not in MARKS:
        return None

    def place(ratio: float | None) -> float:
        if ratio is None or ratio <= 0:
            return 0.0
        share = math.log(ratio) / math.log(_PLOT_MOST)
        return 50 + 46 * max(-1.0, min(1.0, share))

    def edge(value: float | int | None, otherwise: float) -> float:
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


def _environment(*, autoescape: bool) -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ours=ours_text, interval=interval_text, paper=paper_text, plot=plot, ratio=ratio_text,
        entry=entry_text, slug=lambda text: text.replace(" ", "-"), pipes=escaped, breakable=_breakable,
        ticks=_ticks,
    )  # fmt: skip
    environment.globals.update(
        verdicts=VERDICTS, marks=MARKS, meanings=MEANINGS, side_markdown=side_markdown,
        verdict_text=verdict_text,
    )  # fmt: skip
    return environment


def _ticks(text: str) -> Markup:
    """Text whose commands in backticks become code; everything else of it is escaped."""
    from markupsafe import Markup, escape

    parts = text.split("`")
    if len(parts) % 2 == 0:  # a lone backtick is just that
        return Markup(escape(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if n % 2 else escape(part) for n, part in enumerate(parts)
    )


def _breakable(text: str) -> Markup:
    """Text with places to break a line after the marks in long names and paths; it copies as it is."""
    from markupsafe import Markup, escape

    pieces = re.split(r"(?<=[/_=])", text)
    return Markup("<wbr>").join(escape(piece) for piece in pieces)

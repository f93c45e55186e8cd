"""The report: one HTML page that needs nothing beside itself, and the same in markdown.

Rendering adds no facts. No time of day goes in either, so that the same records always give the same bytes
and a report can be kept under version control.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.report.cells import cells_csv
from gpipe_bench.harness.report.chart import Chart, data_url
from gpipe_bench.harness.report.counts import ASKED, EVIDENCE, evidence
from gpipe_bench.harness.report.grid import escaped
from gpipe_bench.harness.report.page import TableView
from gpipe_bench.harness.report.replies import RULE, apart_text, replies_markdown
from gpipe_bench.harness.report.side import SideBySide, entry_text, side_markdown, value_text
from gpipe_bench.harness.report.summary import Summary
from gpipe_bench.harness.report.table import (
    fails_text,
    interval_text,
    ours_text,
    paper_text,
    parts_text,
    range_text,
    times_text,
    verdict_text,
)
from gpipe_bench.harness.verdict import JUDGED, QUESTIONS, VERDICTS, Comparison

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
    "reproduced": "our range meets what the printed number stands for and is narrow: at most 20 % to either "
    "side of its middle",
    "identity": "the number follows by arithmetic from others, and does; it confirms nothing else",
    "undecided": "our range meets it and is wider, so that it would have met much else",
    "above": "all of our range lies above it",
    "below": "all of our range lies below it, or memory ran out",
    "not comparable": "the paper contradicts itself there, or what the number depends on is different here",
    "not run": "there is no number of ours; what it would take stands beside it",
}

BIBTEX = """\
@software{gpipe_bench,
  title   = {gpipe-bench: reproducibility benchmark suite and paper harness for {GPipe} pipeline parallelism},
  author  = {{The gpipe-bench maintainers}},
  license = {Apache-2.0},
  note    = {Give the commit that the records name},
}
@inproceedings{huang2019gpipe,
  title     = {{GPipe}: Efficient Training of Giant Neural Networks using Pipeline Parallelism},
  author    = {Huang, Yanping and Cheng, Youlong and Bapna, Ankur and Firat, Orhan and Chen, Mia Xu and
               Chen, Dehao and Lee, HyoukJoong and Ngiam, Jiquan and Le, Quoc V. and Wu, Yonghui and
               Chen, Zhifeng},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {32},
  year      = {2019},
}
"""
"""What a paper that uses these numbers cites."""

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

    @property
    def drawn(self) -> str:
        """What there is to look at: `2 figures, 1 timeline`."""
        counts = (("figure", len(self.pictures)), ("timeline", len(self.charts) + len(self.traces)))
        return ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts if count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """All of the report."""

    tables: tuple[TableView, ...]
    summary: Summary
    experiments: tuple[ExperimentView, ...]
    machines: tuple[Machine, ...]
    side: SideBySide | None
    warnings: tuple[str, ...]
    command: str

    @property
    def shown(self) -> Mapping[str, int]:
        """How many rows there are of each verdict, whether they count or not."""
        return Counter(row.comparison.verdict for table in self.tables for row in table.rows)

    @property
    def origins(self) -> Mapping[str, int]:
        """How many rows there are of each evidence."""
        return Counter(evidence(row.comparison) for table in self.tables for row in table.rows)

    @property
    def smoke(self) -> int:
        """How many numbers are of a smoke run, which only shows that everything runs."""
        answers = (row.answer for table in self.tables for row in table.rows)
        return sum(each is not None and each.answers and each.profile == "smoke" for each in answers)


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
    cells = data_url(cells_csv(page.tables).encode(), "text/csv;charset=utf-8")
    return template.render(
        page=page,
        style=style,
        script=script,
        script_digest=f"sha256-{digest}",
        cells_url=cells,
        names=_names(page),
        bibtex=BIBTEX,
    )


def markdown(page: Page) -> str:
    """The same numbers, verdicts and reasons as markdown."""
    return _environment(autoescape=False).get_template("report.md.j2").render(page=page, names=_names(page))


def _names(page: Page) -> dict[str, str]:
    return {table.name: table.info.short for table in page.tables}


def ratio_text(ratio: float) -> str:
    """`×0.98`, to as many digits as tell it from 1."""
    return f"×{times_text(ratio)}"


def plot(cell: Comparison) -> dict[str, Any] | None:
    """Where ours and our range lie beside the paper's number, and between which numbers the paper's would not
    have been contradicted, in percent of a small scale.

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
        ours=ours_text, interval=interval_text, range=range_text, parts=parts_text, fails=fails_text,
        evidence=evidence, paper=paper_text, plot=plot, ratio=ratio_text, apart=apart_text,
        times=lambda factor: times_text(max(factor, 1 / factor)), key=lambda cell: "|".join(cell.key),
        capital=lambda text: text[:1].upper() + text[1:], slug=lambda text: re.sub(r"[^a-z]+", "-", text),
        entry=entry_text, pipes=escaped, breakable=_breakable, ticks=_ticks,
    )  # fmt: skip
    environment.globals.update(
        verdicts=VERDICTS, marks=MARKS, meanings=MEANINGS, side_markdown=side_markdown,
        verdict_text=verdict_text, replies_markdown=replies_markdown, rule=RULE, questions=QUESTIONS,
        asked=ASKED, judged=JUDGED, evidences=EVIDENCE,
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

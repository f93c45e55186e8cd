"""The generated tables of the pages: from the reference records, and from the experiments themselves.

`python -m gpipe_bench.experiments.readme` rewrites them. A table that is pasted goes stale; these are made
between markers, and a test compares.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from gpipe_bench.experiments.registry import EXPERIMENTS, load
from gpipe_bench.experiments.report.build import build
from gpipe_bench.experiments.table1.cells import table as table1
from gpipe_bench.harness.experiment import Experiment, RunOptions
from gpipe_bench.harness.places import PUBLISHED, REFERENCE, ROOT
from gpipe_bench.harness.report.counts import EVIDENCE, evidence
from gpipe_bench.harness.report.grid import between
from gpipe_bench.harness.report.render import MARKS, MEANINGS, Page
from gpipe_bench.harness.report.replies import RULE, replies_markdown
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.verdict import JUDGED, QUESTIONS, Verdict

RECORDS = REFERENCE / "cpu-2-cores"
CORES = 2  # of the machine that times are said for


def sessions() -> str:
    """A row for each experiment, for the README: how to run it, and how long its default profile takes."""
    rows = [f"| `nox -s {e.name}` | {e.title}{_more(e, 'docs/')} | {_time(e)} |" for e in _experiments()]
    return (
        f"| session | what it reproduces or measures | time on {CORES} cores |\n|---|---|---|\n"
        + "\n".join(rows)
    )


def descriptions() -> str:
    """A row for each experiment, for the page about commands: what it does."""
    rows = [f"| `{e.name}` | **{e.title}**. {e.describe}{_more(e, '')} |" for e in _experiments()]
    return "| name | what it does |\n|---|---|\n" + "\n".join(rows)


@functools.cache
def _page() -> Page:
    """Everything on record, for all sections that are made of it."""
    return build(RECORDS, figures=False)


def replies() -> str:
    """Both questions answered from the reference records: the same as the report's first screen."""
    page = _page()
    cells = [row.comparison for table in page.tables for row in table.rows]
    return f"{replies_markdown(cells, {table.name: table.info.short for table in page.tables})}\n\n{RULE}"


def widths() -> str:
    """Verdicts by evidence at the declared width, and all of them at half and at twice the width."""
    rows = [row for table in _page().tables for row in table.rows if row.comparison.counted]
    columns: tuple[Verdict, ...] = (*JUDGED, "not comparable", "not run")
    lines = ["| question | evidence | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]

    def line(question: str, name: str, found: Sequence[Verdict]) -> str:
        counted = Counter(found)
        return f"| {question} | {name} | {' | '.join(str(counted[each] or '-') for each in columns)} |"

    for question in QUESTIONS:
        mine = [row for row in rows if row.comparison.question == question]
        for rests_on in EVIDENCE:
            found = [row.comparison.verdict for row in mine if evidence(row.comparison) == rests_on]
            if found:
                lines.append(line(question, rests_on, found))
        lines.append(line(question, "all", [row.comparison.verdict for row in mine]))
        lines.append(line(question, "all, at half the width", [row.narrow for row in mine]))
        lines.append(line(question, "all, at twice the width", [row.wide for row in mine]))
    return "\n".join(lines)


def verdicts() -> str:
    """A row for each verdict."""
    rows = [f"| {MARKS[name]} {name} | {meaning} |" for name, meaning in MEANINGS.items()]
    return "| verdict | meaning |\n|---|---|\n" + "\n".join(rows)


def _experiments() -> list[Experiment]:
    return [load(name) for name in EXPERIMENTS]


def _more(experiment: Experiment, folder: str) -> str:
    """A link to its own page, which lies in `docs/`."""
    return f" ([more]({folder}{experiment.docs.removeprefix('docs/')}))" if experiment.docs else ""


def _time(experiment: Experiment) -> str:
    """What the cases say they take, rounded up: `15 s`, `6 min`."""
    cases = experiment.cases(RunOptions())
    jobs = min(CORES, len(cases)) if experiment.untimed else 1
    seconds = sum(case.estimate_s for case in cases) / jobs
    return f"{5 * math.ceil(seconds / 5)} s" if seconds <= 55 else f"{math.ceil(seconds / 60)} min"


SECTIONS: dict[str, tuple[Path, Callable[[], str]]] = {
    "replies": (ROOT / "README.md", replies),
    "verdicts": (ROOT / "README.md", verdicts),
    "sessions": (ROOT / "README.md", sessions),
    "experiments": (ROOT / "docs" / "commands.md", descriptions),
    "widths": (ROOT / "docs" / "method.md", widths),
    "table1": (PUBLISHED / "README.md", lambda: table1(Store(RECORDS).load("table1").records)),
}
"""By the name in the markers: the page, and what makes the section."""


def markers(section: str) -> tuple[str, str]:
    """The lines between which a section stands."""
    return (
        f"<!-- {section}: generated by python -m gpipe_bench.experiments.readme -->",
        f"<!-- end of {section} -->",
    )


def rewritten(section: str, text: str) -> str:
    """The text of its page with the section made anew. Raises ValueError without the markers."""
    page, make = SECTIONS[section]
    begin, end = markers(section)
    between(text, begin, end, "", page.name)  # before seconds go into what may have no place
    return between(text, begin, end, f"\n\n{make()}\n\n", page.name)


def main() -> None:
    """Rewrites every page."""
    for section, (page, _) in SECTIONS.items():
        page.write_text(rewritten(section, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

"""`check-engine`: in seconds, whether an engine does what it must, before anything is timed: the
conformance tests, run by pytest, as a table.

Exit status 0: everything that the engine does not refuse is right; 1: something is wrong, or it refuses
everything; 2: the name leads to no engine; 3: it raised, hung or ended its process.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from gpipe_bench.harness.report.grid import SCREEN, Grid, within

from .output import CASE_FAILED, DONE, VERDICT_FAILED, lines_only, tell

if TYPE_CHECKING:
    from ..engines.trials import Row


def options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "engine", metavar="MODULE:ATTRIBUTE", help="your engine, or one by its name, such as torch-gpipe"
    )
    verb.add_argument(
        "--timeout-s", type=float, default=30.0, metavar="S",
        help="after which a step counts as hung; default: %(default)g",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError for a name that leads nowhere."""
    if arguments.timeout_s <= 0:
        raise ValueError(f"--timeout-s is {arguments.timeout_s:g}; give seconds, such as 30")
    from ..engines.checks import BROKEN, CANNOT, FAILED, OK
    from ..engines.trials import faults

    engine = arguments.engine
    with lines_only():  # what an engine's module prints is no line of the result
        rows = _rows(engine, arguments.timeout_s)
    verdicts, bad = [row.verdict for row in rows], faults(rows)
    if not bad:
        cannot = f", {verdicts.count(CANNOT)} cannot be asked" if CANNOT in verdicts else ""
        conclusion = f"{engine}: {verdicts.count(OK)} cases passed{cannot}"
    elif bad[0].verdict == CANNOT:
        conclusion = f"{engine}: it can do nothing that was asked: {bad[0].text}"
    else:
        more = f" (and {len(bad) - 1} more below)" if len(bad) > 1 else ""
        conclusion = f"{engine}: {bad[0].text} [{bad[0].case}, {bad[0].place}]{more}"
    if arguments.json:
        print(conclusion, file=sys.stderr)

    def line(row: Row) -> list[str]:
        found = OK if row.verdict == OK else f"{row.verdict}: {row.text.partition('; ')[0]}"
        return [row.case, row.expected, found, row.meaning if row.verdict in (BROKEN, FAILED) else ""]

    def text() -> str:
        parts, columns = [conclusion], ["case", "expected", "found", "for training"]
        with within(SCREEN):
            for place, cases in groupby(rows, key=lambda row: row.place):
                title = f"in {place}" if place == "one process" else f"over {place}"
                parts.append(Grid(title=title, columns=columns, lines=[*map(line, cases)]).text())
        met = {row.case: row.source for row in bad if row.source}
        if met:
            parts.append("\n".join(["others have met", *(f"  {case}: {url}" for case, url in met.items())]))
        return "\n\n".join(parts)

    tell(arguments, rows, text)
    if any(row.verdict == BROKEN for row in bad):
        return CASE_FAILED
    return VERDICT_FAILED if bad else DONE


def _rows(engine: str, timeout_s: float) -> list[Row]:
    """Results of the conformance tests. ValueError for a name that leads nowhere, and without pytest."""
    try:
        import pytest
    except ImportError as error:
        raise ValueError(
            "check-engine runs pytest, which is missing; install gpipe-bench with its extra conformance"
        ) from error
    from ..engines.trials import PLACES

    class Found:
        """The plugin "found", in which the tests leave their results."""

        __name__ = "found"
        rows: ClassVar[list[Row]] = []
        ended: BaseException | None = None

        def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
            self.ended = excinfo.value  # or what pytest.exit raises

    found = Found()
    words = ["--pyargs", "gpipe_bench.conformance", "-p", "gpipe_bench.conformance.options", "-s"]
    words += ["--engine", engine, "--engine-timeout-s", str(timeout_s)]
    words += ["-c", os.devnull, "--rootdir", os.getcwd(), "--noconftest"]  # a user's are for his own tests
    unused = "terminal", "cacheprovider", "faulthandler", "unraisableexception", "threadexception", "xdist"
    words += [word for name in unused for word in ("-p", f"no:{name}")]
    status = pytest.main(words, plugins=[found])
    if isinstance(found.ended, KeyboardInterrupt):
        raise found.ended
    if found.ended is not None:
        raise ValueError(str(found.ended))
    if not found.rows:
        raise RuntimeError(f"pytest ran no test, and ended with status {int(status)}")
    return sorted(found.rows, key=lambda row: [*PLACES].index(row.place))

"""Which tests are of the first tier, and where the time of a run went.

The first tier is what `nox -s tests` runs: the whole public behaviour once, within three minutes. The second,
named in `second_tier.txt` and marked `deep`, holds the same promises on more cells, in more processes, under
signals and kills; continuous integration adds it (`nox -s tests -- --all`). `test_tools.py` says that no area
leaves the first.

Time is processor time, of this process and of all that it started: a loaded machine does not change it much.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest

SECOND = Path(__file__).with_name("second_tier.txt")
SHOWN = 12  # lines of each of the two lists


@cache
def patterns() -> tuple[str, ...]:
    """The lines of `second_tier.txt` that say something."""
    lines = SECOND.read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def is_deep(name: str, patterns: Sequence[str]) -> bool:
    """Whether a test, or all of a file, is of the second tier; `name` is pytest's, from `tests/` on. The last
    pattern that holds it decides, and one behind `!` takes back, as in `.gitignore`.
    """
    found = False
    for pattern in patterns:
        inside = pattern.removeprefix("!")
        if name.startswith(inside) and name[len(inside) : len(inside) + 1] in ("", ":", "[", "/"):
            found = not pattern.startswith("!")
    return found


def is_all_deep(file: str) -> bool:
    """Whether no test of a file is of the first tier."""
    lines = patterns()
    return is_deep(file, lines) and not any(line.startswith(f"!{file}::") for line in lines)


def spent_s() -> float:
    """Processor seconds of this process, its children that ended, and the fork server with its children."""
    times = os.times()
    total = time.process_time() + times.children_user + times.children_system
    if pid := forkserver._forkserver._forkserver_pid:
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


class Spent:
    """Adds to each report of a test what its phase took, and says of all at the end where the time went."""

    def __init__(self, path: str | None) -> None:
        self.path, self.last_s = path, spent_s()
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self.last_s = spent_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        now_s = spent_s()
        report.processor_s, self.last_s = now_s - self.last_s, now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = getattr(report, "processor_s", 0.0)  # what ended with its worker has none
        self.seconds[report.nodeid] += seconds
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps([report.nodeid, report.when, round(seconds, 3)]) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: Counter[str] = Counter()
        for name, seconds in self.seconds.items():
            files[name.partition("::")[0]] += seconds
        total = sum(files.values())
        if len(files) < 2:
            return
        terminalreporter.section(f"{total:.0f} processor seconds in {len(self.seconds)} tests")
        for title, counted in (("files", files), ("tests", self.seconds)):
            terminalreporter.write_line(f"slowest {title}:")
            for name, seconds in counted.most_common(SHOWN):
                terminalreporter.write_line(f"  {seconds:6.1f} s  {name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spent", metavar="FILE", help="write the processor seconds of each phase of each test")


def pytest_configure(config: pytest.Config) -> None:
    workers_share = None if hasattr(config, "workerinput") else config.option.spent
    config.pluginmanager.register(Spent(workers_share), "spent")

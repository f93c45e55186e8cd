"""Progress: a bar for people, lines for logs, and a time left that learns from what was run."""

from __future__ import annotations

import io
import os
import pty
import select

from records import record

from gpipe_bench.harness.experiment import Case
from gpipe_bench.harness.runner import BarReporter, Remaining, Reporter, reporter

CASES = [Case({"step": step}, estimate_s=10) for step in (1, 2, 3)]


def tell(reporter):
    reporter.begin(CASES, 1)
    reporter.started(CASES[0])
    reporter.finished(CASES[0], record(1, duration_s=0.0), reused=True)
    reporter.finished(CASES[1], record(2, duration_s=20.0), reused=False)
    reporter.warn("[bold]mind the gap[/bold]")
    reporter.finished(CASES[2], record(3, status="failed", reason="wheel [off]", duration_s=1), reused=False)
    reporter.end()


class Terminal:
    """A pseudo terminal: something that is one for the program, and can be read back."""

    def __enter__(self):
        self.master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        return self

    def __exit__(self, *error):
        self.stream.close()
        os.close(self.master)

    def read(self):
        self.stream.flush()
        content = b""
        while select.select([self.master], [], [], 0)[0]:
            content += os.read(self.master, 65536)
        return content.decode()


def test_lines_say_what_happened_and_how_long_it_takes():
    stream = io.StringIO()
    tell(Reporter(stream))
    assert stream.getvalue().splitlines() == [
        "3 cases, about 30 s",
        "[2/3] step=2: done in 20.0 s, 17 s left",
        "warning: [bold]mind the gap[/bold]",
        "[3/3] step=3: failed: wheel [off], 0 s left",
        "1 of 3 cases were on record already",
    ]


def test_a_terminal_gets_a_bar(monkeypatch):
    for name in ("CI", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with Terminal() as terminal:
        shown = reporter(terminal.stream, {"TERM": "xterm"})
        assert isinstance(shown, BarReporter)
        tell(shown)
        text = terminal.read()
    assert "\x1b[" in text
    for part in (
        "0/3",
        "30 s left",
        "3/3",
        "[bold]mind the gap[/bold]",
        "step=3: failed: wheel [off]",
        "1 of 3 cases",
    ):
        assert part in text


def test_the_time_left_learns_from_what_was_run_and_not_from_what_was_on_record():
    remaining = Remaining(CASES)
    assert remaining.left_s == 30
    remaining.finished(CASES[0], 0.0, reused=True)
    assert remaining.left_s == 20
    remaining.finished(CASES[1], 40.0, reused=False)
    assert 25 < remaining.left_s <= 40
    remaining.finished(CASES[2], 1.0, reused=False)
    assert remaining.left_s == 0

"""Progress: a bar for people, lines for logs, and a time left that learns from what was run."""

from __future__ import annotations

import io
import os
import pty
import select

import pytest
from records import record

from gpipe_bench.harness.experiment import Case
from gpipe_bench.harness.runner import BarReporter, Remaining, Reporter, reporter, words

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


@pytest.mark.parametrize("variables", [{"CI": "true"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colours_gets_lines_without_control_characters(variables):
    with Terminal() as terminal:
        tell(reporter(terminal.stream, variables))
        text = terminal.read()
    assert "\x1b" not in text
    assert "[3/3]" in text


def test_the_time_left_learns_from_what_was_run_and_not_from_what_was_on_record():
    remaining = Remaining(CASES)
    assert remaining.left_s == 30
    remaining.finished(CASES[0], 0.0, reused=True)
    assert remaining.left_s == 20
    remaining.finished(CASES[1], 40.0, reused=False)
    assert 25 < remaining.left_s <= 40
    remaining.finished(CASES[2], 1.0, reused=False)
    assert remaining.left_s == 0


def test_a_first_case_that_loads_what_all_need_says_little_of_the_others():
    """It took a hundred times its estimate; that of the others is right."""
    first, *others = [Case({"step": step}, estimate_s=0.1) for step in range(100)]
    remaining = Remaining([first, *others])
    remaining.finished(first, 10.0, reused=False)
    assert 9.9 < remaining.left_s < 20
    for case in others[:50]:
        remaining.finished(case, 0.1, reused=False)
    assert 4.9 < remaining.left_s < 4.9 * 3


def test_a_machine_that_is_ten_times_as_slow_is_believed_before_half_is_done():
    cases = [Case({"step": step}, estimate_s=1.0) for step in range(20)]
    remaining = Remaining(cases, jobs=2)
    for case in cases[:8]:
        remaining.finished(case, 10.0, reused=False)
    assert 0.6 * 60 < remaining.left_s <= 60


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-1, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations_in_words(seconds, expected):
    assert words(seconds) == expected

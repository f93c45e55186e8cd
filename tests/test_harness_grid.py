"""A table of words: the same lines for a terminal and for markdown."""

from __future__ import annotations

from gpipe_bench.harness.report.grid import Grid, numbers

COLUMNS = ["", "ours|theirs"]
GRID = Grid(title="A title", columns=COLUMNS, lines=[["K=2", 1.5], ["a|b\nc", 12]], notes=["a note"])


def test_text_has_title_lines_and_notes():
    assert GRID.text().splitlines() == [
        "A title",
        "",
        "     ours|theirs",
        "---  -------------",
        "K=2  1.5",
        "a|b  12",
        "c",
        "a note",
    ]


def test_markdown_keeps_each_line_on_one_and_escapes_pipes():
    assert GRID.markdown().splitlines() == [
        "**A title**",
        "",
        r"|        | ours\|theirs   |",
        "|--------|----------------|",
        "| K=2    | 1.5            |",
        r"| a\|b c | 12             |",
        "a note",
    ]


def test_numbers_stand_at_the_right():
    lines = (
        Grid(columns=COLUMNS, lines=[["K=2", 1], ["K=4", 100]], right=numbers(COLUMNS)).text().splitlines()
    )
    assert lines[-2:] == ["K=2              1", "K=4            100"]

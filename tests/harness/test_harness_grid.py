"""A table of words: the same lines for a terminal and for markdown."""

from __future__ import annotations

from gpipe_bench.harness.report.grid import Grid, fill, within

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


def test_a_wide_table_is_wrapped_and_then_goes_below_itself() -> None:
    """Within so many columns; outside of the block it is as wide as it is."""
    words = "what is asked of them all, and how it came out in the end"
    wide = Grid(columns=["", "asked", "number"], lines=[["first", words, "12 ms"]], right=frozenset({2}))
    whole = wide.text()
    with within(40):
        lines = wide.text().splitlines()
        assert max(map(len, lines)) <= 40
        assert " ".join(" ".join(line[7:31] for line in lines[2:]).split()) == words
        assert fill(words).count("\n") == 1
        many = Grid(columns=["", *(f"K={k}" for k in range(9))], lines=[["row", *("1234567890" * 9)[:9]]])
        narrow = Grid(columns=["", *"abc"], lines=[["row", *["12345678901234"] * 3]], title="named once")
        parts = narrow.text().split("\n\n")
    assert many.text().count("row") == 1
    assert [part.split()[0] for part in parts] == ["named", "a", "c"]
    assert all("row" in part for part in parts[1:])
    assert wide.text() == whole
    with within(40):
        empty = Grid(columns=["", "asked", ""], lines=[["first", words, ""]]).text()
    assert "first" in empty, "a column with nothing in it"

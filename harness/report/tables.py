"""Comparisons as text: laid out like the paper's table, the three lines of a cell below each other.

Plain ASCII, no colours and no terminal control, so the same text serves a terminal, a log, a pipe and a
README.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from gpipe_bench.harness.judging.compare import Comparison, numbered_footnotes, totals
from gpipe_bench.harness.judging.units import show_with_interval

_WIDTH = 110


def text_table(comparisons: Sequence[Comparison]) -> str:
    """Every table of the comparisons for a terminal, then the footnotes and the totals."""
    parts = [
        f"{_title(group)}\n\n{_grid(group, numbers, 'simple')}" for group, numbers in _groups(comparisons)
    ]
    notes = [
        textwrap.fill(
            note, _WIDTH, initial_indent=f"[{number}] ", subsequent_indent=" " * (len(str(number)) + 3)
        )
        for note, number in numbered_footnotes(comparisons).items()
    ]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else []), totals(comparisons)])


def markdown_table(comparisons: Sequence[Comparison]) -> str:
    """The same for a markdown page."""
    parts = [
        f"**{_title(group)}**\n\n{_grid(group, numbers, 'github')}" for group, numbers in _groups(comparisons)
    ]
    notes = [f"{number}. {note}" for note, number in numbered_footnotes(comparisons).items()]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else []), totals(comparisons)])


def _groups(comparisons: Sequence[Comparison]) -> list[tuple[list[Comparison], dict[str, int]]]:
    numbers = numbered_footnotes(comparisons)
    tables = dict.fromkeys(comparison.table for comparison in comparisons)
    return [([c for c in comparisons if c.table == table], numbers) for table in tables]


def _title(group: Sequence[Comparison]) -> str:
    places = dict.fromkeys(c.location for c in group if c.location)
    hardware = dict.fromkeys(c.hardware for c in group if c.hardware)
    known = "; ".join([*places, *(f"paper on {name}" for name in hardware)])
    return f"{group[0].table} ({known})" if known else group[0].table


def _grid(group: Sequence[Comparison], numbers: dict[str, int], style: str) -> str:
    from tabulate import tabulate

    columns = list(dict.fromkeys(c.column for c in group))
    if len(group) < len(columns) + len({c.row for c in group}):  # hardly more than a diagonal: one line each
        return _list(group, numbers, style)
    lines: list[list[str]] = []
    for row in dict.fromkeys(c.row for c in group):
        cells = {c.column: c for c in group if c.row == row}
        provenances = {c.provenance for c in cells.values() if c.provenance}
        uniform = provenances.pop() if len(provenances) == 1 else ""
        lines.append([row, "paper", *(_paper(cells.get(column)) for column in columns)])
        if any(c.peer_printed for c in cells.values()):
            lines.append(["", "torchgpipe", *(_peer(cells.get(column)) for column in columns)])
        label = f"ours ({uniform})" if uniform else "ours"
        lines.append(["", label, *(_ours(cells.get(column), not uniform) for column in columns)])
        lines.append(["", "verdict", *(_verdict(cells.get(column), numbers) for column in columns)])
    return str(tabulate(_escaped(lines, style), ["", "", *columns], tablefmt=style, disable_numparse=True))


def _list(group: Sequence[Comparison], numbers: dict[str, int], style: str) -> str:
    from tabulate import tabulate

    lines = [[c.row, c.column, _paper(c), _ours(c, True), _verdict(c, numbers)] for c in group]
    headers = ["", "", "paper", "ours", "verdict"]
    return str(tabulate(_escaped(lines, style), headers, tablefmt=style, disable_numparse=True))


def _escaped(lines: list[list[str]], style: str) -> list[list[str]]:
    if style != "github":
        return lines
    return [[cell.replace("|", "\\|") for cell in line] for line in lines]


def _paper(cell: Comparison | None) -> str:
    if cell is None or not cell.printed:
        return "-"
    return cell.printed if cell.corrected is None else f"{cell.printed} -> {cell.corrected_printed}"


def _peer(cell: Comparison | None) -> str:
    return "-" if cell is None or not cell.peer_printed else cell.peer_printed


def _ours(cell: Comparison | None, with_provenance: bool) -> str:
    if cell is None or cell.ours is None:
        return "-"
    number = show_with_interval(cell.ours, cell.low, cell.high, cell.unit)
    return f"{number} {cell.provenance}" if with_provenance else number


def _verdict(cell: Comparison | None, numbers: dict[str, int]) -> str:
    if cell is None:
        return "-"
    marks = ",".join(str(number) for number in sorted(numbers[note] for note in cell.footnotes))
    verdict: str = cell.verdict
    if verdict in ("deviates", "exceeds") and cell.ratio is not None:
        verdict += f" x{cell.ratio:.3g}"
    return f"{verdict} [{marks}]" if marks else verdict

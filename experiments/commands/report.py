"""`report`: the scorecard of everything on record, as one HTML page, one markdown file and one CSV file.

Reads records and draws; needs neither torch nor a device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import print_line
from gpipe_bench.experiments.report.build import build, short_path
from gpipe_bench.harness.bundle import unpacked
from gpipe_bench.harness.report.cells import cells_csv
from gpipe_bench.harness.report.counts import counts_lines
from gpipe_bench.harness.report.render import html, markdown
from gpipe_bench.harness.store import write_whole

HTML, MARKDOWN, CELLS = "report.html", "report.md", "cells.csv"


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb."""
    with unpacked(arguments.with_) as folders:
        others = [(path.stem, folder) for path, folder in zip(arguments.with_, folders, strict=True)]
        page = build(
            arguments.results, figures=not (arguments.no_figures or arguments.json), others=others,
            engine=arguments.engine,
        )  # fmt: skip
    for warning in page.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.json:
        for table in page.tables:
            for row in (*table.rows, *table.settings):
                line = {**msgspec.to_builtins(row.comparison), "machine": row.machine,
                        "at_half": row.narrow, "at_twice": row.wide}  # fmt: skip
                print_line(msgspec.json.encode(line))
        return exits.DONE
    folder = arguments.output or arguments.results
    print("\n".join(counts_lines(row.comparison for table in page.tables for row in table.rows)), end="\n\n")
    files = ((HTML, html(page)), (MARKDOWN, markdown(page)), (CELLS, cells_csv(page.tables)))
    for name, text in files:
        write(folder / name, text)
        print(f"report: {short_path(folder / name)}")
    return exits.DONE


def write(path: Path, text: str) -> None:
    """Replaces the file as a whole: a reader never sees half a page. Raises ValueError if it can't."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise ValueError(
            f"can't write {path}: {error.strerror or error}; choose another folder with --output"
        ) from error

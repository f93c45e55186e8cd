"""`report`: the scorecard of everything on record, as one HTML page and one CSV file.

Reads records and draws; needs neither torch nor a device.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from gpipe_bench.experiments.commands.output import DONE, print_line, warn
from gpipe_bench.experiments.report import build
from gpipe_bench.harness import short_path
from gpipe_bench.harness.report.page import cells_csv, html
from gpipe_bench.harness.store import write_whole

HTML, CELLS = "report.html", "cells.csv"


def options(verb: argparse.ArgumentParser) -> None:
    """Adds the verb's options to its parser."""
    verb.add_argument("--output", type=Path, metavar="DIR", help="default: the folder of the records")
    verb.add_argument("--no-figures", action="store_true", help="numbers only")


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError where the files can't be written."""
    results = arguments.results
    page = build(results, figures=not (arguments.no_figures or arguments.json))
    warn(*page.warnings)
    if arguments.json:
        for table in page.tables:
            for cell in table.rows:
                more = {"machine": cell.machine or None}
                print_line(msgspec.json.encode(cell.to_data() | more))
        return DONE
    folder = arguments.output or (results.parent if results.is_file() else results)
    print(page.first.text(), end="\n\n")
    files = ((HTML, html(page)), (CELLS, cells_csv(page.tables)))
    for name, text in files:
        write(folder / name, text)
        print(f"report: {short_path(folder / name)}")
    return DONE


def write(path: Path, text: str) -> None:
    """Replaces the file as a whole: a reader never sees half a page. Raises ValueError if it can't."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise ValueError(
            f"can't write {path}: {error.strerror or error}; choose another folder with --output"
        ) from error

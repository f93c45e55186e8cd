"""`export`: the records of a results folder as one file that somebody else can check and read.

Exit status 0; 2 where there is nothing to export.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gpipe_bench.experiments.commands.output import DONE, tell, warn
from gpipe_bench.experiments.registry import EXPERIMENTS, load, program
from gpipe_bench.harness.bundle import SUFFIX, pack
from gpipe_bench.harness.record import encode
from gpipe_bench.harness.store import Store, latest, lines_of, write_whole


def options(verb: argparse.ArgumentParser) -> None:
    """Of the verb."""
    verb.add_argument("name", nargs="*", metavar="NAME", help="experiments; default: all on record")
    verb.add_argument("--output", type=Path, metavar="FILE.zip", help="default: the results folder's name")


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError where there is nothing to export or no place for it."""
    lines, counts = collected(Store(arguments.results), arguments.name or list(EXPERIMENTS))
    if not lines:
        raise ValueError(f"no records to export in {arguments.results}; make some with: {program()} run NAME")
    path = arguments.output or Path(f"{arguments.results.resolve().name}{SUFFIX}")
    content = pack(lines)
    try:
        write_whole(path, content)
    except OSError as error:
        raise ValueError(f"can't write {path}: {error.strerror or error}; choose another --output") from error
    said = ", ".join(f"{count} of {name}" for name, count in counts.items())
    tell(
        arguments,
        [{"file": str(path), "bytes": len(content), "records": counts}],
        lambda: (
            f"export: {path}: {sum(counts.values())} records: {said}\n"
            f"look at it as its reader will: {program()} check {path}"
        ),
    )
    return DONE


def collected(store: Store, names: Sequence[str]) -> tuple[dict[str, bytes], dict[str, int]]:
    """The latest record of each case as lines, and their numbers, by experiment; none of other revisions."""
    lines: dict[str, bytes] = {}
    counts: dict[str, int] = {}
    for name in names:
        revision = load(name).revision  # ValueError for an unknown one
        loaded = store.load(name)
        warn(*lines_of(loaded.problems))
        found = latest(loaded.records).values()
        records = [record for record in found if record.revision == revision]
        if len(records) < len(found):
            left_out = len(found) - len(records)
            warn(f"{name}: records of other revisions than {revision} are left out: {left_out}")
        if records:
            lines[name] = b"".join(encode(record) + b"\n" for record in records)
            counts[name] = len(records)
    return lines, counts

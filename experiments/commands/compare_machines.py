"""`compare NAME --machines A B`: the same cells on several machines, in one table.

A machine is a folder of records: one of those committed under results/reference, by its name, or any other
by its path, or a file that `export` wrote.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import print_line, say
from gpipe_bench.experiments.registry import suggestion
from gpipe_bench.experiments.report.readings import Shown, readable, shown_of
from gpipe_bench.experiments.report.records import select_records
from gpipe_bench.harness.bundle import unpacked
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.places import REFERENCE
from gpipe_bench.harness.report.side import SideBySide, side_by_side, side_markdown, side_text
from gpipe_bench.harness.store import Problem, Store, left_out, lines_of
from gpipe_bench.harness.verdict import Comparison, Entry

LOCAL = "local"


def run(arguments: argparse.Namespace, experiment: Experiment) -> int:
    """Exit status of the verb. Raises ValueError for an unknown machine or one without such records."""
    problems: list[Problem] = []
    with unpacked(Path(name) for name in arguments.machines if _is_file(name)) as folders:
        files = dict(zip((name for name in arguments.machines if _is_file(name)), folders, strict=True))
        found = {
            name: _shown(name, folder, experiment, arguments.profile, problems)
            for name, folder in machine_folders(arguments.machines, arguments.results, files=files).items()
        }
    profiles = {name: shown.records[-1].profile for name, shown in found.items()}
    if len(set(profiles.values())) > 1:
        each = ", ".join(f"{name} has {profile}" for name, profile in profiles.items())
        print(f"warning: the profiles differ: {each}; choose one with --profile", file=sys.stderr)
    side = side_by_side(
        {name: comparable(experiment, shown) for name, shown in found.items()},
        {name: [record.environment for record in shown.records] for name, shown in found.items()},
    )
    if arguments.json:
        _print_json(side)
    else:
        heading = ", ".join(f"{name} (profile {profiles[name]})" for name in found)
        say(f"{experiment.title}: {heading}\n")
        print(side_markdown(side)) if arguments.markdown else say(side_text(side))
        if problems:
            say(f"\n{left_out(problems, experiment.name)}")
    return exits.DONE


def _is_file(name: str) -> bool:
    return Path(name).is_file()


def machine_folders(
    names: Sequence[str],
    results: Path,
    references: Path = REFERENCE,
    files: Mapping[str, Path] = MappingProxyType({}),
) -> dict[str, Path]:
    """Folder of each machine; `local` is the results folder, and a file's is where it is unpacked. Raises
    ValueError naming those there are.
    """
    known = {path.name: path for path in sorted(references.glob("*")) if path.is_dir()}
    if results.is_dir():
        known.setdefault(LOCAL, results)
    found: dict[str, Path] = {}
    for name in names:
        folder = known.get(name, files.get(name, Path(name)))
        if not folder.is_dir():
            raise ValueError(
                f"unknown machine {name!r}{suggestion(name, known)}; there are: "
                f"{', '.join(known) or 'none'}; or give a folder of records or a file of export"
            )
        if folder.resolve() in {other.resolve() for other in found.values()}:
            raise ValueError(f"machine {name!r} is given twice; side by side takes different ones")
        short = Path(name).stem if name in files else folder.name
        label = name if name in known or short in found else short
        found[label] = folder
    if len(found) < 2:
        raise ValueError(
            f"--machines takes at least two, got {', '.join(found)}; there are: {', '.join(known)}"
        )
    return found


def comparable(experiment: Experiment, shown: Shown) -> Sequence[Comparison]:
    """The experiment's cells of the paper, or every quantity of its records where it reports no cell."""
    if any(cell.ours is not None for cell in shown.comparisons):
        return shown.comparisons
    quantities: dict[tuple[str, str], Entry] = {}
    for record in shown.records:
        for quantity in record.quantities:
            quantities[quantity.label, record.label] = Entry(
                table=experiment.name, row=quantity.label, column=record.label, quantity=quantity,
                record=record,
            )  # fmt: skip
    return compare(list(quantities.values()))


def _shown(
    name: str, folder: Path, experiment: Experiment, profile: str | None, problems: list[Problem]
) -> Shown:
    """What the machine's records come to; what can't be read is added to `problems`."""
    loaded = Store(folder).load(experiment.name)
    problems += loaded.problems
    for line in lines_of(loaded.problems):
        print(f"warning: {line}", file=sys.stderr)
    records = select_records(loaded.records, experiment, profile)
    if not records:
        there = ", ".join(sorted(path.stem for path in folder.glob("*.jsonl"))) or "nothing"
        wanted = f" of profile {profile}" if profile else ""
        raise ValueError(f"machine {name!r} has no records of {experiment.name}{wanted}; it has: {there}")
    records = [record for record in records if record.options == records[-1].options]
    shown, unusable = readable(experiment.name, records, lambda usable: shown_of(experiment, usable))
    if shown is None:
        raise ValueError(f"machine {name!r}: {unusable[0]}")
    for line in unusable:
        print(f"warning: {name}: {line}", file=sys.stderr)
    return shown


def _print_json(side: SideBySide) -> None:
    for row in side.rows:
        cells = dict(zip(side.machines, row.cells, strict=True))
        ratios = dict(zip(side.machines, row.ratios, strict=True))
        line = {"table": row.table, "row": row.row, "column": row.column, "part": row.part,
                "source": row.source, "unit": row.unit,
                "printed": row.printed, "machines": cells, "ratio_to_first": ratios,
                "differences": side.differences}  # fmt: skip
        print_line(msgspec.json.encode(line))

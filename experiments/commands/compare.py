"""`compare NAME`: paper | ours | verdict, re-derived from records alone; `--full` has the reasons too.

Whoever has no records of an experiment is shown those that come with the project. With `--machines A B` the
same cells of several machines in one table. A machine is a folder of records: one of those committed under
results/reference, by its name, or any other by its path, or one file of records of several experiments.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gpipe_bench.experiments.commands.output import DONE, print_line, say, warn
from gpipe_bench.experiments.registry import PROFILES, load, program
from gpipe_bench.experiments.report.readings import (
    Shown,
    check_engine_is_there,
    engines_of,
    folder_of,
    readable,
    screen,
    select_records,
    shown_of,
)
from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.compare import compare, differences
from gpipe_bench.harness.experiment import Experiment, by_name
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.grid import SCREEN, within
from gpipe_bench.harness.report.table import markdown_table
from gpipe_bench.harness.store import Loaded, Problem, Store, left_out, lines_of
from gpipe_bench.harness.verdict import NO_RECORD, Comparison
from gpipe_bench.pipeline.plan.names import suggestion

LOCAL = "local"


def options(verb: argparse.ArgumentParser) -> None:
    """Adds the verb's options to its parser."""
    verb.add_argument("name", metavar="NAME", help="an experiment; `list` has their names")
    verb.add_argument("--profile", choices=PROFILES, help="default: that of the latest record")
    verb.add_argument("--engine", metavar="NAME", help="of several runs the latest in which it took part")
    verb.add_argument("--full", action="store_true", help="also ranges, reasons, footnotes and details")
    verb.add_argument(
        "--unknowns", action="store_true",
        help="compute what the choices that the paper leaves open would move (minutes; needs torch)",
    )  # fmt: skip
    verb.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    verb.add_argument(
        "--machines", nargs="+", metavar="MACHINE",
        help="records of this machine, or of several in one table: names under results/reference, local, "
        "folders, files of records",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError for an unknown machine, and where there are no records."""
    experiment = load(arguments.name)
    machines = arguments.machines or []
    if arguments.unknowns:
        _unknowns(experiment.name)
        return DONE
    if len(machines) > 1 and arguments.engine is not None:
        raise ValueError(
            f"--engine {arguments.engine}: machines are set side by side by their latest runs; leave it out"
        )
    if not machines:
        _one(arguments, experiment, *folder_of(experiment.name, arguments.results, is_own=arguments.is_own))
        return DONE
    found = machine_folders(machines, arguments.results)
    if len(found) == 1:
        _one(arguments, experiment, next(iter(found.values())))
    else:
        _several(arguments, experiment, found)
    return DONE


def _unknowns(name: str) -> None:
    """Raises ValueError for an experiment that computes nothing at the paper's size."""
    from gpipe_bench.experiments.paper import unknowns
    from gpipe_bench.harness.report import reproduced

    if name not in reproduced.SECONDS:
        raise ValueError(f"--unknowns: {name} has no declared choices; {', '.join(reproduced.SECONDS)} have")
    for model in reproduced.SECONDS[name]:
        say(unknowns.text(name, model) + "\n")


def _one(arguments: argparse.Namespace, experiment: Experiment, folder: Path, whose: str = "") -> None:
    problems: list[Problem] = []
    with within(None if arguments.full or arguments.markdown else SCREEN):
        shown = _shown(None, folder, experiment, arguments, problems)
    comparisons: Sequence[Comparison] = shown.comparisons
    timed = [
        record.environment
        for record in shown.records
        if any(metric.provenance != "modelled" for metric in record.metrics)
    ]
    warn(
        *(
            f"records differ in {name}: {' | '.join(map(str, values))}"
            for name, values in differences(timed).items()
        )
    )
    if problems:  # where a cell has no record, the lines that can't be read may be the reason
        reason = f"{NO_RECORD}, or its line can't be read: {'; '.join(lines_of(problems))}"
        comparisons = [
            replace(cell, reason=reason) if cell.reason == NO_RECORD else cell for cell in comparisons
        ]
    if whose and (arguments.json or arguments.markdown):
        warn(whose)
    if arguments.json:
        found = [cell.to_data() for cell in comparisons]
        for line in found or _numbers(shown.records):
            print_line(msgspec.json.encode(line))
        return
    if arguments.markdown and not comparisons:
        say(f"```text\n{shown.text}\n```")
    elif arguments.markdown:
        say(markdown_table(comparisons))
    else:
        again = f"{program()} {shlex.join(arguments.arguments)} --full"
        text = shown.text if arguments.full else screen(shown, again)
        heading = f"{experiment.title}\nprofile {shown.records[-1].profile}, {len(shown.records)} records"
        having = sorted(REFERENCE.glob(f"*/{experiment.name}.jsonl"))
        if having and shown.records[-1].profile == "smoke":
            machine = having[0].parent.name
            heading += f"; ours: {program()} compare {experiment.name} --machines {machine}"
        say("\n".join([heading, *([whose] if whose else []), "", text]))
    if problems:
        say(f"\n{left_out(problems, experiment.name)}")


def _several(arguments: argparse.Namespace, experiment: Experiment, folders: Mapping[str, Path]) -> None:
    from gpipe_bench.harness.report.side import side_by_side

    problems: list[Problem] = []
    found = {name: _shown(name, folder, experiment, arguments, problems) for name, folder in folders.items()}
    profiles = {name: shown.records[-1].profile for name, shown in found.items()}
    if len(set(profiles.values())) > 1:
        each = ", ".join(f"{name} has {profile}" for name, profile in profiles.items())
        warn(f"the profiles differ: {each}; choose one with --profile")
    side = side_by_side(
        {name: comparable(shown) for name, shown in found.items()},
        {name: [record.environment for record in shown.records] for name, shown in found.items()},
    )
    if arguments.json:
        for row in side.rows:
            known = row.known
            line = {
                "table": known.table, "row": known.row, "column": known.column, "part": row.part,
                "source": known.source, "unit": known.unit, "printed": known.paper_text,
                "machines": {
                    name: None if cell is None else cell.to_data()
                    for name, cell in zip(side.machines, row.cells, strict=True)
                },
                "ratio_to_first": dict(zip(side.machines, row.ratios, strict=True)),
                "differences": side.differences,
            }  # fmt: skip
            print_line(msgspec.json.encode(line))
        return
    heading = ", ".join(f"{name} (profile {profiles[name]})" for name in found)
    say(f"{experiment.title}: {heading}\n")
    say(side.markdown() if arguments.markdown else side.text())
    if problems:
        say(f"\n{left_out(problems, experiment.name)}")


def _shown(
    machine: str | None, folder: Path, experiment: Experiment, arguments: Any, problems: list[Problem]
) -> Shown:
    """Results of the latest records in a folder; what can't be read is added to `problems`."""
    name, profile = experiment.name, arguments.profile
    loaded = Store(folder).load(name)
    problems += loaded.problems
    warn(*lines_of(loaded.problems))
    records = list(loaded.records)
    if records and (engine := arguments.engine) is not None:
        if not experiment.engines:
            raise ValueError(f"--engine {engine}: {name} runs no engine; leave the option out")
        check_engine_is_there(engine, records)
        records = [record for record in records if engine in engines_of(record)]
    records = select_records(records, experiment, profile)
    if not records and machine is None:
        raise ValueError(_nothing(name, arguments, folder, loaded))
    if not records:
        there = ", ".join(Store(folder).experiments()) or "nothing"
        wanted = f" of profile {profile}" if profile else ""
        raise ValueError(f"machine {machine!r} has no records of {name}{wanted}; it has: {there}")
    last = records[-1].options
    groups = {tuple(sorted(record.options.items(), key=str)): record.options for record in records}
    if len(groups) > 1 and machine is None:  # the latest group; the others are named, never mixed in
        warn(f"shown are records with {last}; there are others: {list(groups.values())}")
    records = [record for record in records if record.options == last]
    brief = not (arguments.full or arguments.json or arguments.markdown)
    shown, unusable = readable(name, records, lambda usable: shown_of(experiment, usable, brief=brief))
    if shown is None and machine is None:
        raise ValueError(f"{unusable[0]}; make records anew with: {program()} run {name} --fresh")
    if shown is None:
        raise ValueError(f"machine {machine!r}: {unusable[0]}")
    warn(*(f"{machine}: {line}" if machine else line for line in unusable))
    return shown


def machine_folders(names: Sequence[str], results: Path, references: Path = REFERENCE) -> dict[str, Path]:
    """Folder, or file, of each machine; `local` is the results folder. Raises ValueError naming those there
    are.
    """
    known = {path.name: path for path in sorted(references.glob("*")) if path.is_dir()}
    if results.is_dir():
        known.setdefault(LOCAL, results)
    found: dict[str, Path] = {}
    for name in names:
        folder = known.get(name, Path(name))
        if not folder.exists():
            raise ValueError(
                f"unknown machine {name!r}{suggestion(name, known)}; there are: "
                f"{', '.join(known) or 'none'}; or give a folder or a file of records"
            )
        if folder.resolve() in {other.resolve() for other in found.values()}:
            raise ValueError(f"machine {name!r} is given twice; side by side takes different ones")
        short = folder.name if folder.is_dir() else folder.stem
        found[name if name in known or short in found else short] = folder
    return found


def comparable(shown: Shown) -> Sequence[Comparison]:
    """The experiment's cells of the paper, or every metric of its records where it reports no cell."""
    return shown.comparisons if shown.has_numbers else compare(by_name(shown.records))


def _numbers(records: Sequence[Record]) -> Iterator[dict[str, object]]:
    """Data of each number in the records, for experiments that the paper has no numbers for."""
    fields = ("name", "key", "value", "low", "high", "unit", "provenance", "note")
    for record in records:
        of_record = {"experiment": record.experiment, "profile": record.profile, "case": record.case}
        for metric in record.metrics:
            yield {**of_record, **{name: getattr(metric, name) for name in fields}}


def _nothing(name: str, arguments: argparse.Namespace, folder: Path, loaded: Loaded) -> str:
    wanted = f" of profile {arguments.profile}" if arguments.profile else ""
    profile = f" --profile {arguments.profile}" if arguments.profile else ""
    found = []
    if loaded.records:
        found.append(f"there are {len(loaded.records)} of other profiles or an earlier revision")
    if loaded.problems:
        lines = "1 line" if len(loaded.problems) == 1 else f"{len(loaded.problems)} lines"
        found.append(f"{lines} can't be read: {loaded.problems[0]}")
    besides = f" ({'; '.join(found)})" if found else ""
    return (
        f"no records of {name}{wanted} in {folder}{besides}; make them with: {program()} run {name}{profile}"
    )

"""The verb `compare NAME` shows the paper's numbers, this project's and verdicts, from records alone.

`--full` adds reasons. If you have no records of an experiment, those that the project ships are shown.
`--results` names a folder of records, or one file of records of several experiments.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from gpipe_bench.harness import REFERENCE, short_path
from gpipe_bench.harness.compare import differences
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.grid import SCREEN, within
from gpipe_bench.harness.report.table import Shown, readable, screen, shown_of
from gpipe_bench.harness.store import Store, lines_of, select_records

from ..registry import PROFILES, load, program
from .output import DONE, print_line, say, warn


def options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("name", metavar="NAME", help="an experiment; `list` has their names")
    verb.add_argument("--profile", choices=PROFILES, help="default: that of the latest record")
    verb.add_argument("--full", action="store_true", help="also ranges, reasons, footnotes and details")
    verb.add_argument(
        "--unknowns", action="store_true",
        help="compute the numbers under other values of what the paper leaves open (minutes; needs torch)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError where there are no records."""
    experiment = load(arguments.name)
    if arguments.unknowns and arguments.json:
        raise ValueError("--unknowns shows a text; leave --json out")
    if arguments.unknowns:
        _unknowns(experiment.name)
    else:
        folder, origin = folder_of(experiment.name, arguments.results, is_own=arguments.is_own)
        _compare(arguments, experiment, folder, origin)
    return DONE


def _unknowns(name: str) -> None:
    """Prints how far each number moves over what the paper leaves open. ValueError where none is computed."""
    from gpipe_bench.harness.report import reproduced

    from ..paper import reproduction

    models_of = reproduced.SECONDS  # the models that are computed at the paper's size, by experiment
    if name not in models_of:
        raise ValueError(f"--unknowns computes nothing of {name}; choose one of {', '.join(models_of)}")
    for model in models_of[name]:
        say(reproduction.text(name, model) + "\n")


def _compare(arguments: argparse.Namespace, experiment: Experiment, folder: Path, origin: str) -> None:
    with within(None if arguments.full else SCREEN):
        shown = _shown(folder, experiment, arguments)
    timed = [
        record.environment
        for record in shown.records
        if any(metric.provenance != "modelled" for metric in record.metrics)
    ]
    for name, values in differences(timed).items():
        warn(f"records differ in {name}: {' | '.join(map(str, values))}")
    if arguments.json:
        warn(*filter(None, [origin]))
        found = [cell.to_data() for cell in shown.comparisons]
        for line in found or _numbers(shown.records):
            print_line(msgspec.json.encode(line))
        return
    full_command = f"{program()} {shlex.join(arguments.arguments)} --full"
    text = shown.text if arguments.full else screen(shown, full_command)
    heading = f"{experiment.title}\nprofile {shown.records[-1].profile}, {len(shown.records)} records"
    shipped = sorted(REFERENCE.glob(f"*/{experiment.name}.jsonl"))
    if shipped and shown.records[-1].profile == "smoke":
        folder_shown = short_path(shipped[0].parent)
        heading += f"; the project's records: {program()} compare {experiment.name} --results {folder_shown}"
    say("\n".join([heading, *([origin] if origin else []), "", text]))


def _shown(folder: Path, experiment: Experiment, arguments: argparse.Namespace) -> Shown:
    """Results of the latest records in a folder; says what can't be read, and that it is not judged."""
    name, profile = experiment.name, arguments.profile
    loaded = Store(folder).load(name)
    if loaded.problems:
        remedy = f"not judged; restore it from a copy, or make it anew with: {program()} run {name}"
        warn(*lines_of(loaded.problems), remedy)
    records = select_records(loaded.records, experiment.revision, profile)
    if not records:
        wanted = f" of profile {profile}" if profile else ""
        others = f" (there are {len(loaded.records)} of other profiles or an earlier revision)"
        raise ValueError(
            f"no records of {name}{wanted} in {folder}{others * bool(loaded.records)}; make them with: "
            f"{program()} run {name}{f' --profile {profile}' if profile else ''}"
        )
    last = records[-1].options
    groups = {tuple(sorted(record.options.items(), key=str)): record.options for record in records}
    if len(groups) > 1:  # the latest group; the others are named, never mixed in
        warn(f"shown are records with {last}; there are others: {list(groups.values())}")
    records = [record for record in records if record.options == last]
    brief = not (arguments.full or arguments.json)
    shown, why = readable(name, lambda: shown_of(experiment, records, brief=brief))
    if shown is None:
        raise ValueError(f"{why}; make records anew with: {program()} run {name} --fresh")
    return shown


def _numbers(records: Sequence[Record]) -> Iterator[dict[str, object]]:
    """Data of each number in the records, for experiments that the paper has no numbers for."""
    fields = ("name", "key", "value", "low", "high", "unit", "provenance", "note")
    for record in records:
        of_record = {"experiment": record.experiment, "profile": record.profile, "case": record.case}
        for metric in record.metrics:
            yield {**of_record, **{name: getattr(metric, name) for name in fields}}


def folder_of(name: str, results: Path, *, is_own: bool) -> tuple[Path, str]:
    """The folder of an experiment's records, and a sentence if they are not the user's: where the user named
    no folder (`is_own`) and `results` has none of this experiment, the records that come with the project.
    """
    known = [folder for folder in sorted(REFERENCE.glob("*")) if (folder / f"{name}.jsonl").is_file()]
    if not is_own or not known or Store(results).load(name).records:
        return results, ""
    return known[0], f"records that came with the project ({known[0].name}); yours: {program()} run {name}"

"""The verb `compare NAME` shows paper, ours and verdict, from records alone; `--full` adds reasons.

If you have no records of an experiment, it shows those that the project ships. `--results` names a folder of
records, or one file of records of several experiments.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gpipe_bench.experiments.commands.output import DONE, print_line, say, warn
from gpipe_bench.experiments.registry import PROFILES, load, program
from gpipe_bench.harness import REFERENCE, short_path
from gpipe_bench.harness.compare import differences
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.grid import SCREEN, within
from gpipe_bench.harness.report.table import Shown, readable, screen, shown_of
from gpipe_bench.harness.store import Loaded, Problem, Store, left_out, lines_of, select_records
from gpipe_bench.harness.verdict import NO_RECORD, Comparison
from gpipe_bench.pipeline.plan.named import suggestion


def options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("name", metavar="NAME", help="an experiment; `list` has their names")
    verb.add_argument("--profile", choices=PROFILES, help="default: that of the latest record")
    verb.add_argument("--engine", metavar="NAME", help="the latest run in which this engine took part")
    verb.add_argument("--full", action="store_true", help="also ranges, reasons, footnotes and details")
    verb.add_argument(
        "--unknowns", action="store_true",
        help="compute what the choices that the paper leaves open would move (minutes; needs torch)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError where there are no records."""
    experiment = load(arguments.name)
    if arguments.unknowns:
        _unknowns(experiment.name)
    else:
        folder, whose = folder_of(experiment.name, arguments.results, is_own=arguments.is_own)
        _compare(arguments, experiment, folder, whose)
    return DONE


def _unknowns(name: str) -> None:
    """Raises ValueError for an experiment that computes nothing at the paper's size."""
    from gpipe_bench.experiments.paper import reproduction
    from gpipe_bench.harness.report import reproduced

    if name not in reproduced.SECONDS:
        raise ValueError(
            f"--unknowns: {name} is not computed under other choices; {', '.join(reproduced.SECONDS)} are"
        )
    for model in reproduced.SECONDS[name]:
        say(reproduction.text(name, model) + "\n")


def _compare(arguments: argparse.Namespace, experiment: Experiment, folder: Path, whose: str) -> None:
    problems: list[Problem] = []
    with within(None if arguments.full else SCREEN):
        shown = _shown(folder, experiment, arguments, problems)
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
    if arguments.json:
        warn(*filter(None, [whose]))
        found = [cell.to_data() for cell in comparisons]
        for line in found or _numbers(shown.records):
            print_line(msgspec.json.encode(line))
        return
    again = f"{program()} {shlex.join(arguments.arguments)} --full"
    text = shown.text if arguments.full else screen(shown, again)
    heading = f"{experiment.title}\nprofile {shown.records[-1].profile}, {len(shown.records)} records"
    having = sorted(REFERENCE.glob(f"*/{experiment.name}.jsonl"))
    if having and shown.records[-1].profile == "smoke":
        ours = short_path(having[0].parent)
        heading += f"; ours: {program()} compare {experiment.name} --results {ours}"
    say("\n".join([heading, *([whose] if whose else []), "", text]))
    if problems:
        say(f"\n{left_out(problems, experiment.name)}")


def _shown(folder: Path, experiment: Experiment, arguments: Any, problems: list[Problem]) -> Shown:
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
    records = select_records(records, experiment.revision, profile)
    if not records:
        raise ValueError(_nothing(name, arguments, folder, loaded))
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


# Which records are shown


def folder_of(name: str, results: Path, *, is_own: bool = True) -> tuple[Path, str]:
    """Folder of an experiment's records: the user's `results`, or, where nothing of it is there and no
    folder was asked for, those that come with the project, with a sentence that says so.
    """
    having = [folder for folder in sorted(REFERENCE.glob("*")) if (folder / f"{name}.jsonl").is_file()]
    if not is_own or not having or Store(results).load(name).records:
        return results, ""
    said = f"records that came with the project ({having[0].name}); yours: {program()} run {name}"
    return having[0], said


def engines_of(*records: Record) -> tuple[str, ...]:
    """The engines that took part in any of them: those asked for, without the digests of their files, then
    those that the experiment set beside them.
    """
    names: list[str] = []
    for record in records:
        asked = str(record.options.get("engine") or "").split(",")
        beside = record.details.get("engines")
        names += [name.partition("@")[0] for name in asked] + [*(beside if isinstance(beside, dict) else ())]
    return tuple(dict.fromkeys(filter(None, names)))


def check_engine_is_there(engine: str, records: Iterable[Record]) -> None:
    """ValueError, naming those that took part, unless the engine is one of them."""
    known = engines_of(*records)
    if engine not in known:
        raise ValueError(
            f"--engine {engine}: no record has it{suggestion(engine, known)}; there are: "
            f"{', '.join(known) or 'none'}"
        )

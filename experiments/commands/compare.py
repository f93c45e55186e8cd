"""`compare NAME`: paper | ours | verdict, re-derived from records alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import print_line, say
from gpipe_bench.experiments.registry import load
from gpipe_bench.experiments.report.readings import environment_warnings, readable, shown_of
from gpipe_bench.experiments.report.records import check_engine_is_there, engines_of, select_records
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.replies import replies_markdown
from gpipe_bench.harness.report.table import markdown_table
from gpipe_bench.harness.store import Loaded, Problem, Store, left_out, lines_of
from gpipe_bench.harness.verdict import NO_RECORD, Comparison


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb."""
    experiment = load(arguments.name)
    if arguments.machines and arguments.engine is not None:
        raise ValueError(
            f"--engine {arguments.engine}: machines are set side by side by their latest runs; leave it out"
        )
    if arguments.machines:
        from gpipe_bench.experiments.commands.compare_machines import run as run_machines

        return run_machines(arguments, experiment)
    store = Store(arguments.results)
    loaded = store.load(experiment.name)
    for line in lines_of(loaded.problems):
        print(f"warning: {line}", file=sys.stderr)
    records = select_records(
        _of_engine(loaded.records, experiment, arguments.engine), experiment, arguments.profile
    )
    if not records:
        raise ValueError(_nothing(experiment.name, arguments, loaded))
    groups = {tuple(sorted(record.options.items(), key=str)): record.options for record in records}
    if len(groups) > 1:  # the latest group; the others are named, never mixed in
        last = records[-1].options
        print(
            f"warning: shown are records with {last}; there are others: {list(groups.values())}",
            file=sys.stderr,
        )
        records = [record for record in records if record.options == last]
    shown, unusable = readable(experiment.name, records, lambda usable: shown_of(experiment, usable))
    if shown is None:
        raise ValueError(f"{unusable[0]}; make records anew with: run {experiment.name} --fresh")
    for line in unusable:
        print(f"warning: {line}", file=sys.stderr)
    for warning in environment_warnings(shown.records):
        print(f"warning: {warning}", file=sys.stderr)
    comparisons = _with_reasons(shown.comparisons, loaded.problems)
    if arguments.json:
        for cell in comparisons or _numbers(shown.records):
            print_line(msgspec.json.encode(cell))
    elif arguments.markdown and not comparisons:
        say(f"```text\n{shown.text}\n```")
    elif arguments.markdown:
        answers = replies_markdown(comparisons)
        print("\n\n".join([*([answers] if answers else []), markdown_table(comparisons)]))
    else:
        say(f"profile {shown.records[-1].profile}, {len(shown.records)} records\n")
        say(shown.text)
    if loaded.problems and not arguments.json:
        say(f"\n{left_out(loaded.problems, experiment.name)}")
    return exits.DONE


def _numbers(records: Sequence[Record]) -> Iterator[dict[str, object]]:
    """What was found, a number each, where the paper has none to set it against."""
    for record in records:
        for quantity in record.quantities:
            yield {
                "experiment": record.experiment,
                "profile": record.profile,
                "case": record.case,
                "name": quantity.name,
                "key": quantity.key,
                "value": quantity.value,
                "low": quantity.low,
                "high": quantity.high,
                "unit": quantity.unit,
                "provenance": quantity.provenance,
                "note": quantity.note,
            }


def _of_engine(records: Sequence[Record], experiment: Experiment, engine: str | None) -> Sequence[Record]:
    """The records in which an engine took part; all without one. ValueError where there are none."""
    if engine is None or not records:
        return records
    if not experiment.engines:
        raise ValueError(f"--engine {engine}: {experiment.name} runs no engine; leave the option out")
    check_engine_is_there(engine, records)
    return [record for record in records if engine in engines_of(record)]


def _with_reasons(cells: Sequence[Comparison], problems: Sequence[Problem]) -> Sequence[Comparison]:
    """Where a cell has no record, the lines that can't be read may be the reason."""
    if not problems:
        return cells
    reason = f"{NO_RECORD}, or its line can't be read: {'; '.join(lines_of(problems))}"
    return [replace(cell, reason=reason) if cell.reason == NO_RECORD else cell for cell in cells]


def _nothing(name: str, arguments: argparse.Namespace, loaded: Loaded) -> str:
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
        f"no records of {name}{wanted} in {arguments.results}{besides}; make them with: run {name}{profile}"
    )

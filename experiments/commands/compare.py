"""`compare NAME`: paper | ours | verdict, re-derived from records alone."""

from __future__ import annotations

import argparse
import sys

import msgspec

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import print_line
from gpipe_bench.experiments.registry import load
from gpipe_bench.experiments.report.readable import readable
from gpipe_bench.experiments.report.selection import select_records
from gpipe_bench.experiments.report.show import environment_warnings, shown_of
from gpipe_bench.harness.records.store import Store, lines_of
from gpipe_bench.harness.report.text import markdown_table


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb."""
    experiment = load(arguments.name)
    if arguments.machines:
        from gpipe_bench.experiments.commands.compare_machines import run as run_machines

        return run_machines(arguments, experiment)
    store = Store(arguments.results)
    loaded = store.load(experiment.name)
    for line in lines_of(loaded.problems):
        print(f"warning: {line}", file=sys.stderr)
    records = select_records(loaded.records, experiment, arguments.profile)
    if not records:
        raise ValueError(_nothing(experiment.name, experiment.revision, arguments, loaded.records))
    groups = {tuple(sorted(record.options.items(), key=str)): record.options for record in records}
    if len(groups) > 1:  # the latest group; the others are named, never mixed in
        last = records[-1].options
        print(
            f"warning: shown are records with {last}; there are others: {list(groups.values())}",
            file=sys.stderr,
        )
        records = [record for record in records if record.options == last]
    shown, left_out = readable(experiment.name, records, lambda usable: shown_of(experiment, usable))
    if shown is None:
        raise ValueError(f"{left_out[0]}; make records anew with: run {experiment.name} --fresh")
    for line in left_out:
        print(f"warning: {line}", file=sys.stderr)
    for warning in environment_warnings(shown.records):
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.json:
        for comparison in shown.comparisons:
            print_line(msgspec.json.encode(comparison))
    elif arguments.markdown:
        print(markdown_table(shown.comparisons))
    else:
        print(f"profile {shown.records[-1].profile}, {len(shown.records)} records\n")
        print(shown.text)
    return exits.DONE


def _nothing(name: str, revision: int, arguments: argparse.Namespace, records: tuple) -> str:  # type: ignore[type-arg]
    wanted = f" of profile {arguments.profile}" if arguments.profile else ""
    profile = f" --profile {arguments.profile}" if arguments.profile else ""
    older = f" (there are {len(records)} of other profiles or an earlier revision)" if records else ""
    return f"no records of {name}{wanted} in {arguments.results}{older}; make them with: run {name}{profile}"

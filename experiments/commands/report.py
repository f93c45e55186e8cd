"""`report`: the scorecard of everything on record, as one HTML page and one markdown file.

Reads records and draws; needs neither torch nor a device.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpipe_bench.experiments.commands import exits
from gpipe_bench.experiments.commands.output import print_line
from gpipe_bench.experiments.report.figures import Picture, pictures_of
from gpipe_bench.experiments.report.readable import readable, show_all
from gpipe_bench.experiments.report.records import Source, answers, folders, load_all, sources
from gpipe_bench.experiments.report.show import comparisons_of, text_of
from gpipe_bench.experiments.report.tables import table_infos
from gpipe_bench.experiments.report.timelines import charts_of
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.judging.machines import SideBySide, side_by_side
from gpipe_bench.harness.judging.paper import load_paper
from gpipe_bench.harness.records.files import write_whole
from gpipe_bench.harness.records.record import Record
from gpipe_bench.harness.records.store import lines_of
from gpipe_bench.harness.report.page import table_views, totals
from gpipe_bench.harness.report.render import ExperimentView, Machine, Page, environment_facts, html, markdown
from gpipe_bench.harness.report.summary import summary

HTML, MARKDOWN = "report.html", "report.md"
COMMAND = "nox -s report"


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb."""
    page = build(arguments.results, figures=not (arguments.no_figures or arguments.json))
    for warning in page.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.json:
        for table in page.tables:
            for row in (*table.rows, *table.settings):
                machine = row.answer.machine if row.answer is not None and row.answer.answers else None
                line = {**msgspec.to_builtins(row.comparison), "kind": row.kind, "machine": machine,
                        "at_half": row.narrow, "at_twice": row.wide}  # fmt: skip
                print_line(msgspec.json.encode(line))
        return exits.DONE
    folder = arguments.output or arguments.results
    print(f"{page.counts}\n")
    for name, text in ((HTML, html(page)), (MARKDOWN, markdown(page))):
        write(folder / name, text)
        print(f"report: {_short(folder / name)}")
    return exits.DONE


def build(results: Path, *, figures: bool = True) -> Page:
    """The whole report as data, from the records in `results` and the committed reference records."""
    experiments, warnings = load_all()
    places = folders(results)
    paper = load_paper()
    found: dict[str, list[Source]] = {}
    for experiment in experiments:
        groups, problems = sources(experiment, places)
        found[experiment.name], left_out = _usable(experiment, groups)
        warnings += lines_of(problems) + left_out
    chosen: dict[tuple[str, str, str], object] = {}
    given = []
    for experiment in experiments:
        for answer in answers(experiment, found[experiment.name]):
            key = (answer.ours.table, answer.ours.row, answer.ours.column)
            if chosen.setdefault(key, answer) is answer:  # a cell belongs to the first that reports it
                given.append(answer)
    profiles = {name: {source.profile for source in groups} for name, groups in found.items()}
    tables = table_views(given, paper, table_infos(experiments, profiles))
    shown = {name: _shown(groups) for name, groups in found.items()}
    pictures: list[Picture] = []
    if figures:
        pictures, failed = pictures_of([(e, s) for e in experiments for s in shown[e.name][:1]])
        warnings += failed
    narrow, counts, wide = totals(tables)
    return Page(
        tables=tables,
        narrow=narrow,
        counts=counts,
        wide=wide,
        summary=summary(tables, paper),
        experiments=tuple(
            _view(experiment, shown[experiment.name], pictures)
            for experiment in experiments
            if shown[experiment.name]
        ),
        machines=tuple(_machine(name, folder, found, own=n == 0) for n, (name, folder) in enumerate(places)),
        side=_side(experiments, shown),
        warnings=tuple(warnings),
        command=COMMAND,
    )


def write(path: Path, text: str) -> None:
    """Replaces the file as a whole: a reader never sees half a page. Raises ValueError if it can't."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise ValueError(
            f"can't write {path}: {error.strerror or error}; choose another folder with --output"
        ) from error


def _usable(experiment: Experiment, groups: Sequence[Source]) -> tuple[list[Source], list[str]]:
    """The groups without records that can't be shown, and lines about those; they must not cost the page."""
    usable: list[Source] = []
    lines: list[str] = []
    for group in groups:

        def use(experiment: Experiment, records: Sequence[Record], group: Source = group) -> None:
            show_all(experiment, records)
            charts_of(experiment, dataclasses.replace(group, records=tuple(records)))

        records, left_out = readable(experiment, group.records, use)
        lines += [f"{_short(group.folder)}: {line}" for line in left_out]
        if records:
            usable.append(dataclasses.replace(group, records=tuple(records)))
    return usable, lines


def _shown(groups: Sequence[Source]) -> list[Source]:
    """One group for each machine, the one its numbers are taken from."""
    first: dict[str, Source] = {}
    for source in groups:
        first.setdefault(source.machine, source)
    return list(first.values())


def _view(experiment: Experiment, groups: Sequence[Source], pictures: Sequence[Picture]) -> ExperimentView:
    first = groups[0]
    charts = charts_of(experiment, first)
    comparisons = comparisons_of(experiment, first.records)
    return ExperimentView(
        name=experiment.name,
        title=experiment.title,
        source=experiment.source,
        describe=experiment.describe,
        runs=tuple(
            (source.machine, source.profile, experiment.profiles.get(source.profile, ""), _statuses(source))
            for source in groups
        ),
        text=text_of(experiment, first.records, comparisons),
        pictures=tuple(
            picture
            for picture in pictures
            if picture.experiment == experiment.name and not (charts and picture.of_timelines)
        ),
        charts=tuple(chart for chart in charts if chart.boxes),
        traces=tuple(chart for chart in charts if not chart.boxes),
    )


def _statuses(source: Source) -> str:
    counts = Counter(record.status for record in source.records)
    return ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.items())


def _machine(name: str, folder: Path, found: dict[str, list[Source]], *, own: bool) -> Machine:
    records = [r for groups in found.values() for s in groups if s.folder == folder for r in s.records]
    return Machine(
        name=name,
        own=own,
        place=_short(folder),
        records=len(records),
        facts=environment_facts([record.environment for record in records]),
    )


def _side(experiments: Sequence[Experiment], shown: dict[str, list[Source]]) -> SideBySide | None:
    """All experiments that at least two machines have records of, in one table."""
    compared: dict[str, list] = {}  # type: ignore[type-arg]
    environments: dict[str, list] = {}  # type: ignore[type-arg]
    for experiment in experiments:
        if len(shown[experiment.name]) < 2:
            continue
        for source in shown[experiment.name]:
            compared.setdefault(source.machine, []).extend(comparisons_of(experiment, source.records))
            environments.setdefault(source.machine, []).extend(r.environment for r in source.records)
    return side_by_side(compared, environments) if len(compared) > 1 else None


def _short(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)

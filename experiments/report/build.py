"""Everything on record as one page of data: the first screen, tables, figures, charts and machines.

The verb `report` writes it as files, and the README takes its first screen from the same data. That screen is
about the paper and comes from the committed records alone: a number of one's own changes nothing of it.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpipe_bench.experiments.report.facts import facts_of
from gpipe_bench.experiments.report.figures import FAILURES, Picture, pictures_of
from gpipe_bench.experiments.report.readings import Reading, answers, readings
from gpipe_bench.experiments.report.records import check_engine_is_there, folders, load_all, sources
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.places import PUBLISHED, REFERENCE, short_path
from gpipe_bench.harness.report.page import ExperimentView, Machine, Page, TableInfo, page_of
from gpipe_bench.harness.report.side import SideBySide, environment_facts, side_by_side
from gpipe_bench.harness.report.table import Row
from gpipe_bench.harness.store import lines_of
from gpipe_bench.harness.verdict import Comparison

COMMAND = "nox -s report"
NOT_TO_BE_RUN = PUBLISHED / "tables.toml"
"""The published tables that no experiment answers, in words and with the reason.

A cell that nobody ran must say why; "not run" alone would look like an oversight where the reason is a
thousand TPU hours.
"""


def build(
    results: Path,
    *,
    figures: bool = True,
    others: Sequence[tuple[str, Path]] = (),
    engine: str | None = None,
) -> Page:
    """The whole report as data, from the records in `results`, the committed reference records and `others`,
    which are names of machines and folders. Where the `engine` took part, its runs come first; ValueError
    where it is in no record.
    """
    experiments, warnings = load_all()
    places = folders(results)
    for name, folder in others:
        while name in dict(places):
            name += " (another)"
        places.append((name, folder))
    found: dict[str, list[Reading]] = {}
    for experiment in experiments:
        groups, problems = sources(experiment, places, engine)
        found[experiment.name], left_out = readings(experiment, groups)
        warnings += lines_of(problems) + [f"{short_path(group.folder)}: {line}" for group, line in left_out]
    every = [reading for several in found.values() for reading in several]
    if engine is not None:
        check_engine_is_there(engine, [reading.source for reading in every])
    committed = {
        name: [each for each in several if each.source.folder.resolve().parent == REFERENCE.resolve()]
        for name, several in found.items()
    }
    shown = {name: _of_each_machine(several) for name, several in found.items()}
    views = []
    for experiment in experiments:
        if not found[experiment.name]:
            continue
        pictures: list[Picture] = []
        try:
            if figures:
                pictures = pictures_of(experiment, found[experiment.name][0].source)
        except FAILURES as error:
            text = f"{type(error).__name__}: {error}"
            warnings.append(f"the figures of {experiment.name} can't be drawn: {text}")
        views.append(_view(experiment, found[experiment.name], shown[experiment.name], pictures))
    profiles = {name: {each.source.profile for each in several} for name, several in found.items()}
    recorded = {
        name: [record for each in several for record in each.source.records]
        for name, several in committed.items()
    }
    page = page_of(
        _first_of_each(found),
        load_paper(),
        table_infos(experiments, profiles),
        facts_of(recorded),
        _first_of_each(committed),
    )
    return replace(
        page,
        experiments=tuple(views),
        machines=tuple(_machine(name, folder, every, own=n == 0) for n, (name, folder) in enumerate(places)),
        side=_side(shown),
        warnings=tuple(warnings),
        command=COMMAND,
    )


def table_infos(experiments: Sequence[Experiment], profiles: Mapping[str, set[str]]) -> dict[str, TableInfo]:
    """The published tables in words, with the reason for cells that no record answers: in the order
    of the experiments, then those that none answers.

    `profiles` are those that each experiment has records of.
    """
    infos = {}
    for experiment in experiments:
        having = profiles.get(experiment.name, set())
        missing = f"the records of {experiment.name} do not report this number"
        if not having:
            missing = f"there is no record yet; `nox -s {experiment.name}` makes one"
        elif having == {"smoke"}:
            missing = f"only a smoke run is on record; `nox -s {experiment.name}` makes this number"
        for name, table in experiment.paper_tables.items():
            infos[name] = TableInfo(
                title=table.title, short=table.short, about=table.about, experiment=experiment.name,
                missing=missing,
            )  # fmt: skip
    others = tomllib.loads(NOT_TO_BE_RUN.read_text(encoding="utf-8"))
    return infos | {name: TableInfo(**words) for name, words in others.items()}


def _first_of_each(found: Mapping[str, Sequence[Reading]]) -> list[Row]:
    """An answer for each entry, of the first experiment that reports it."""
    given: dict[tuple[str, ...], Row] = {}
    for several in found.values():
        for row in answers(several):
            given.setdefault(row.comparison.key, row)
    return list(given.values())


def _of_each_machine(several: Sequence[Reading]) -> list[Reading]:
    """One reading for each machine, the one its numbers are taken from."""
    first: dict[str, Reading] = {}
    for reading in several:
        first.setdefault(reading.source.machine, reading)
    return list(first.values())


def _view(
    experiment: Experiment, several: Sequence[Reading], shown: Sequence[Reading], pictures: Sequence[Picture]
) -> ExperimentView:
    """What the first reading says, and how all the machines' records were made."""
    first = several[0]
    # the same machine's other runs of that profile had other engines
    place = (first.source.folder, first.source.profile)
    beside = [each for each in several if (each.source.folder, each.source.profile) == place]
    texts = [each.shown.own for each in beside]
    if len(beside) > 1:
        engines = [each.source.records[-1].options.get("engine") for each in beside]
        texts = [f"--engine {engine}\n\n{text}" for engine, text in zip(engines, texts, strict=True)]
    return ExperimentView(
        name=experiment.name,
        title=experiment.title,
        source=experiment.source,
        describe=experiment.describe,
        runs=tuple(
            (
                each.source.machine,
                each.source.profile,
                experiment.profiles.get(each.source.profile, ""),
                ", ".join(
                    f"{count} {status.replace('_', ' ')}"
                    for status, count in Counter(record.status for record in each.source.records).items()
                ),
            )
            for each in shown
        ),
        text="\n\n".join(texts),
        pictures=tuple(picture for picture in pictures if not (first.charts and picture.plot.of_timelines)),
        charts=tuple(chart for chart in first.charts if chart.boxes),
        traces=tuple(chart for chart in first.charts if not chart.boxes),
    )


def _machine(name: str, folder: Path, every: Sequence[Reading], *, own: bool) -> Machine:
    records = [r for reading in every if reading.source.folder == folder for r in reading.source.records]
    return Machine(
        name=name,
        own=own,
        place=short_path(folder),
        records=len(records),
        facts=environment_facts([record.environment for record in records]),
    )


def _side(shown: Mapping[str, Sequence[Reading]]) -> SideBySide | None:
    """All experiments that at least two machines have records of, in one table."""
    compared: dict[str, list[Comparison]] = {}
    environments: dict[str, list[Mapping[str, Any]]] = {}
    for each in (reading for several in shown.values() if len(several) > 1 for reading in several):
        compared.setdefault(each.source.machine, []).extend(each.shown.comparisons)
        environments.setdefault(each.source.machine, []).extend(r.environment for r in each.source.records)
    return side_by_side(compared, environments) if len(compared) > 1 else None

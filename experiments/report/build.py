"""Everything on record as one page of data: the tables, both answers, figures, charts and machines.

The verb `report` writes it as files, and the README takes its two answers from the same data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpipe_bench.experiments.report.figures import Picture, pictures_of
from gpipe_bench.experiments.report.readings import Reading, answers, readings
from gpipe_bench.experiments.report.records import check_engine_is_there, folders, load_all, sources
from gpipe_bench.experiments.report.tables import table_infos
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.page import Answer, table_views
from gpipe_bench.harness.report.render import ExperimentView, Machine, Page, environment_facts
from gpipe_bench.harness.report.side import SideBySide, side_by_side
from gpipe_bench.harness.report.summary import summary
from gpipe_bench.harness.store import lines_of
from gpipe_bench.harness.verdict import Comparison

COMMAND = "nox -s report"


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
    known = {name for name, _ in places}
    for name, folder in others:
        while name in known:
            name += " (another)"
        known.add(name)
        places.append((name, folder))
    paper = load_paper()
    found: dict[str, list[Reading]] = {}
    for experiment in experiments:
        groups, problems = sources(experiment, places, engine)
        found[experiment.name], left_out = readings(experiment, groups)
        warnings += lines_of(problems) + [f"{short_path(group.folder)}: {line}" for group, line in left_out]
    if engine is not None:
        check_engine_is_there(engine, [each.source for several in found.values() for each in several])
    given: dict[tuple[str, str, str, str, str], Answer] = {}
    for experiment in experiments:
        for answer in answers(found[experiment.name]):
            given.setdefault(answer.entry.key, answer)  # an entry belongs to the first that reports it
    profiles = {name: {each.source.profile for each in several} for name, several in found.items()}
    tables = table_views(list(given.values()), paper, table_infos(experiments, profiles))
    shown = {name: _shown(several) for name, several in found.items()}
    pictures: list[Picture] = []
    if figures:
        drawing = [(e, reading.source) for e in experiments for reading in shown[e.name][:1]]
        pictures, failed = pictures_of(drawing)
        warnings += failed
    return Page(
        tables=tables,
        summary=summary(tables, paper),
        experiments=tuple(
            _view(experiment, shown[experiment.name], pictures, _text(found[experiment.name]))
            for experiment in experiments
            if shown[experiment.name]
        ),
        machines=tuple(_machine(name, folder, found, own=n == 0) for n, (name, folder) in enumerate(places)),
        side=_side(experiments, shown),
        warnings=tuple(warnings),
        command=COMMAND,
    )


def _shown(several: Sequence[Reading]) -> list[Reading]:
    """One reading for each machine, the one its numbers are taken from."""
    first: dict[str, Reading] = {}
    for reading in several:
        first.setdefault(reading.source.machine, reading)
    return list(first.values())


def _text(several: Sequence[Reading]) -> str:
    """What the first reading says, and what the same machine's other runs of that profile say, which had
    other engines.
    """
    first = several[0].source if several else None
    beside = [
        each for each in several
        if first is not None and (each.source.folder, each.source.profile) == (first.folder, first.profile)
    ]  # fmt: skip
    if len(beside) < 2:
        return several[0].shown.text if several else ""
    return "\n\n".join(
        f"--engine {each.source.records[-1].options.get('engine')}\n\n{each.shown.text}" for each in beside
    )


def _view(
    experiment: Experiment, several: Sequence[Reading], pictures: Sequence[Picture], text: str
) -> ExperimentView:
    charts = several[0].charts
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
                _statuses(each.source.records),
            )
            for each in several
        ),
        text=text,
        pictures=tuple(
            picture
            for picture in pictures
            if picture.experiment == experiment.name and not (charts and picture.of_timelines)
        ),
        charts=tuple(chart for chart in charts if chart.boxes),
        traces=tuple(chart for chart in charts if not chart.boxes),
    )


def _statuses(records: Sequence[Record]) -> str:
    counts = Counter(record.status for record in records)
    return ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.items())


def _machine(name: str, folder: Path, found: dict[str, list[Reading]], *, own: bool) -> Machine:
    sources = [each.source for several in found.values() for each in several]
    records = [record for source in sources if source.folder == folder for record in source.records]
    return Machine(
        name=name,
        own=own,
        place=short_path(folder),
        records=len(records),
        facts=environment_facts([record.environment for record in records]),
    )


def _side(experiments: Sequence[Experiment], shown: dict[str, list[Reading]]) -> SideBySide | None:
    """All experiments that at least two machines have records of, in one table."""
    compared: dict[str, list[Comparison]] = {}
    environments: dict[str, list[Mapping[str, Any]]] = {}
    for experiment in experiments:
        if len(shown[experiment.name]) < 2:
            continue
        for each in shown[experiment.name]:
            machine = each.source.machine
            compared.setdefault(machine, []).extend(each.shown.comparisons)
            environments.setdefault(machine, []).extend(r.environment for r in each.source.records)
    return side_by_side(compared, environments) if len(compared) > 1 else None


def short_path(path: Path) -> str:
    """As seen from here, where it lies below."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)

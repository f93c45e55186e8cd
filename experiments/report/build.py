"""Everything on record as one page of data: the first screen, tables, figures and machines.

Each group of records that belong together is turned into cells by itself, and a cell takes its number from
the first group that has one. Your own records come first and the committed reference records fill in what you
did not run; a smoke run, which only proves that the path works, comes last. Judging and laying out text
happen as the records are read, where an experiment may still stumble over them; everything behind it only
picks and places what is read.

The verb `report` writes it as files, and the README takes its first screen from the same data. That screen is
about the paper and comes from the committed records alone: a number of one's own changes nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from gpipe_bench.experiments.paper.consistency.judging import exact
from gpipe_bench.experiments.paper.consistency.tables import beyond_the_margin, spreads
from gpipe_bench.experiments.registry import EXPERIMENTS, PROFILES, load
from gpipe_bench.experiments.report.figures import FAILURES, Picture, pictures_of
from gpipe_bench.experiments.report.readings import judged, readable
from gpipe_bench.harness import REFERENCE, short_path
from gpipe_bench.harness.environment import environment_facts
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.paper import PaperTable, load_paper, load_tables
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.report.page import ExperimentView, Machine, Page, page_of
from gpipe_bench.harness.reproduction import summed
from gpipe_bench.harness.store import Problem, Store, latest, lines_of
from gpipe_bench.harness.verdict import Comparison, Result

COMMAND = "nox -s report"
FIGURE = "table2", "table2-throughput-fitted"
"""The first screen's figure: an experiment, and its plot."""


def build(results: Path, *, figures: bool = True) -> Page:
    """The whole report as data, from the records in `results`, a folder or a file, and the committed ones."""
    experiments: list[Experiment] = []
    warnings: list[str] = []
    for name in EXPERIMENTS:
        try:
            experiments.append(load(name))
        except ImportError as error:  # one experiment that lacks a package must not cost the whole page
            warnings.append(f"{name} can't be loaded: {error}")
    places = folders(results)
    found: dict[str, list[Reading]] = {}
    for experiment in experiments:
        groups, problems = sources(experiment, places)
        found[experiment.name], left_out = readings(experiment, groups)
        warnings += lines_of(problems) + [f"{short_path(group.folder)}: {line}" for group, line in left_out]
    every = [reading for several in found.values() for reading in several]
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
        first = found[experiment.name][0].source
        try:
            if figures:
                own = first.own and first.folder.is_dir()
                pictures = pictures_of(experiment, first.records, first.folder, first.machine, own=own)
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
        summaries_of(recorded),
    )
    return replace(
        page,
        figure=_first_picture(committed) if figures else None,
        experiments=tuple(views),
        machines=tuple(_machine(name, folder, every, own=n == 0) for n, (name, folder) in enumerate(places)),
        warnings=tuple(warnings),
        command=COMMAND,
    )


def table_infos(experiments: Sequence[Experiment], profiles: Mapping[str, set[str]]) -> dict[str, PaperTable]:
    """The published tables in words, with the reason for cells that no record answers: a cell that nobody
    ran must say why; "not run" alone would look like an oversight where the reason is a thousand TPU hours.

    `profiles` are those that each experiment has records of.
    """
    infos = dict(load_tables())
    for experiment in experiments:
        having = profiles.get(experiment.name, set())
        missing = f"the records of {experiment.name} do not report this number"
        if not having:
            missing = f"there is no record yet; `nox -s {experiment.name}` makes one"
        elif having == {"smoke"}:
            missing = f"only a smoke run is on record; `nox -s {experiment.name}` makes this number"
        for name in experiment.paper_tables:
            words = infos.get(name) or PaperTable(title=name, short=name, about="")
            infos[name] = msgspec.structs.replace(words, experiment=experiment.name, missing=missing)
    return infos


def _first_of_each(found: Mapping[str, Sequence[Reading]]) -> list[Comparison]:
    """An answer for each entry, of the first experiment that reports it."""
    given: dict[tuple[str, ...], Comparison] = {}
    for several in found.values():
        for cell in answers(several):
            given.setdefault(cell.key, cell)
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
    """View of the first reading's results, and of how all machines' records were made."""
    first = several[0]
    # the same machine's other runs of that profile had other engines
    place = (first.source.folder, first.source.profile)
    beside = [each for each in several if (each.source.folder, each.source.profile) == place]
    texts = [each.text for each in beside]
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
        pictures=tuple(pictures),
    )


def _first_picture(committed: Mapping[str, Sequence[Reading]]) -> Picture | None:
    """The picture of the first screen, of the committed records; None where it can't be drawn."""
    name, figure = FIGURE
    for reading in committed.get(name, ())[:1]:
        source = reading.source
        place = (source.records, source.folder, source.machine)
        try:
            found = pictures_of(load(name), *place, own=source.own, only=figure)
        except FAILURES:
            return None
        return found[0] if found else None
    return None


def _machine(name: str, folder: Path, every: Sequence[Reading], *, own: bool) -> Machine:
    records = [r for reading in every if reading.source.folder == folder for r in reading.source.records]
    return Machine(
        name=name,
        own=own,
        place=short_path(folder),
        records=len(records),
        facts=environment_facts([record.environment for record in records]),
    )


# Records that belong together, and what they come to


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Records of one experiment that belong together: one folder, profile and set of options."""

    machine: str
    folder: Path
    profile: str
    records: tuple[Record, ...]
    own: bool  # from the results folder that was asked for, not a reference


def folders(results: Path) -> list[tuple[str, Path]]:
    """(name, folder) of the results asked for, then of every reference machine."""
    own = results.stem if results.is_file() else results.name or str(results)
    if (REFERENCE / own).is_dir() and (REFERENCE / own).resolve() != results.resolve():
        own += " (yours)"
    there = sorted(REFERENCE.iterdir()) if REFERENCE.is_dir() else []
    others = [path for path in there if path.is_dir() and path.resolve() != results.resolve()]
    return [(own, results), *((folder.name, folder) for folder in others)]


def sources(experiment: Experiment, places: Iterable[tuple[str, Path]]) -> tuple[list[Source], list[Problem]]:
    """The groups of records of an experiment, in the order in which they are asked, and unreadable lines.

    The first of `places` is the user's own.
    """
    found: list[Source] = []
    problems: list[Problem] = []
    for place, (machine, folder) in enumerate(places):
        loaded = Store(folder).load(experiment.name)
        problems += loaded.problems
        groups: dict[tuple[str, str], list[Record]] = {}
        current = [record for record in loaded.records if record.revision == experiment.revision]
        for record in latest(current).values():
            groups.setdefault((record.profile, repr(sorted(record.options.items()))), []).append(record)
        found += [
            Source(machine, folder, profile, tuple(records), place == 0)
            for (profile, _), records in groups.items()
        ]

    def order(source: Source) -> tuple[object, ...]:
        used = source.records[-1].options.get("engine")
        usual = used is None or not experiment.engines or used == experiment.engines[0]
        profile = -PROFILES.index(source.profile) if source.profile in PROFILES else 1  # full, short, smoke
        return (
            source.profile == "smoke", not usual, not source.own, profile, -len(source.records),
            source.machine,
        )  # fmt: skip

    return sorted(found, key=order), problems


@dataclass(frozen=True, slots=True)
class Reading:
    """One source, without the records that can't be read, and all that follows from the others."""

    source: Source
    entries: tuple[Result, ...]
    comparisons: tuple[Comparison, ...]
    text: str  # without the paper's numbers


def readings(
    experiment: Experiment, groups: Sequence[Source]
) -> tuple[list[Reading], list[tuple[Source, str]]]:
    """The readings of the groups, and lines about records that can't be shown, with the group of each."""
    found: list[Reading] = []
    lines: list[tuple[Source, str]] = []
    for group in groups:

        def read(records: Sequence[Record], group: Source = group) -> Reading:
            entries, comparisons = judged(experiment, records)
            text = "" if experiment.tables is None else experiment.tables(records)
            source = replace(group, records=tuple(records))
            return Reading(source, tuple(entries), tuple(comparisons), text)

        reading, left_out = readable(experiment.name, group.records, read)
        lines += [(group, line) for line in left_out]
        found += [] if reading is None else [reading]
    return found, lines


def answers(found: Sequence[Reading]) -> list[Comparison]:
    """One comparison for each entry of any reading, from the first reading that has a number."""
    chosen: dict[tuple[str, ...], Comparison] = {}
    for reading in found:
        source, compared = reading.source, {cell.key: cell for cell in reading.comparisons}
        for entry in reading.entries:
            cell = compared[entry.key]
            if cell.ours is not None or entry.status == "out_of_memory":
                command = (entry.record or source.records[-1]).command
                cell = replace(cell, machine=source.machine, profile=source.profile, command=command)
            if entry.key not in chosen or (cell.machine and not chosen[entry.key].machine):
                chosen[entry.key] = cell
    return list(chosen.values())


# Facts that no comparison holds: sums over computed tables, same seeds, the schedule's formula, hardware

RECOMPUTED = 3, 4
"""Slots of F, R and B, of which the recomputation of the last stages starts while they would wait: a bubble
has F and B alone, and a micro-batch all of them (`table2-bound` of results/paper.csv)."""


def speed(num_stages: int, num_microbatches: int) -> float:
    """Speed of even stages over one device, with F : R : B = 1 : 1 : 2, a free link, early recomputation."""
    idle, work = RECOMPUTED
    return num_microbatches * num_stages * work / (work * num_microbatches + idle * (num_stages - 1))


def idle_share(num_stages: int, num_microbatches: int) -> float:
    """The share of their time that such stages wait."""
    return 1 - speed(num_stages, num_microbatches) / num_stages


def summaries_of(records: Mapping[str, Sequence[Record]]) -> list[tuple[str, ...]]:
    """For each table of the paper, the four numbers that sum up what was computed of it, and a baseline."""
    lines = []
    for name in reproduced.SECONDS:
        of_tables = reproduced.cells(records.get(name, ()))
        for (table, unit), (cells, fixed) in of_tables.items():
            several = sum(other == table for other, _ in of_tables) > 1
            rows = {f"{table}, {unit}" if several else table: cells}
            rows[f"{table}, by the bubble's formula alone"] = reproduced.by_the_bubble(cells, fixed)
            for label, of in rows.items():
                found = summed(of, fixed)
                lines += [
                    (
                        label,
                        *(f"{found.counts[each]}" for each in ("agrees", "differs", "no test")),
                        "-" if found.off is None else f"{100 * found.off:.0f} %",
                        "-" if found.rank is None else f"{found.rank:.2f}",
                        f"{found.directions} of {found.pairs}" if found.pairs else "-",
                    )
                ] * bool(of)
    return lines


def facts_of(records: Mapping[str, Sequence[Record]]) -> dict[str, str]:
    """Facts in words, by name; those whose records are missing are left out.

    Args:
        records: by experiment, finished or not
    """
    found = {
        "even_speed_up": f"{speed(8, 32) / speed(2, 32):.2f}",
        "even_idle": f"{100 * idle_share(2, 8):.1f} to {100 * idle_share(8, 32):.1f} %",
    }
    answers = [
        cell.answer
        for name in reproduced.SECONDS
        for cells, _ in reproduced.cells(records.get(name, ())).values()
        for cell in cells
    ]
    if answers:
        known = reproduced.errors()
        found |= {f"computed.{each}": f"{answers.count(each)}" for each in ("agrees", "differs", "no test")}
        found["computed.tested"] = f"{len(answers) - answers.count('no test')}"
        found["error.ratios"] = f"{100 * known['ratios of speeds'].error:.0f} %"
        found["error.bytes"] = f"{100 * known['bytes'].error:.0f} %"
    trained = records.get("consistency", ())
    same = of_case(trained, "done", part="same seed")
    if same:
        spread = spreads(trained, "images")
        widest = max(spread, key=spread.__getitem__, default=0)
        unsure = beyond_the_margin(trained, "images")
        found |= {
            "same_runs": f"{sum(exact(record) == 'identical' for record in same)} of {len(same)}",
            "own_runs": f"{len(of_case(trained, 'done', part='own seeds'))}",
            "unsure": " and ".join(map(str, unsure)) or "none",
            "widest": f"K = {widest}", "widest.times": f"{spread.get(widest, 0):.1f}",
        }  # fmt: skip
    environments = [
        record.environment
        for several in records.values()
        for record in several
        if any(metric.provenance != "modelled" for metric in record.metrics)
    ]
    if environments:
        found["cores"] = _cores(environments)
    return found


def _cores(environments: Sequence[Mapping[str, object]]) -> str:
    """Machines that timed or trained anything, in words."""
    cores = sorted({int(str(each.get("cores_logical") or 0)) for each in environments})
    gpus = any(each.get("gpus") for each in environments)
    counts = " or ".join(map(str, cores))
    return f"{counts} processor cores, {'and some of it on GPUs' if gpus else 'nothing on a GPU or TPU'}"

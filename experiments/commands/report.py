"""`report`: the scorecard of everything on record, as one HTML page and one CSV file.

Needs neither torch nor a device. Each group of records that belong together is turned into cells by itself,
and a cell takes its number from the first group that has one: your own records come first, the committed ones
fill in what you did not run, and a smoke run comes last. The first screen, which README shows, too, is made
from the committed records alone.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from gpipe_bench.experiments.commands.output import DONE, print_line, warn
from gpipe_bench.experiments.drawing import Picture, pictures_of
from gpipe_bench.experiments.paper.consistency_judging import exact
from gpipe_bench.experiments.paper.table1_shown import table as table1
from gpipe_bench.experiments.registry import EXPERIMENTS, PROFILES, load
from gpipe_bench.harness import PUBLISHED, REFERENCE, ROOT, short_path
from gpipe_bench.harness.environment import environment_facts
from gpipe_bench.harness.experiment import Experiment, RunOptions
from gpipe_bench.harness.paper import PaperTable, load_paper, load_tables, percent
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.report.page import (
    MARKS,
    ExperimentView,
    Machine,
    Page,
    cells_csv,
    first_screen,
    html,
    table_views,
)
from gpipe_bench.harness.report.table import MEANINGS, judged, readable
from gpipe_bench.harness.store import Store, latest, lines_of, write_whole
from gpipe_bench.harness.verdict import Comparison

FIGURE = "table2", "table2-throughput-fitted"
"""The first screen's figure: an experiment, and its plot."""
HTML, CELLS = "report.html", "cells.csv"


def options(verb: argparse.ArgumentParser) -> None:
    """Adds the verb's options to its parser."""
    verb.add_argument("--output", type=Path, metavar="DIR", help="default: the folder of the records")
    verb.add_argument("--no-figures", action="store_true", help="numbers only")


def run(arguments: argparse.Namespace) -> int:
    """Exit status of the verb. Raises ValueError where the files can't be written."""
    results = arguments.results
    page = build(results, figures=not (arguments.no_figures or arguments.json))
    warn(*page.warnings)
    if arguments.json:
        for table in page.tables:
            for cell in table.rows:
                more = {"machine": cell.machine or None}
                print_line(msgspec.json.encode(cell.to_data() | more))
        return DONE
    folder = arguments.output or (results.parent if results.is_file() else results)
    print(page.first.text(), end="\n\n")
    files = ((HTML, html(page)), (CELLS, cells_csv(page.tables)))
    for name, text in files:
        try:
            write_whole(folder / name, text)  # a reader never sees half a page
        except OSError as error:
            cause = f"{folder / name}: {error.strerror or error}"
            raise ValueError(f"can't write {cause}; choose another folder with --output") from error
        print(f"report: {short_path(folder / name)}")
    return DONE


# Everything on record as one page of data


def build(results: Path, *, figures: bool = True) -> Page:
    """The whole report as data, from the records in `results`, a folder or a file, and the committed ones."""
    experiments: dict[str, Experiment] = {}
    warnings: list[str] = []
    for name in EXPERIMENTS:
        try:
            experiments[name] = load(name)
        except ImportError as error:  # one experiment that lacks a package must not cost the whole page
            warnings.append(f"{name} can't be loaded: {error}")
    places = folders(results)
    found: dict[str, list[Reading]] = {}
    for name, experiment in experiments.items():
        found[name], left_out = readings(experiment, places)
        warnings += left_out
    committed = {
        name: [each for each in several if each.folder.resolve().parent == REFERENCE.resolve()]
        for name, several in found.items()
    }
    views = []
    for name, several in found.items():
        if several:
            pictures, why = _pictures(experiments[name], several[0]) if figures else ([], "")
            warnings += [f"figures: {why}"] * bool(why)
            views.append(_view(experiments[name], several, pictures))
    recorded = {
        name: [record for each in several for record in each.records] for name, several in committed.items()
    }
    profiles = {name: {each.profile for each in several} for name, several in found.items()}
    infos = table_infos([*experiments.values()], profiles)
    tables = table_views(_first_of_each(found), load_paper(), infos)
    shown = committed.get(FIGURE[0], []) if figures else []
    first_pictures = _pictures(experiments[FIGURE[0]], shown[0])[0] if shown else []
    not_run = [row for table in tables for row in table.rows if row.verdict == "not run"]
    return Page(
        tables=tables,
        first=first_screen([*_first_of_each(committed), *not_run], facts_of(recorded)),
        summaries=summaries_of(recorded),
        figure=next((each for each in first_pictures if each.plot.name == FIGURE[1]), None),
        experiments=tuple(views),
        machines=tuple(
            _machine(name, folder, [*found.values()], own=number == 0)
            for number, (name, folder) in enumerate(places)
        ),
        warnings=tuple(warnings),
    )


def table_infos(experiments: Sequence[Experiment], profiles: Mapping[str, set[str]]) -> dict[str, PaperTable]:
    """The published tables in words, with the reason for cells that no record answers. `profiles` are those
    that each experiment has records of.
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


def _view(experiment: Experiment, several: Sequence[Reading], pictures: Sequence[Picture]) -> ExperimentView:
    """View of the first reading's results, and of how each machine's records were made."""
    first, of_machine = several[0], dict[str, Reading]()
    for each in several:
        of_machine.setdefault(each.machine, each)
    # the same machine's other runs of that profile had other engines
    beside = [each for each in several if (each.folder, each.profile) == (first.folder, first.profile)]
    texts = [each.text for each in beside]
    if len(beside) > 1:
        engines = [each.records[-1].options.get("engine") for each in beside]
        texts = [f"--engine {engine}\n\n{text}" for engine, text in zip(engines, texts, strict=True)]
    return ExperimentView(
        experiment=experiment,
        runs=tuple(
            (machine, each.profile, experiment.profiles.get(each.profile, ""), _statuses(each.records))
            for machine, each in of_machine.items()
        ),
        text="\n\n".join(texts),
        pictures=tuple(pictures),
    )


def _statuses(records: Sequence[Record]) -> str:
    """`5 done, 1 out of memory`"""
    counts = Counter(record.status for record in records)
    return ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.items())


def _pictures(experiment: Experiment, found: Reading) -> tuple[list[Picture], str]:
    """The pictures of a reading; where they can't be drawn none, and why."""
    folder = found.folder / "figures"
    pictures, why = readable(
        experiment.name, lambda: pictures_of(experiment, found.records, folder, found.machine)
    )
    return pictures or [], why


def _machine(name: str, folder: Path, found: Iterable[Sequence[Reading]], *, own: bool) -> Machine:
    here = [each for several in found for each in several if each.folder == folder]
    records = [record for each in here for record in each.records]
    facts = environment_facts([record.environment for record in records])
    return Machine(name, own, short_path(folder), len(records), facts)


# Records that belong together, and what they come to


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Records of one experiment, folder, profile and set of options, and what they come to: our answers,
    judged, and text without the paper's numbers.
    """

    machine: str
    folder: Path
    profile: str
    records: tuple[Record, ...]
    own: bool  # from the results folder that was asked for, not a reference
    comparisons: tuple[Comparison, ...]
    text: str


def folders(results: Path) -> list[tuple[str, Path]]:
    """(name, folder) of the results asked for, then of every reference machine."""
    own = results.stem if results.is_file() else results.name or str(results)
    there = sorted(REFERENCE.iterdir()) if REFERENCE.is_dir() else []
    others = [path for path in there if path.is_dir() and path.resolve() != results.resolve()]
    if own in [path.name for path in others]:
        own += " (yours)"
    return [(own, results), *((folder.name, folder) for folder in others)]


def readings(experiment: Experiment, places: Iterable[tuple[str, Path]]) -> tuple[list[Reading], list[str]]:
    """The readings of an experiment, in the order in which they are asked, and a line about each that can't
    be read. The first of `places` is the user's own.
    """
    found: list[Reading] = []
    left_out: list[str] = []
    for place, (machine, folder) in enumerate(places):
        loaded = Store(folder).load(experiment.name)
        left_out += lines_of(loaded.problems)
        groups: dict[tuple[str, str], list[Record]] = {}
        current = [record for record in loaded.records if record.revision == experiment.revision]
        for record in latest(current).values():
            groups.setdefault((record.profile, repr(sorted(record.options.items()))), []).append(record)
        for (profile, _), records in groups.items():
            read, why = readable(experiment.name, functools.partial(_read, experiment, records))
            if read is None:
                left_out.append(f"{short_path(folder)}: {why}")
            else:
                found.append(Reading(machine, folder, profile, tuple(records), place == 0, *read))

    def order(each: Reading) -> tuple[object, ...]:
        used = each.records[-1].options.get("engine")
        usual = used is None or not experiment.engines or used == experiment.engines[0]
        profile = -PROFILES.index(each.profile) if each.profile in PROFILES else 1  # full, short, smoke
        is_smoke = each.profile == "smoke"
        return (is_smoke, not usual, not each.own, profile, -len(each.records), each.machine)

    return sorted(found, key=order), left_out


def _read(experiment: Experiment, records: Sequence[Record]) -> tuple[tuple[Comparison, ...], str]:
    entries, comparisons = judged(experiment, records)
    ours = {entry.key for entry in entries}
    text = "" if experiment.tables is None else experiment.tables(records)
    return tuple(cell for cell in comparisons if cell.key in ours), text


def answers(found: Sequence[Reading]) -> list[Comparison]:
    """One comparison for each entry of any reading, from the first reading that has a number."""
    chosen: dict[tuple[str, ...], Comparison] = {}
    for reading in found:
        for cell in reading.comparisons:
            entry = cell.entry
            if entry is not None and (cell.ours is not None or entry.status == "out_of_memory"):
                command = (entry.record or reading.records[-1]).command
                cell = replace(cell, machine=reading.machine, profile=reading.profile, command=command)
            if cell.key not in chosen or (cell.machine and not chosen[cell.key].machine):
                chosen[cell.key] = cell
    return list(chosen.values())


# Facts that no comparison holds: sums over computed tables, same seeds, the schedule's formula, hardware


def idle_share(num_stages: int, num_microbatches: int) -> float:
    """The share of their time that even stages wait, with F : R : B = 1 : 1 : 2 and a free link: a bubble
    has F and B alone, as recomputation starts while stages would wait; a micro-batch has all of them.
    """
    bubble = 3 * (num_stages - 1)
    return bubble / (4 * num_microbatches + bubble)


SUMMARY = ("computed at the paper's size", "agree", "differ", "no test", "median off", "rank", "directions")


def summaries_of(records: Mapping[str, Sequence[Record]]) -> Grid:
    """For each table of the paper, the four numbers that sum up what was computed of it, and a baseline."""
    lines = []
    for name in reproduced.SECONDS:
        of_tables = reproduced.cells(records.get(name, ()))
        for (table, unit), (cells, fixed) in of_tables.items():
            several = sum(other == table for other, _ in of_tables) > 1
            rows = {f"{table}, {unit}" if several else table: cells}
            rows[f"{table}, by the bubble's formula alone"] = reproduced.by_the_bubble(cells, fixed)
            for label, of in rows.items():
                found = reproduced.summed(of, fixed)
                counts = [f"{found.counts[each]}" for each in reproduced.TESTED]
                off = "-" if found.off is None else f"{100 * found.off:.0f} %"
                rank = "-" if found.rank is None else f"{found.rank:.2f}"
                directions = f"{found.directions} of {found.pairs}" if found.pairs else "-"
                lines += [[label, *counts, off, rank, directions]] * bool(of)
    return Grid(columns=SUMMARY, lines=lines, right=numbers(SUMMARY))


def facts_of(records: Mapping[str, Sequence[Record]]) -> dict[str, str]:
    """Facts in words, by name, of the records by experiment; what none of them says is left out."""
    found = {"even_idle": f"{100 * idle_share(2, 8):.1f} to {100 * idle_share(8, 32):.1f} %"}
    answers = [
        cell.answer
        for name in reproduced.SECONDS
        for cells, _ in reproduced.cells(records.get(name, ())).values()
        for cell in cells
    ]
    if answers:
        known = reproduced.errors()
        found |= {f"computed.{each}": f"{answers.count(each)}" for each in reproduced.TESTED}
        found["computed.tested"] = f"{len(answers) - answers.count('no test')}"
        found["error.ratios"] = percent(known["ratios of speeds"].error)
        found["error.bytes"] = percent(known["bytes"].error)
    trained = records.get("consistency", ())
    same = of_case(trained, "done", part="same seed")
    if same:
        found |= {
            "same_runs": f"{sum(exact(record) == 'identical' for record in same)} of {len(same)}",
            "own_runs": f"{len(of_case(trained, 'done', part='own seeds', model='images'))}",
        }
    environments = [
        record.environment
        for several in records.values()
        for record in several
        if any(metric.provenance != "modelled" for metric in record.metrics)
    ]
    if environments:  # machines that timed or trained anything
        cores = sorted({int(each.get("cores_logical") or 0) for each in environments})
        on_gpus = any(each.get("gpus") for each in environments)
        where = "and some of it on GPUs" if on_gpus else "nothing on a GPU or TPU"
        found["cores"] = f"{' or '.join(map(str, cores))} processor cores, {where}"
    return found


# The generated tables of the project's pages, which this file run by itself writes between their markers

RECORDS = REFERENCE / "cpu-2-cores"
CORES = 2  # of the machine that times are said for


def sessions() -> str:
    """A row for each experiment: how to run it, and how long its default profile takes."""
    rows = [f"| session | what it reproduces or measures | time on {CORES} cores |", "|---|---|---|"]
    for each in map(load, EXPERIMENTS):
        more = f" ([more]({each.docs.removeprefix('docs/')}))" if each.docs else ""
        rows.append(f"| `nox -s {each.name}` | {each.title}{more} | {_time(each)} |")
    return "\n".join(rows)


@functools.cache
def _reference() -> Page:
    """The reference records, for all sections that are made of them."""
    return build(RECORDS, figures=False)


def _meanings() -> str:
    """A row for each answer."""
    rows = [f"| {MARKS[name]} {name} | {meaning} |" for name, meaning in MEANINGS.items()]
    return "\n".join(["| answer | meaning |", "|---|---|", *rows])


def _time(experiment: Experiment) -> str:
    """Time that the cases need by their estimates, rounded up: `15 s`, `6 min`."""
    cases = experiment.cases(RunOptions())
    jobs = min(CORES, len(cases)) if experiment.untimed else 1
    seconds = sum(case.estimate_s for case in cases) / jobs
    return f"{5 * math.ceil(seconds / 5)} s" if seconds <= 55 else f"{math.ceil(seconds / 60)} min"


SECTIONS: dict[str, tuple[Path, Callable[[], str]]] = {
    "answer": (ROOT / "README.md", lambda: _reference().first.markdown()),
    "sessions": (ROOT / "docs" / "commands.md", sessions),
    "verdicts": (ROOT / "docs" / "method.md", _meanings),
    "summaries": (PUBLISHED / "README.md", lambda: _reference().summaries.markdown()),
    "table1": (PUBLISHED / "README.md", lambda: table1(Store(RECORDS).load("table1").records)),
}
"""For each name in the markers: the page, and the function that makes the section."""


def markers(section: str) -> tuple[str, str]:
    """The lines between which a section stands."""
    made_by = "generated by python -m gpipe_bench.experiments.commands.report"
    return f"<!-- {section}: {made_by} -->", f"<!-- end of {section} -->"


def rewritten(section: str, text: str) -> str:
    """The text of its page with the section made anew. Raises ValueError without the markers."""
    page, make = SECTIONS[section]
    begin, end = markers(section)
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{page.name} has lost its markers: it needs {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{make()}\n\n{end}{after}"


if __name__ == "__main__":
    for section, (page, _) in SECTIONS.items():
        page.write_text(rewritten(section, page.read_text(encoding="utf-8")), encoding="utf-8")

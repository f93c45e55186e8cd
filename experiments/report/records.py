"""Which records a table and the report are made of, and in which order they are asked.

A table is made of the records of one profile and one revision. Records of different machines, profiles or
options never mix in one table of numbers: for the report each group is turned into cells by itself, and a
cell takes its number from the first group that has one. Your own records come first and the committed
reference records fill in what you did not run; a smoke run, which only proves that the path works, comes
last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpipe_bench.experiments.registry import EXPERIMENTS, load, program, suggestion
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.places import REFERENCE
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.store import Problem, Store, latest

_PROFILES = ("full", "short", "smoke")


def select_records(records: Sequence[Record], experiment: Experiment, profile: str | None) -> list[Record]:
    """The latest record of each case at the current revision; without `profile`, of the latest one."""
    current = [record for record in records if record.revision == experiment.revision]
    if profile is None and current:
        profile = current[-1].profile
    return list(latest(record for record in current if record.profile == profile).values())


def folder_of(name: str, results: Path, *, is_own: bool = True) -> tuple[Path, str]:
    """Where the records of an experiment are: the user's `results`, or, where nothing of it is there and no
    folder was asked for, those that come with the project, with a sentence that says so.
    """
    having = [folder for folder in sorted(REFERENCE.glob("*")) if (folder / f"{name}.jsonl").is_file()]
    if not is_own or not having or Store(results).load(name).records:
        return results, ""
    said = f"records that came with the project ({having[0].name}); yours: {program()} run {name}"
    return having[0], said


def engines_of(record: Record) -> tuple[str, ...]:
    """The engines that took part: those asked for, without the digests of their files, then those that the
    experiment set beside them.
    """
    asked = str(record.options.get("engine") or "").split(",")
    beside = record.details.get("engines")
    names = [name.partition("@")[0] for name in asked] + (list(beside) if isinstance(beside, dict) else [])
    return tuple(dict.fromkeys(filter(None, names)))


def merge(stored: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """The stored records with the new ones in their place; on a full disk new ones are not stored."""
    return list(latest([*stored, *new]).values())


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Records of one experiment that belong together: one folder, profile and set of options."""

    experiment: str
    machine: str
    folder: Path
    profile: str
    records: tuple[Record, ...]
    own: bool  # from the results folder that was asked for, not a reference

    @property
    def command(self) -> str:
        """The last command that made one of them."""
        return self.records[-1].command

    @property
    def engines(self) -> tuple[str, ...]:
        """All that took part in any of them."""
        return tuple(dict.fromkeys(name for record in self.records for name in engines_of(record)))


def folders(results: Path, references: Path = REFERENCE) -> list[tuple[str, Path]]:
    """(name, folder) of the results asked for, then of every reference machine."""
    own = results.name or str(results)
    if (references / own).is_dir() and (references / own).resolve() != results.resolve():
        own += " (yours)"
    found = [(own, results)]
    if references.is_dir():
        found += [
            (folder.name, folder)
            for folder in sorted(references.iterdir())
            if folder.is_dir() and folder.resolve() != results.resolve()
        ]
    return found


def sources(
    experiment: Experiment, places: Iterable[tuple[str, Path]], engine: str | None = None
) -> tuple[list[Source], list[Problem]]:
    """The groups of records of an experiment, in the order in which they are asked, and unreadable lines.

    The first of `places` is the user's own. Groups in which the `engine` took part come first.
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
            Source(experiment.name, machine, folder, profile, tuple(records), place == 0)
            for (profile, _), records in groups.items()
        ]
    return sorted(found, key=lambda source: _order(source, experiment, engine)), problems


def _order(source: Source, experiment: Experiment, wanted: str | None) -> tuple[object, ...]:
    engine = source.records[-1].options.get("engine")
    usual = engine is None or not experiment.engines or engine == experiment.engines[0]
    profile = _PROFILES.index(source.profile) if source.profile in _PROFILES else len(_PROFILES)
    return (
        wanted is not None and wanted not in source.engines, source.profile == "smoke", not usual,
        not source.own, profile, -len(source.records), source.machine,
    )  # fmt: skip


def check_engine_is_there(engine: str, found: Iterable[Source | Record]) -> None:
    """ValueError, naming those that took part, unless the engine is one of them."""
    known = dict.fromkeys(
        name for each in found for name in (each.engines if isinstance(each, Source) else engines_of(each))
    )
    if engine not in known:
        raise ValueError(
            f"--engine {engine}: no record has it{suggestion(engine, known)}; there are: "
            f"{', '.join(known) or 'none'}"
        )


def load_all() -> tuple[list[Experiment], list[str]]:
    """Every experiment that can be loaded here, and a line for each that can't."""
    loaded: list[Experiment] = []
    warnings: list[str] = []
    for name in EXPERIMENTS:
        try:
            loaded.append(load(name))
        except ImportError as error:  # one experiment that lacks a package must not cost the whole page
            warnings.append(f"{name} can't be loaded: {error}")
    return loaded, warnings

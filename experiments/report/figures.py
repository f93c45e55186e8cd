"""The figures of the experiments: drawn from records, kept beside them, taken into the report.

Drawing is slow and reading is fast, so a report takes the pictures that a run left behind. A picture of other
records would be a lie, so beside each experiment's figures lies a digest of the records they were drawn from.
What must be drawn anew, experiments draw side by side in processes of their own.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from gpipe_bench.experiments.registry import load
from gpipe_bench.experiments.report.records import Source
from gpipe_bench.harness.experiment import Experiment, Plot
from gpipe_bench.harness.record import Record, encode
from gpipe_bench.harness.report.chart import data_url

FOLDER = "figures"
DOTS_PER_INCH = 150
FAILURES = (ValueError, LookupError, ArithmeticError, TypeError, OSError)
"""What an experiment may stumble over while it draws; that must not cost the page."""

_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


def plots_of(experiment: Experiment, records: Sequence[Record]) -> list[Plot]:
    """What the experiment can draw of the records."""
    return experiment.figures(records) if experiment.figures is not None and records else []


def draw(experiment: Experiment, records: Sequence[Record], folder: Path) -> list[Path]:
    """Draws the figures of the records into the folder; the same records give the same bytes.

    Raises OSError where the folder can't be written.
    """
    plots = plots_of(experiment, records)
    if not plots:
        return []
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    _note(experiment.name, folder).unlink(missing_ok=True)  # half a figure must not pass for a whole one
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # matplotlib writes the date into an SVG otherwise
    with matplotlib.rc_context({"svg.hashsalt": experiment.name}):
        paths = [path for plot in plots for path in _save(plot, folder)]
    note = {"records_sha256": digest(records), "files": [path.name for path in paths]}
    _note(experiment.name, folder).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    return paths


def _save(plot: Plot, folder: Path) -> list[Path]:
    paths = [folder / f"{plot.name}.{suffix}" for suffix in plot.suffixes]
    with plot.style():  # fonts are looked up when a drawing is saved, not when it is made
        drawing = plot.draw()
        for path in paths:
            drawing.savefig(path, dpi=DOTS_PER_INCH)
    return paths


def drawn(experiment: Experiment, records: Sequence[Record], folder: Path) -> list[Path] | None:
    """The figures in the folder if they are all of these records, none missing, else None.

    A PNG alone is enough where the drawing of the same name is missing.
    """
    try:
        note = json.loads(_note(experiment.name, folder).read_text(encoding="utf-8"))
        files = [folder / Path(str(file)).name for file in note["files"]]
        fits = note["records_sha256"] == digest(records)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = [path for path in files if path.is_file()]
    complete = {path.stem for path in found} == {plot.name for plot in plots_of(experiment, records)}
    return found if fits and complete else None


def digest(records: Sequence[Record]) -> str:
    """A digest of the records, whatever their order."""
    lines = sorted(hashlib.sha256(encode(record)).digest() for record in records)
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _note(name: str, folder: Path) -> Path:
    return folder / f"{name}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A figure as the page needs it; `width` and `height` in pixels of the page.

    `of_timelines`: it shows what the page may have as charts to point at.
    """

    name: str
    experiment: str
    machine: str
    caption: str
    alt: str
    url: str
    width: int
    height: int
    of_timelines: bool


def pictures_of(shown: Sequence[tuple[Experiment, Source]]) -> tuple[list[Picture], list[str]]:
    """The figures of every experiment of its source, and a line for each that failed.

    Figures that lie beside the records and show exactly them are taken as they are; others are drawn, into
    the folder of the user's own records or, for reference records, into a folder that is gone afterwards.
    """
    with tempfile.TemporaryDirectory() as scratch:
        results: dict[Source, list[Path] | str] = {}
        jobs = []
        for experiment, source in shown:
            found = _known(experiment, source)
            if found is None:
                jobs.append(
                    (source, source.folder / FOLDER if source.own else Path(scratch) / source.machine)
                )
            else:
                results[source] = found
        results |= dict(zip([source for source, _ in jobs], _all(jobs), strict=True))
        pictures: list[Picture] = []
        warnings: list[str] = []
        for experiment, source in shown:
            result = results[source]
            if isinstance(result, str):
                warnings.append(f"the figures of {source.experiment} can't be drawn: {result}")
            elif result:
                plots = {plot.name: plot for plot in plots_of(experiment, source.records)}
                pictures += [_picture(path, plots[path.stem], source) for path in _preferred(result)]
    return pictures, warnings


def _known(experiment: Experiment, source: Source) -> list[Path] | str | None:
    """The figures if there is nothing to draw, or why there can't be any; None if they are to be drawn."""
    try:
        if not plots_of(experiment, source.records):
            return []
        return drawn(experiment, source.records, source.folder / FOLDER)
    except FAILURES as error:
        return _reason(error)


def _all(jobs: Sequence[tuple[Source, Path]]) -> list[list[Path] | str]:
    workers = min(os.cpu_count() or 1, len(jobs))
    if workers < 2:
        return [_draw(job) for job in jobs]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_draw, job) for job in jobs]
    return [_result(future) for future in futures]


def _result(future: Future[list[Path] | str]) -> list[Path] | str:
    try:
        return future.result()
    except BrokenProcessPool:  # killed, as by a system that ran out of memory
        return "a process that drew was killed"


def _draw(job: tuple[Source, Path]) -> list[Path] | str:
    """The files of one experiment, or why there are none."""
    source, folder = job
    try:
        return draw(load(source.experiment), list(source.records), folder)
    except FAILURES as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _preferred(paths: Sequence[Path]) -> list[Path]:
    """One file per figure: the vector drawing where there is one."""
    by_name: dict[str, Path] = {}
    for path in paths:
        if path.suffix in _TYPES and (path.stem not in by_name or path.suffix == ".svg"):
            by_name[path.stem] = path
    return list(by_name.values())


def _picture(path: Path, plot: Plot, source: Source) -> Picture:
    content = path.read_bytes()
    width, height = _size(content) if path.suffix == ".svg" else _png_size(content)
    return Picture(
        name=plot.name,
        experiment=source.experiment,
        machine=source.machine,
        caption=plot.caption,
        alt=plot.alt,
        url=data_url(content, _TYPES[path.suffix]),
        width=width,
        height=height,
        of_timelines=plot.of_timelines,
    )


def _size(svg: bytes) -> tuple[int, int]:
    """Pixels of an SVG whose size is given in points."""
    match = re.search(rb'<svg[^>]*?\bviewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if match is None:
        return 640, 400
    return round(float(match[1]) * 4 / 3), round(float(match[2]) * 4 / 3)


def _png_size(png: bytes) -> tuple[int, int]:
    """Width and height on the page, from the header of a PNG that was saved with `DOTS_PER_INCH`."""
    scale = 96 / DOTS_PER_INCH
    width, height = int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
    return round(width * scale), round(height * scale)

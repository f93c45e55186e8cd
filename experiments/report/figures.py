"""The figures of the report, drawn from the records by the experiments themselves.

Most of the time of a report goes into matplotlib, so experiments draw side by side in processes of their own.
"""

from __future__ import annotations

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
from gpipe_bench.experiments.report.figure_files import draw, drawn, plots_of
from gpipe_bench.experiments.report.records import Source
from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.report.chart import data_url
from gpipe_bench.harness.shown import Plot

FOLDER = "figures"
FAILURES = (ValueError, LookupError, ArithmeticError, TypeError, OSError)
"""What an experiment may stumble over while it draws; that must not cost the page."""

_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


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
    """Width and height from the header of a PNG, at the 150 dots per inch the figures are saved with."""
    scale = 96 / 150
    width, height = int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
    return round(width * scale), round(height * scale)

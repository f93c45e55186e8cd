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
from gpipe_bench.experiments.report.figure_files import draw, drawn
from gpipe_bench.experiments.report.records import Source
from gpipe_bench.harness.report.chart import data_url

FOLDER = "figures"
_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}

# File name without ending (a pattern) -> caption and what a reader who can't see the figure should know.
CAPTIONS: tuple[tuple[str, str, str], ...] = (
    (
        r"table1-(\w+)",
        "Table 1, {0}: parameters and memory of the paper's models, ours beside the paper's",
        "Bars of parameters and memory per column of Table 1; every number stands in the table above.",
    ),
    (
        r"figure2-schedules-m(\d+)",
        "The schedules of Figure 2 for M = {0}, replayed",
        "Gantt charts of the schedules; the same timelines are interactive charts in this report.",
    ),
    (
        r"table2-throughput-(\w+)",
        "Table 2: throughput over the number of micro-batches, {0} batch",
        "Lines over M for each K: ours, the bound of balanced stages and the paper's points, relative to "
        "K=2, M=1; every number stands in the table above.",
    ),
    (
        r"table2-efficiency",
        "Table 2: throughput per device as a share of what balanced stages allow",
        "A grid of stages by micro-batches with the efficiency of each; it grows with M and falls with K.",
    ),
    (
        r"table3-.*",
        "Table 3: throughput over the bandwidth of the link",
        "Curves of throughput over bandwidth on a logarithmic axis, with the point where communication stops "
        "being hidden.",
    ),
    (
        r"table4-breakdown",
        "Where the time of a step goes, by model and number of stages",
        "Stacked bars that add up to 100 percent: computation, recomputation, bubble, load imbalance, "
        "communication, setup and weight update.",
    ),
    (
        r"figure3.*",
        "Figure 3 of the first version: speed-up over the number of partitions",
        "Ours beside the paper's and torchgpipe's speed-ups for each number of partitions.",
    ),
    (
        r"figure2-bubble",
        "Idle share of the device time over the number of micro-batches",
        "For each K the idle share falls as M grows; replayed marks lie on the lines of the closed form, and "
        "at M = 4K it is below 20 percent.",
    ),
    (
        r"figure2-memory",
        "Activation memory by the paper's formula and by the memory model",
        "Stacked bars of boundary inputs, saved activations and transients per number of stages, formula "
        "beside memory model.",
    ),
    (
        r"figure2-traffic",
        "Bytes sent per step by a pipeline and by data parallelism",
        "For each model, the bytes that the busiest device sends in one step under either scheme, on a "
        "logarithmic axis.",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A figure as the page needs it; `width` and `height` in pixels of the page."""

    name: str
    experiment: str
    machine: str
    caption: str
    alt: str
    url: str
    width: int
    height: int


def pictures_of(sources: Sequence[Source]) -> tuple[list[Picture], list[str]]:
    """The figures of every source that can draw some, and a line for each that failed.

    Figures that lie beside the records and show exactly them are taken as they are; others are drawn, into
    the folder of the user's own records or, for reference records, into a folder that is gone afterwards.
    """
    pictures: list[Picture] = []
    warnings: list[str] = []
    found = {source: drawn(source.experiment, source.records, source.folder / FOLDER) for source in sources}
    missing = [source for source, paths in found.items() if paths is None]
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [
            (source, source.folder / FOLDER if source.own else Path(scratch) / source.machine)
            for source in missing
        ]
        done: dict[Source, list[Path] | str] = dict(zip(missing, _all(jobs), strict=True))
        for source in sources:
            paths = found[source]
            result = done[source] if paths is None else paths
            if isinstance(result, str):
                warnings.append(f"the figures of {source.experiment} can't be drawn: {result}")
            else:
                pictures += [_picture(path, source) for path in _preferred(result)]
    return pictures, warnings


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
    except (ValueError, LookupError, ArithmeticError, TypeError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def _preferred(paths: Sequence[Path]) -> list[Path]:
    """One file per figure: the vector drawing where there is one."""
    by_name: dict[str, Path] = {}
    for path in paths:
        if path.suffix in _TYPES and (path.stem not in by_name or path.suffix == ".svg"):
            by_name[path.stem] = path
    return list(by_name.values())


def _picture(path: Path, source: Source) -> Picture:
    content = path.read_bytes()
    caption, alt = captions(path.stem)
    width, height = _size(content) if path.suffix == ".svg" else _png_size(content)
    return Picture(
        name=path.stem,
        experiment=source.experiment,
        machine=source.machine,
        caption=caption,
        alt=alt,
        url=data_url(content, _TYPES[path.suffix]),
        width=width,
        height=height,
    )


def captions(name: str) -> tuple[str, str]:
    """Caption and alternative text of a figure by its file's name."""
    for pattern, caption, alt in CAPTIONS:
        if match := re.fullmatch(pattern, name):
            return caption.format(*match.groups()), alt
    words = name.replace("-", " ").replace("_", " ")
    return words[:1].upper() + words[1:], f"Figure: {words}. Its numbers stand in the tables of this report."


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

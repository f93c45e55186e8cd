"""The figures of the experiments: drawn from records, kept beside them, taken into the report.

Drawing is slow and reading is fast, so a report takes the pictures that a run left behind. A picture of other
records would be a lie, so beside each experiment's figures lies a digest of the records they were drawn from.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpipe_bench.harness.experiment import Experiment, Plot
from gpipe_bench.harness.record import Record, encode
from gpipe_bench.harness.report.html import data_url

FOLDER = "figures"
DOTS_PER_INCH = 150
FAILURES = (ValueError, LookupError, ArithmeticError, TypeError, OSError)
"""Errors of an experiment's drawing that must not cost the page."""

_TYPES = {".svg": "image/svg+xml", ".png": "image/webp"}
COLOURS = 32
"""Colours of a picture on the page: drawings have few, and a page is sent by mail."""


def plots_of(experiment: Experiment, records: Sequence[Record]) -> list[Plot]:
    """Plots that the experiment can draw from the records."""
    return experiment.figures(records) if experiment.figures is not None and records else []


def draw(experiment: Experiment, records: Sequence[Record], folder: Path) -> list[Path]:
    """Draws the figures of the records into the folder; the same records give the same bytes.

    Raises OSError where the folder can't be written.
    """
    plots = plots_of(experiment, records)
    if not plots:
        return []
    import matplotlib

    note = folder / f"{experiment.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)  # half a figure must not pass for a whole one
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # matplotlib writes the date into an SVG otherwise
    paths = []
    for plot in plots:
        # fonts are looked up when a drawing is saved, not when it is made
        with matplotlib.rc_context({"svg.hashsalt": experiment.name}), plot.style():
            drawing = plot.draw()
            for suffix in plot.suffixes:
                paths.append(folder / f"{plot.name}.{suffix}")
                drawing.savefig(paths[-1], dpi=DOTS_PER_INCH)
    found = {"records_sha256": digest(records), "files": [path.name for path in paths]}
    note.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return paths


def drawn(experiment: Experiment, records: Sequence[Record], folder: Path) -> list[Path] | None:
    """The figures in the folder if they are all of these records, none missing, else None.

    A PNG alone is enough where the drawing of the same name is missing.
    """
    try:
        note = json.loads((folder / f"{experiment.name}.json").read_text(encoding="utf-8"))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A figure as the page needs it; `width` and `height` in pixels of the page."""

    plot: Plot
    machine: str
    url: str
    width: int
    height: int


def pictures_of(
    experiment: Experiment,
    records: Sequence[Record],
    folder: Path,
    machine: str,
    *,
    own: bool,
    only: str = "",
) -> list[Picture]:
    """The figures of the experiment of these records, which are in the folder of the machine, made small; or
    `only` the one of that name.

    Figures that lie beside the records and show exactly them are taken as they are; others are drawn, into
    the folder of the user's own records or, for reference records, into a folder that is gone afterwards.
    Raises one of FAILURES where they can't be drawn.
    """
    plots = {plot.name: plot for plot in plots_of(experiment, records)}
    with tempfile.TemporaryDirectory() as scratch:
        beside = folder / FOLDER
        paths = drawn(experiment, records, beside)
        if paths is None:
            paths = draw(experiment, records, beside if own else Path(scratch))
        by_name = {path.stem: path for suffix in _TYPES for path in paths if path.suffix == suffix}
        shown = {name: plot for name, plot in plots.items() if name in by_name and plot.on_page}
        shown = {name: plot for name, plot in shown.items() if not only or name == only}
        return [_picture(by_name[name], plot, machine) for name, plot in shown.items()]


def _picture(path: Path, plot: Plot, machine: str) -> Picture:
    content = path.read_bytes()
    width, height = _svg_size(content) if path.suffix == ".svg" else _png_size(content)
    url = data_url(content if path.suffix == ".svg" else _made_small(content), _TYPES[path.suffix])
    return Picture(plot=plot, machine=machine, url=url, width=width, height=height)


def _made_small(png: bytes) -> bytes:
    """The same pixels with fewer colours, compressed without a loss: a fifth of the bytes."""
    from PIL import Image

    method = Image.Quantize.FASTOCTREE
    few = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, method, dither=Image.Dither.NONE)
    small = io.BytesIO()
    few.convert("RGB").save(small, "WEBP", lossless=True, method=1, quality=30)
    return small.getvalue()


def _svg_size(svg: bytes) -> tuple[int, int]:
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

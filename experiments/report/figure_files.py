"""Figures on disk that know which records they show.

Drawing is slow and reading is fast, so a report takes the pictures that a run left behind. A picture of other
records would be a lie, so beside each experiment's figures lies a digest of the records they were drawn from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from gpipe_bench.harness.experiment import Experiment
from gpipe_bench.harness.records.codec import encode
from gpipe_bench.harness.records.record import Record
from gpipe_bench.harness.shown import Plot

DOTS_PER_INCH = 150


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

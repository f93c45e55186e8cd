"""The appendix: what the choices that the paper leaves open would move, over all that is allowed of each.

A prediction is a frame: a row for each combination of results/unknowns.toml, a column for each number of the
paper. What moves a number, and how many settings give the whole table, are a line each. No verdict changes.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from gpipe_bench.harness.paper import SENTENCES, load_paper
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.report.grid import fill, numbers_text
from gpipe_bench.harness.units import convert
from gpipe_bench.harness.unknowns import Value, load_unknowns, points

if TYPE_CHECKING:
    import pandas as pd

TABLES = {"table4": "breakdown-v5", "computed": "control-stride"}
"""Table of the unknowns by experiment, where it is not named after the experiment and the model."""
HELD = (
    "num_classes", "memory_cap_bytes", "link_bytes_per_s", "link_latency_s", "filters_step", "num_layers",
    "gradient_copies", "boundary_tensors", "sequence_length", "vocab_size", "stage_balance", "d_model",
    "kept_by", "tensor_layout", "auxiliary_head",
    "accelerator", "host_bytes_per_s", "model", "update_counts", "batch_choice",
    "averaged_over",
)  # fmt: skip
"""Settings that stay as declared: they hardly move a quotient, have one value, or cannot be computed."""


def settings_of(experiment: str, model: str) -> dict[str, tuple[Value, ...]]:
    """Values that are tried, by setting: the listed ones, or both ends and the middle of a range."""
    unknown = load_unknowns().of(TABLES.get(experiment, f"{experiment}-{model}"))
    searched = ("batch_size",) if experiment in ("figure3", "table4") else ()
    return {
        name: points(each)
        for name, each in unknown.items()
        if name not in (*HELD, *searched) and len(points(each)) > 1
    }


def sweep(experiment: str, model: str) -> pd.DataFrame:
    """Every combination as a row, every printed result as a column, in the paper's units."""
    import pandas as pd

    from gpipe_bench.experiments.paper.reproduction import COMPUTED, unit_of

    printed = {
        cell.key: cell
        for cell in load_paper()
        if cell.source == "paper" and cell.kind in ("result", "claim")
        if cell.table != SENTENCES and cell.same_as is None
    }
    settings = settings_of(experiment, model)
    rows, found = list(product(*settings.values())), []
    for values in rows:
        numbers = COMPUTED[experiment][model](model, **dict(zip(settings, values, strict=True)))
        found.append(
            {
                " | ".join(place): convert(number, unit_of(*place[:2]), printed[place].unit)
                for place, number in numbers.items()
                if place in printed
            }
        )
    return pd.DataFrame(found, index=pd.MultiIndex.from_tuples(rows, names=list(settings)))


def text(experiment: str, model: str) -> str:
    """For each number: the paper's, the range, the share of settings that meet it, and what moves it most."""
    frame = sweep(experiment, model)
    cells = {" | ".join(cell.key): cell for cell in load_paper() if cell.source == "paper"}
    lines, met = [], frame.notna()
    for name in frame:
        cell, values = cells[name], frame[name].dropna()
        error = 1 + reproduced.error_of(cell.table, cell.row, float(values.median()))
        met[name] = (frame[name] * error >= cell.target - cell.target_rounding) & (
            frame[name] / error <= cell.target + cell.target_rounding
        )
        effects = {level: values.groupby(level=level).median() for level in frame.index.names}
        most = max(effects, key=lambda level: effects[level].max() / effects[level].min(), default="")
        by = effects[most].max() / effects[most].min() if most and len(values) else 1.0
        span = f"{values.min():.3g} to {values.max():.3g}" if len(values) else "nothing fits"
        lines.append(
            [
                f"{cell.row}, {cell.column}",
                cell.printed,
                span,
                f"{100 * met[name].mean():.0f} %",
                f"{most} x{by:.2f}",
            ]
        )
    whole = fill(f"{int(met.all(axis=1).sum())} of {len(frame):,} combinations give the whole table.")
    headers = ["", "paper", "over all settings", "meet it", "moved most by"]
    return numbers_text(f"{experiment}, {model}: what the paper leaves open", headers, lines, whole)

"""A prediction as a record keeps it: the middle of every number, its range, and what was tried.

The numbers of all combinations of the listed settings are kept, with links and memory in the middle, so that
hypotheses can be told apart later without predicting again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpipe_bench.experiments.published.settings import EACH_ENTRY, Prediction
from gpipe_bench.experiments.published.walk import Axis, Walk
from gpipe_bench.harness.record import Quantity

NAME = "prediction"
IN_THE_MIDDLE = ("num_classes", "memory_cap_bytes", "link_bytes_per_s", "link_latency_s")
"""Settings that are not tried one against the other: their part in the range says what each does."""
DIGITS = 6


def outcome(prediction: Prediction, not_tried: tuple[str, ...] = ()) -> tuple[list[Quantity], dict[str, Any]]:
    """Quantities and details. `not_tried` are further settings of which the middle alone is kept."""
    walk = prediction.walk
    quantities, predicted = [], []
    for cell in walk.values:
        table, row, column = cell
        unit = "%" if table.startswith("breakdown") or row == "extra time by recomputation" else "ratio"
        quantities.append(
            Quantity(
                name=NAME, key={"table": table, "row": row, "column": column}, value=walk.middle(cell),
                unit=unit, provenance="modelled",
            )
        )  # fmt: skip
        predicted.append({"cell": list(cell), "spread": walk.spread(cell).to_data()})
    return quantities, {
        "title": prediction.title,
        "note": prediction.note,
        "reference": walk.settings,
        "predicted": predicted,
        "changed": [{**each, "values": [_rounded(v) for v in each["values"]]} for each in walk.changed()],
        "tried": tried(walk, (*IN_THE_MIDDLE, *not_tried)),
    }


def tried(walk: Walk, in_the_middle: tuple[str, ...]) -> dict[str, Any]:
    """Every combination of the other settings: their values, and each cell's numbers in that order."""
    kept = [
        [walk.reference[number]] if axis.name in in_the_middle or not axis.name else _places(axis)
        for number, axis in enumerate(walk.axes)
    ]
    places = np.ix_(*kept)
    return {
        "settings": {
            axis.name: [axis.values[place] for place in places_of]
            for axis, places_of in zip(walk.axes, kept, strict=True)
            if len(places_of) > 1
        },
        "values": [
            [_rounded(value) if np.isfinite(value) else None for value in values[places].ravel().tolist()]
            for values in walk.values.values()
        ],
    }


def _places(axis: Axis) -> list[int]:
    """Without a batch for each entry: with so many, something explains everything."""
    return [place for place, value in enumerate(axis.values) if not str(value).startswith(EACH_ENTRY)]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")

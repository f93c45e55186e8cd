"""Records as a pandas DataFrame: one row for each number, so that a table is a selection.

A table over two settings is a selection and a pivot. Its lines go into a `Grid` as they are:

    numbers = frame(records).query("quantity == 'step' and M == 32")
    numbers["text"] = [show(value, unit) for value, unit in zip(numbers.value, numbers.unit)]
    table = numbers.pivot(index="K", columns="schedule", values="text").fillna("-")
    Grid(columns=["K", *table.columns], lines=list(table.itertuples())).text()

A figure is the same selection under seaborn, `relplot(numbers, x="M", y="value", hue="K")`.

pandas takes half a second to import, which a command that only prints a comparison should not wait for: it is
imported when the first frame is made, and `list`, `compare` and `--help` make none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.record import Record

if TYPE_CHECKING:
    from pandas import DataFrame

BEFORE = ("record", "experiment", "profile", "status", "reason", "duration_s")
"""Columns of `frame` before the keys. `record` is the record's place in what was given, for its details."""
BEHIND = ("quantity", "value", "low", "high", "unit", "provenance", "samples", "note")
"""Columns of `frame` behind the keys. `quantity` is its name, without its key."""


def frame(records: Sequence[Record]) -> DataFrame:
    """A row for each quantity of each record, in their order, and one without a quantity for a record that
    has none.

    Columns are `BEFORE`, the keys of the cases, the keys of the quantities, `BEHIND`. What a record does not
    have is missing (`isna`); a key of whole numbers stays one of whole numbers all the same. Where case and
    quantity share a key, the quantity's counts. Raises ValueError for a key that is named like a column.
    """
    from pandas import DataFrame

    keys = dict.fromkeys(name for record in records for name in record.case)
    keys |= dict.fromkeys(name for record in records for each in record.quantities for name in each.key)
    if taken := keys.keys() & {*BEFORE, *BEHIND}:
        raise ValueError(f"key {min(taken)!r} of a case or quantity is a column's name; choose another key")
    rows: list[dict[str, Any]] = []
    for place, record in enumerate(records):
        case = {"record": place, **{name: getattr(record, name) for name in BEFORE[1:]}, **record.case}
        for quantity in record.quantities:
            number = {name: getattr(quantity, name) for name in BEHIND[1:]}
            rows.append({**case, **quantity.key, "quantity": quantity.name, **number})
        if not record.quantities:
            rows.append(case)
    names = [*BEFORE, *keys, *BEHIND]
    columns = {name: [row.get(name) for row in rows] for name in names}  # of Python's own objects
    found = DataFrame(columns, columns=names, dtype=object).infer_objects()
    whole = [key for key in keys if all(type(row[key]) is int for row in rows if row.get(key) is not None)]
    return found.astype({**dict.fromkeys(whole, "Int64"), **dict.fromkeys(("value", "low", "high"), float)})

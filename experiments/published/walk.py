"""All allowed settings of a table, and what each gives.

The unknowns of results/unknowns.toml are walked through in full: every listed value, and both ends and the
middle of every range. Which combination stands for all is given by a rule that knows no result:

    a range        its geometric middle
    numbers        the lower middle of the list, then the next larger, the next smaller, and so on
    words          the first of the list

and where these cannot go together (a batch that does not fit), the admitted combination the fewest steps away
from them, in which the settings that stand first keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.harness.record import Scalar
from gpipe_bench.harness.unknowns import Unknown, Value
from gpipe_bench.harness.verdict import Part, Spread

Array = NDArray[np.float64]
Cell = tuple[str, str, str]
"""Table, row and column, as in results/paper.csv."""


def points(unknown: Unknown) -> tuple[Value, ...]:
    """The values that are walked through; of a range its low end, its geometric middle and its high end."""
    if unknown.low is None or unknown.high is None:
        return unknown.allowed
    return (unknown.low, math.sqrt(unknown.low * unknown.high), unknown.high)


def ranks(unknown: Unknown) -> tuple[int, ...]:
    """For each of `points`, how many steps it is from the middle; 0 for the middle itself."""
    values = points(unknown)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return tuple(range(len(values)))
    middle = (len(values) - 1) // 2
    order = sorted(range(len(values)), key=lambda place: (abs(place - middle), place < middle))
    return tuple(order.index(place) for place in range(len(values)))


@dataclass(frozen=True)
class Axis:
    """A setting in a walk: its values, and how many steps each is from the middle."""

    name: str
    values: tuple[Scalar, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, unknown: Unknown, *, quick: bool = False) -> Axis:
        """An unknown's axis; `quick` keeps the middle alone."""
        values, steps = points(unknown), ranks(unknown)
        if quick:
            return cls(unknown.setting, (values[steps.index(0)],), (0,))
        return cls(unknown.setting, values, steps)


@dataclass(frozen=True)
class Walk:
    """What every combination gives for every cell.

    Args:
        axes: the settings
        values: of each cell, an array with a dimension for each axis; NaN where it is not admitted
        reference: the place of the reference on every axis
        parts: of Spread, in the order of the axes: what is changed alone. By default each axis by itself.
    """

    axes: tuple[Axis, ...]
    values: Mapping[Cell, Array]
    reference: tuple[int, ...]
    parts: tuple[tuple[str, int, tuple[int, ...]], ...] = ()

    @classmethod
    def with_rule(
        cls,
        axes: Sequence[Axis],
        values: Mapping[Cell, Array],
        parts: Sequence[tuple[str, int, tuple[int, ...]]] = (),
    ) -> Walk:
        """A walk with the reference that the rule gives; an axis without a name is no setting.

        Raises ValueError where nothing is admitted.
        """
        shape = tuple(len(axis.values) for axis in axes)
        every = [np.broadcast_to(value, shape) for value in values.values()]
        admitted = np.all([np.isfinite(value) for value in every], axis=0)
        if not admitted.any():
            raise ValueError(
                f"no combination of {', '.join(axis.name for axis in axes)} is admitted for all cells"
            )
        places = np.argwhere(admitted)  # in order, so that the first of equals is a rule, too
        steps = np.array([[axis.ranks[p] for axis, p in zip(axes, place, strict=True)] for place in places])
        fewest = min(range(len(places)), key=lambda number: (steps[number].sum(), *steps[number]))
        chosen = tuple(int(place) for place in places[fewest])
        alone = [part for part in parts if part[0]] or [
            (axis.name, number, tuple(range(len(axis.values))))
            for number, axis in enumerate(axes)
            if axis.name
        ]
        return cls(tuple(axes), dict(zip(values, every, strict=True)), chosen, tuple(alone))

    @property
    def settings(self) -> dict[str, Scalar]:
        """The reference's."""
        return {
            axis.name: axis.values[place]
            for axis, place in zip(self.axes, self.reference, strict=True)
            if axis.name
        }

    def middle(self, cell: Cell) -> float:
        """What the reference gives."""
        return float(self.values[cell][self.reference])

    def spread(self, cell: Cell) -> Spread:
        """The range over all admitted combinations, and what each setting does alone."""
        values = self.values[cell]
        found = values[np.isfinite(values)]
        parts = []
        for name, axis, places in self.parts:
            alone = self._alone(values, axis)[list(places)]
            alone = alone[np.isfinite(alone)]
            if len(alone) and len(places) > 1:
                parts.append(Part(what=name, low=float(alone.min()), high=float(alone.max())))
        return Spread(
            low=float(found.min()), high=float(found.max()), parts=tuple(parts), combinations=len(found)
        )

    def changed(self) -> list[dict[str, Any]]:
        """Every single setting changed against the reference, all else in the middle.

        Of parts of one axis the first counts.
        """
        found = []
        for name, axis, places in self._one_part_an_axis():
            for place in places:
                values = [float(self._alone(values, axis)[place]) for values in self.values.values()]
                if place != self.reference[axis] and all(map(math.isfinite, values)):
                    found.append({"setting": name, "value": self.axes[axis].values[place], "values": values})
        return found

    def _one_part_an_axis(self) -> list[tuple[str, int, tuple[int, ...]]]:
        by_axis = {part[1]: part for part in reversed(self.parts)}
        return [by_axis[axis] for axis in sorted(by_axis)]

    def _alone(self, values: Array, axis: int) -> Array:
        at: tuple[Any, ...] = tuple(
            slice(None) if number == axis else place for number, place in enumerate(self.reference)
        )
        return np.asarray(values[at])

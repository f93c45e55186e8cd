"""All allowed settings of a table, what each gives, and GPipe's step under many settings at once.

The unknowns of results/unknowns.toml are gone through in full: every listed value, and both ends and the
middle of every range. Which combination stands for all is given by a rule that knows no result: the middle
of every setting (`gpipe_bench.harness.unknowns.ranks`), and where these cannot go together (a batch that does
not fit), the admitted combination the fewest steps away from them, in which the settings that stand first
keep theirs.

The replay (pipeline/plan/simulate.py) lays out one step in milliseconds; all combinations of what a paper
leaves open are tens of thousands. GPipe's order on every stage and every link is known beforehand, so its
times follow from one pass over stages and micro-batches in which every time is an array over the settings.
Tests hold it to the replay, and its shares to the breakdown (planner/breakdown.py), number by number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.harness.record import Quantity, Scalar
from gpipe_bench.harness.unknowns import Unknown, Value, load_unknowns, points, ranks
from gpipe_bench.harness.verdict import Part, Spread

Array = NDArray[Any]
Cell = tuple[str, str, str]
"""Table, row and column, as in results/paper.csv."""

LINK = ("share_of_peak", "link_bytes_per_s", "link_latency_s")
"""The settings over which steps are laid out at once."""
CUT = ("partition_cost", "partition_rule")

IN_THE_MIDDLE = ("num_classes", "memory_cap_bytes", "link_bytes_per_s", "link_latency_s")
"""Settings that are not tried one against the other: their part in the range says what each does."""
DIGITS = 6


@dataclass(frozen=True)
class Axis:
    """A setting in a sweep: its values, and how many steps each is from the middle. What is known of a table,
    or chosen anew under all others, is none of the prediction's settings.
    """

    name: str
    values: tuple[Scalar, ...]
    ranks: tuple[int, ...]
    is_setting: bool = True

    @classmethod
    def of(cls, unknown: Unknown, *, quick: bool = False) -> Axis:
        """An unknown's axis; `quick` keeps the middle alone."""
        values, steps = points(unknown), ranks(unknown)
        if quick:
            return cls(unknown.setting, (values[steps.index(0)],), (0,))
        return cls(unknown.setting, values, steps)


@dataclass(frozen=True)
class Sweep:
    """Settings in their order. An array over it has a dimension for each of them, of length 1 where the
    setting does not matter, so that arrays broadcast against each other.
    """

    axes: tuple[Axis, ...]

    @classmethod
    def of(
        cls,
        table: str,
        names: Sequence[str],
        *,
        quick: bool = False,
        whole: Sequence[str] = (),
        chosen: str = "",
        given: Mapping[str, Value] = MappingProxyType({}),
        **fixed: Scalar,
    ) -> Sweep:
        """Of a table of the file of unknowns.

        Args:
            table: as in the file
            names: of the settings
            quick: take the middle of each alone, but of those in `whole`
            whole: settings of which a quick sweep has all values, too
            chosen: the setting that is chosen anew under all others
            given: settings that have one value here, allowed or later
            fixed: what a setting is where the table does not have it as an unknown
        """
        settings = load_unknowns()
        has = settings.of(table)
        return cls(
            tuple(
                Axis(name, (given[name],), (0,), is_setting=name != chosen)
                if name in given
                else Axis(name, (fixed[name],), (0,), is_setting=False)
                if name in fixed and name not in has
                else replace(
                    Axis.of(settings.find(table, name), quick=quick and name not in whole),
                    is_setting=name != chosen,
                )
                for name in names
            )
        )

    def __getitem__(self, name: str) -> tuple[Any, ...]:
        """The values of a setting."""
        return self.axes[self.place(name)].values

    def place(self, name: str) -> int:
        """The dimension of a setting, from behind, so that it holds beside further ones."""
        return [axis.name for axis in self.axes].index(name) - len(self.axes)

    def over(self, function: Callable[..., Any], *names: str, gives: Sequence[str] = ()) -> Array:
        """What a function gives for each combination of some settings, as an array over the sweep.

        The settings are its arguments by name; what it returns is a number, or an array over `gives`.
        """
        found = [
            np.asarray(function(**dict(zip(names, values, strict=True))))
            for values in product(*(self[name] for name in names))
        ]
        known = [self.place(name) for name in (*names, *gives)]
        lengths = [len(self.axes[place].values) for place in known]
        shape = [
            len(axis.values) if number in known else 1
            for number, axis in enumerate(self.axes, -len(self.axes))
        ]
        return np.stack(found).reshape(lengths).transpose(np.argsort(known)).reshape(shape)

    def along(self, name: str, function: Callable[[Any], Array]) -> Array:
        """The arrays over the sweep that a function gives for each value of a setting, side by side."""
        return np.concatenate([function(value) for value in self[name]], axis=self.place(name))

    def values(self, name: str) -> Array:
        """The values of a setting as an array over the sweep."""
        return self.over(lambda **given: given[name], name)


@dataclass(frozen=True)
class Prediction:
    """What every combination of settings gives for every cell.

    Args:
        title: names the model and its size
        axes: the settings
        values: of each cell, an array with a dimension for each axis; NaN where the paper's runs of all cells
            are not possible together
        reference: the place on every axis of the combination that stands for all
        note: what has to be said of it
    """

    title: str
    axes: tuple[Axis, ...]
    values: Mapping[Cell, Array]
    reference: tuple[int, ...]
    note: str = ""

    @classmethod
    def by_rule(cls, title: str, axes: Sequence[Axis], values: Mapping[Cell, Array]) -> Prediction:
        """With the reference that the rule gives. Values have a dimension for each of the axes; what is no
        setting, of length 1, is left out.

        Raises ValueError where nothing is admitted.
        """
        known = tuple(number for number, axis in enumerate(axes) if not axis.is_setting)
        axes = [axis for axis in axes if axis.is_setting]
        shape = tuple(len(axis.values) for axis in axes)
        every = {
            cell: np.broadcast_to(np.squeeze(value, axis=known), shape) for cell, value in values.items()
        }
        admitted = np.all([np.isfinite(value) for value in every.values()], axis=0)
        if not admitted.any():
            raise ValueError(
                f"no combination of {', '.join(axis.name for axis in axes)} is admitted for all cells"
            )
        every = {cell: np.where(admitted, value, np.nan) for cell, value in every.items()}
        places = np.argwhere(admitted)
        steps = np.stack([np.array(axis.ranks)[at] for axis, at in zip(axes, places.T, strict=True)])
        fewest = places[
            np.lexsort((*steps[::-1], steps.sum(axis=0)))[0]
        ]  # the first of equals is a rule, too
        return cls(title, tuple(axes), every, tuple(map(int, fewest)))

    @property
    def settings(self) -> dict[str, Scalar]:
        """The reference's."""
        return {axis.name: axis.values[place] for axis, place in zip(self.axes, self.reference, strict=True)}

    def middle(self, cell: Cell) -> float:
        """What the reference gives."""
        return self.values[cell][self.reference].item()  # type: ignore[no-any-return]

    def spread(self, cell: Cell) -> Spread:
        """The range over all admitted combinations, and what each setting does alone."""
        values = self.values[cell]
        found = values[np.isfinite(values)]
        parts = []
        for number, axis in enumerate(self.axes):
            alone = self._alone(values, number)
            alone = alone[np.isfinite(alone)]
            if len(axis.values) > 1:
                parts.append(Part(what=axis.name, low=float(alone.min()), high=float(alone.max())))
        return Spread(
            low=float(found.min()), high=float(found.max()), parts=tuple(parts), combinations=len(found)
        )

    def changed(self) -> list[dict[str, Any]]:
        """Every single setting changed against the reference, all else in the middle."""
        found = []
        for number, axis in enumerate(self.axes):
            for place, value in enumerate(axis.values):
                values = [float(self._alone(each, number)[place]) for each in self.values.values()]
                if place != self.reference[number] and all(map(math.isfinite, values)):
                    found.append({"setting": axis.name, "value": value, "values": values})
        return found

    def _alone(self, values: Array, axis: int) -> Array:
        return np.asarray(np.moveaxis(values, axis, -1)[*self.reference[:axis], *self.reference[axis + 1 :]])

    def quantities(self, unit: Callable[[Cell], str]) -> tuple[list[Quantity], dict[str, Any]]:
        """The middle of every number, and what a record keeps of all combinations."""
        found = [quantity(cell, self.middle(cell), unit(cell)) for cell in self.values]
        kept = [{"cell": list(cell), "spread": self.spread(cell).to_data()} for cell in self.values]
        return found, {"title": self.title, "reference": self.settings, "predicted": kept}

    def to_data(self) -> dict[str, Any]:
        """What hypotheses are made of later without predicting again: each setting changed alone, and
        `tried`.
        """
        changed = [{**each, "values": [_rounded(v) for v in each["values"]]} for each in self.changed()]
        return {"note": self.note, "changed": changed, "tried": self.tried()}

    def tried(self, not_tried: Sequence[str] = ()) -> dict[str, Any]:
        """The numbers of all combinations of the listed settings, with links, memory and `not_tried` in the
        middle.
        """
        kept = [
            [self.reference[number]]
            if axis.name in (*IN_THE_MIDDLE, *not_tried)
            else list(range(len(axis.values)))
            for number, axis in enumerate(self.axes)
        ]
        settings = {
            axis.name: [axis.values[place] for place in places]
            for axis, places in zip(self.axes, kept, strict=True)
            if len(places) > 1
        }
        values = [
            [
                _rounded(value) if math.isfinite(value) else None
                for value in every[np.ix_(*kept)].ravel().tolist()
            ]
            for every in self.values.values()
        ]
        return {"settings": settings, "values": values}


def quantity(cell: Cell, value: float, unit: str) -> Quantity:
    """A predicted number."""
    key: dict[str, Scalar] = dict(zip(("table", "row", "column"), cell, strict=True))
    return Quantity(name="prediction", key=key, value=value, unit=unit, provenance="modelled")


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


# The step under many settings -------------------------------------------------------------------------------

ZERO: Array = np.zeros(())


@dataclass(frozen=True)
class Steps:
    """Steps of one schedule under many settings; every entry is an array over the settings, or one number.

    Args:
        num_microbatches: M
        remat: "never", "always" or "except_last"
        forward_s, backward_s: by stage, of one micro-batch; a recomputation takes as long as a forward
        activation_bytes, gradient_bytes: of one micro-batch over each of the K - 1 boundaries
        bandwidth_bytes_per_s, latency_s: of every link
        setup_s: on the first stage, before its first action
        update_s: by stage, after its last action
    """

    num_microbatches: int
    remat: str
    forward_s: Sequence[Array]
    backward_s: Sequence[Array]
    activation_bytes: Sequence[Array] = ()
    gradient_bytes: Sequence[Array] = ()
    bandwidth_bytes_per_s: Array | float = np.inf
    latency_s: Array | float = 0.0
    setup_s: Array | float = 0.0
    update_s: Sequence[Array] = ()

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @property
    def num_recomputed(self) -> int:
        """Micro-batches that are computed a second time."""
        return {"never": 0, "always": self.num_microbatches, "except_last": self.num_microbatches - 1}[
            self.remat
        ]

    def makespan_s(self) -> Array:
        """Seconds of the step."""
        last, count = self.num_stages - 1, self.num_microbatches
        free: list[Array] = []
        inputs: list[Array] = [ZERO] * count
        for stage, forward_s in enumerate(self.forward_s):
            time = ZERO + (self.setup_s if stage == 0 else 0.0)
            ends = []
            for arrival in inputs:
                time = np.maximum(time, arrival) + forward_s
                ends.append(time)
            free.append(time)
            if stage < last:
                inputs = self._sent(ends, self.activation_bytes[stage])
        gradients: list[Array] = [ZERO] * count  # in the order of the drain, last micro-batch first
        makespan = ZERO
        for stage in range(last, -1, -1):
            time, ends = free[stage], []
            for number, arrival in enumerate(gradients):
                if number >= count - self.num_recomputed:
                    time = time + self.forward_s[stage]
                time = np.maximum(time, arrival) + self.backward_s[stage]
                ends.append(time)
            if stage:
                gradients = self._sent(ends, self.gradient_bytes[stage - 1])
            makespan = np.maximum(makespan, time + (self.update_s[stage] if self.update_s else 0.0))
        return makespan

    def _sent(self, ends: Sequence[Array], num_bytes: Array) -> list[Array]:
        """When messages arrive that queue for a link in this order."""
        takes = num_bytes / self.bandwidth_bytes_per_s
        free, arrivals = ZERO, []
        for end in ends:
            free = np.maximum(free, end) + takes
            arrivals.append(free + self.latency_s)
        return arrivals

    def shares(self) -> dict[str, dict[str, Array]]:
        """Where the time goes, in shares of it: of all accelerators together, and of the one that works most.

        What is lost to the link, to waiting for the set-up and to uneven stages is the difference of two
        steps, one with and one without it, at most what is idle; that is divided among the idle time of
        whichever is looked at.
        """
        k, m = self.num_stages, self.num_microbatches
        free = self._with_free_link()
        ready = replace(free, setup_s=0.0)
        steps = [each.makespan_s() for each in (self, free, ready, ready.balanced())]
        updates = self.update_s or [ZERO] * k
        setups = [ZERO + (self.setup_s if stage == 0 else 0.0) for stage in range(k)]
        computing = [m * (f + b) for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        again = [self.num_recomputed * f for f in self.forward_s]
        work = [computing, again, updates, setups]
        each = [np.broadcast_arrays(*part, steps[0])[:k] for part in work]
        busy = np.sum([np.stack(part) for part in each], axis=0)
        slowest = busy.argmax(axis=0)[None]
        whole = [np.stack(part).sum(axis=0) for part in each]
        alone = [np.take_along_axis(np.stack(part), slowest, 0)[0] for part in each]
        return {
            "all accelerators": _attributed(whole, steps, k),
            "the slowest accelerator": _attributed(alone, steps, 1),
        }

    def _with_free_link(self) -> Steps:
        nothing = [ZERO] * (self.num_stages - 1)
        return replace(
            self,
            activation_bytes=nothing,
            gradient_bytes=nothing,
            bandwidth_bytes_per_s=np.inf,
            latency_s=0.0,
        )

    def balanced(self) -> Steps:
        """The same work, evenly over the stages."""

        def mean(parts: Sequence[Array]) -> list[Array]:
            return [sum(parts, ZERO) / len(parts)] * len(parts) if parts else []

        return replace(
            self,
            forward_s=mean(self.forward_s),
            backward_s=mean(self.backward_s),
            update_s=mean(self.update_s),
        )


def _attributed(work: Sequence[Array], steps: Sequence[Array], count: int) -> dict[str, Array]:
    """Shares of `count` times the step, by reason, as planner/breakdown.py names and counts them."""
    step, free, ready, even = steps
    computing, again, update, setup = work
    total = count * step
    idle = total - sum(work)

    def lost(longer: Array, than: Array, left: Array, known: Array = ZERO) -> Array:
        found: Array = np.minimum(np.maximum(count * (longer - than) - known, 0), left)
        return found

    communication = lost(step, free, idle)
    waiting = lost(free, ready, idle - communication, setup)
    imbalance = lost(ready, even, idle - communication - waiting)
    parts = {
        "computation": computing,
        "recompute": again,
        "weight update": update,
        "setup": setup + waiting,
        "communication": communication,
        "load imbalance": imbalance,
        "bubble": idle - communication - waiting - imbalance,
    }
    return {part: seconds / total for part, seconds in parts.items()}

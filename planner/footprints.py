"""What the stages of one model hold, for the thousands of stages that a search asks for.

Stages of the same layers are one, wherever they stand. And where most layers of a stage are equal ones in a
row, what it holds follows from three shorter or longer rows of them:

    bytes                        x     every number of a footprint is a sum over layers, or the most of what
                         x             single moments hold; both are lines over the number of equal layers,
                 o                     or the highest of several lines. Such a curve that goes through three
         x   x                         points of one line is that line from the first to the last.
         4   5   n       16  layers

Where the three are no line the half in which n lies is asked the same, down to rows of a few layers, which
are added up one by one. What a grid shares out is then counted layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from gpipe_bench.pipeline.memory.profile import ModelProfile
from gpipe_bench.pipeline.memory.stages.footprint import Footprint, footprint
from gpipe_bench.pipeline.memory.stages.grids import HeldStage, Sharing, shared_stage
from gpipe_bench.pipeline.memory.stages.layerwise import Passes, passes
from gpipe_bench.pipeline.memory.stages.peaks import rule_of
from gpipe_bench.pipeline.memory.story import LayerProfile

FEWEST = 4
"""Equal layers in a row of which footprints are added up; of more than twice as many they are read off."""

T = TypeVar("T")


class _Row(NamedTuple):
    """Layers of a stage around a row of equal ones."""

    before: tuple[LayerProfile, ...]
    equal: LayerProfile
    after: tuple[LayerProfile, ...]
    is_last: bool

    def layers(self, count: int) -> tuple[LayerProfile, ...]:
        return (*self.before, *[self.equal] * count, *self.after)

    @property
    def key(self) -> tuple[object, ...]:
        return (*map(id, self.before), "", id(self.equal), "", *map(id, self.after), self.is_last)


class Footprints:
    """Of the stages of one model at one micro-batch size; stages of the same layers are one."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self._held: dict[tuple[Sharing, int], HeldStage] = {}
        self._whole: dict[int, Footprint] = {}
        self._passes: dict[int, Passes] = {}
        self._of_rows: dict[tuple[object, ...], Footprint] = {}
        self._lines: dict[tuple[object, ...], bool] = {}
        self._running: dict[tuple[int, str], list[int]] = {}
        self._keys: dict[range, int] = {}
        self._contents: dict[tuple[object, ...], int] = {}
        self._ends = _ends_of_rows(profile.layers)
        self._longest = max((end - start for start, end in enumerate(self._ends)), default=0)

    def key(self, stage: range) -> int:
        """Equal for stages that hold the same."""
        if stage not in self._keys:
            layers = self.profile.layers
            content = (*map(id, layers[stage.start : stage.stop]), stage.stop == len(layers))
            self._keys[stage] = self._contents.setdefault(content, len(self._contents))
        return self._keys[stage]

    def of(self, stage: range, sharing: Sharing) -> HeldStage:
        """What each process holds of a stage."""
        sharing = replace(sharing, replicas=min(sharing.replicas, 2))  # how many there are does not matter
        key = (sharing, self.key(stage))
        if key not in self._held:
            self._held[key] = shared_stage(self.whole(stage), lambda: self._passes_of(stage), sharing)
        return self._held[key]

    def whole(self, stage: range) -> Footprint:
        """The same where nobody else holds it."""
        key = self.key(stage)
        if key not in self._whole:
            start, count = self._row_in(stage)
            layers = self.profile.layers
            row = _Row(
                layers[stage.start : start], layers[start], layers[start + count : stage.stop],
                stage.stop == len(layers),
            )  # fmt: skip
            self._whole[key] = self._with(row, count)
        return self._whole[key]

    def between_steps(self, sharing: Sharing, optimizer: str) -> list[int]:
        """Bytes of weights, gradients and the optimizer's state of all layers before each, and of all."""
        key = (sharing.shards, optimizer)
        if key not in self._running:
            rule, held, known = rule_of(optimizer), [], dict[int, int]()
            for layer in self.profile.layers:
                if id(layer) not in known:
                    trained = sum(map(sharing.part, layer.trained_sizes))
                    counts = 4 * len(layer.trained_sizes) * rule.counts_steps
                    weights = sum(map(sharing.part, layer.parameter_sizes))
                    known[id(layer)] = weights + (1 + rule.state) * trained + counts
                held.append(known[id(layer)])
            self._running[key] = list(accumulate(held, initial=0))
        return self._running[key]

    def _passes_of(self, stage: range) -> Passes:
        key = self.key(stage)
        if key not in self._passes:
            layers = self.profile.layers
            loss = self.profile.loss if stage.stop == len(layers) else None
            self._passes[key] = passes(layers[stage.start : stage.stop], loss)
        return self._passes[key]

    def _row_in(self, stage: range) -> tuple[int, int]:
        """Where the longest row of equal layers of a stage begins, and how many there are."""
        found, start = (stage.start, 0), stage.start
        while start < stage.stop:
            end = min(self._ends[start], stage.stop)
            found = max(found, (start, end - start), key=lambda each: each[1])
            start = end
        return found

    def _with(self, row: _Row, count: int) -> Footprint:
        """Of so many equal layers in the row."""
        low = FEWEST
        while low < count:
            high = min(4 * low, self._longest)
            if count <= high:
                break
            low = high
        else:
            return self._added_up(row, count)
        while high - low > FEWEST:
            if self._is_line(row, low, high):
                first, last = self._added_up(row, low), self._added_up(row, high)
                middle = [row.equal] * (count - low)
                return _between(first, last, count - low, high - low, _sizes_behind(row, low, middle))
            half = (low + high) // 2
            low, high = (low, half) if count <= half else (half, high)
        return self._added_up(row, count)

    def _is_line(self, row: _Row, low: int, high: int) -> bool:
        key = (row.key, low, high)
        if key not in self._lines:
            ends = [_numbers(self._added_up(row, count)) for count in (low, low + 1, high)]
            self._lines[key] = len({*map(len, ends)}) == 1 and all(
                (c - a) == (b - a) * (high - low) for a, b, c in zip(*ends, strict=True)
            )
        return self._lines[key]

    def _added_up(self, row: _Row, count: int) -> Footprint:
        key = (row.key, count)
        if key not in self._of_rows:
            loss = self.profile.loss if row.is_last else None
            self._of_rows[key] = footprint(row.layers(count), loss)
        return self._of_rows[key]


def _ends_of_rows(layers: Sequence[LayerProfile]) -> list[int]:
    """For each layer, where the layers that are equal to it end."""
    ends = [len(layers)] * len(layers)
    for layer in range(len(layers) - 2, -1, -1):
        ends[layer] = ends[layer + 1] if layers[layer] is layers[layer + 1] else layer + 1
    return ends


def _sizes_behind(row: _Row, count: int, more: Sequence[LayerProfile]) -> tuple[int, tuple[int, ...]]:
    """Where the tensors of further layers stand among those of a row of `count`, and their sizes."""
    place = sum(len(layer.trained_sizes) for layer in (*row.before, *[row.equal] * count))
    return place, tuple(size for layer in more for size in layer.trained_sizes)


def _numbers(value: Any) -> list[int]:
    """All numbers of a footprint in their order, but those of single tensors."""
    if is_dataclass(value):
        return [
            number
            for each in fields(value)
            if each.name != "trained_sizes"
            for number in _numbers(getattr(value, each.name))
        ]
    if isinstance(value, tuple):
        return [number for each in value for number in _numbers(each)]
    return [] if value is None else [int(value)]


def _between(first: T, last: T, step: int, steps: int, tensors: tuple[int, tuple[int, ...]]) -> T:
    """The footprint `step` of `steps` on the way from one to another."""

    def on_the_way(a: Any, b: Any) -> Any:
        if is_dataclass(a) and not isinstance(a, type):
            changes = {}
            for each in fields(a):
                one, other = getattr(a, each.name), getattr(b, each.name)
                if each.name == "trained_sizes":
                    place, more = tensors
                    changes[each.name] = (*one[:place], *more, *one[place:])
                else:
                    changes[each.name] = on_the_way(one, other)
            return replace(a, **changes)
        if isinstance(a, tuple):
            return tuple(map(on_the_way, a, b))
        if a is None or isinstance(a, bool):
            return a
        if isinstance(a, tuple):
            return tuple(map(on_the_way, a, b))
        return a + (b - a) * step // steps

    found: T = on_the_way(first, last)
    return found

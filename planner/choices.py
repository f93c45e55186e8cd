"""What the stages of a worker recompute: the least with which they fit.

More recomputation never makes a step shorter: the same actions in the same order, some of them longer. So of
one stage the first of `times.REMATS` that fits is the best one, whatever the other stages do. Several stages
share their worker's memory; there, of two choices that fit, one is out of the question only if it recomputes
at least as much on every stage. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from gpipe_bench.planner.layer_times import REMATS

Fits = Callable[[int, tuple[range, ...], tuple[str, ...]], bool]
"""Whether a worker has room for stages of these layers, in the model's order, that recompute so much."""


class Choices:
    """The choices of every worker that may be in a best step, found once for each set of stages."""

    def __init__(self, fits: Fits | None, remats: Sequence[str]) -> None:
        order = {remat: index for index, remat in enumerate(REMATS)}
        self._fits, self._remats = fits, sorted(remats, key=order.__getitem__)
        self._known: dict[tuple[int, tuple[range, ...]], tuple[tuple[str, ...], ...]] = {}
        self.asked = 0  # how often it was to be found out whether something fits

    def of(self, worker: int, stages: tuple[range, ...]) -> tuple[tuple[str, ...], ...]:
        """None of them recomputes as much as another one on every stage; none at all where nothing fits."""
        key = (worker, stages)
        if key not in self._known:
            self._known[key] = self._least(worker, stages)
        return self._known[key]

    def _least(self, worker: int, stages: tuple[range, ...]) -> tuple[tuple[str, ...], ...]:
        levels = range(len(self._remats))
        found: list[tuple[int, ...]] = []
        for choice in sorted(product(levels, repeat=len(stages)), key=lambda each: (sum(each), each)):
            if any(all(a <= b for a, b in zip(less, choice, strict=True)) for less in found):
                continue
            remat = tuple(self._remats[level] for level in choice)
            self.asked += self._fits is not None
            if self._fits is None or self._fits(worker, stages, remat):
                found.append(choice)
        return tuple(tuple(self._remats[level] for level in choice) for choice in found)

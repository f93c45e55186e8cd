"""Seconds of the layers of a model, so that those of any stage are two look-ups.

A search looks at hundreds of thousands of stages. Sums over layers are differences of running sums, and what
a stage recomputes is its forward once more. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import NamedTuple

REMATS = ("never", "except_last", "always")
"""What a stage may recompute, what takes least first."""


class StageTimes(NamedTuple):
    """Seconds of a stage: of each action of one micro-batch, and after its last action."""

    forward_s: float
    backward_s: float  # B, or I where the schedule splits backwards
    weights_s: float  # W
    after_s: float


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of every layer on one micro-batch, and what lies between the layers.

    Args:
        forward_s: F, and a recomputation
        backward_s: B, or I where the schedule splits backwards
        weights_s: W; empty where it does not
        activation_bytes, gradient_bytes: between layer i and i + 1, of one micro-batch each way
        update_s: of the optimizer
        reduce_s: of summing the layer's gradients over replicas, which begins inside the last backward

    Raises:
        ValueError: no layers, numbers that do not go with them, seconds that are negative or not finite.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    weights_s: Sequence[float] = ()
    activation_bytes: Sequence[float] = ()
    gradient_bytes: Sequence[float] = ()
    update_s: Sequence[float] = ()
    reduce_s: Sequence[float] = ()
    _sums: dict[str, list[float]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        layers = len(self.forward_s)
        if not layers:
            raise ValueError("a model without layers cannot be cut; give the seconds of one layer or more")
        lengths = {
            "forward_s": layers, "backward_s": layers, "weights_s": layers, "update_s": layers,
            "reduce_s": layers, "activation_bytes": layers - 1, "gradient_bytes": layers - 1,
        }  # fmt: skip
        for name, length in lengths.items():
            values = getattr(self, name)
            if len(values) != length and (len(values) or name == "backward_s"):
                raise ValueError(f"{name} has {len(values)} entries for {layers} layers; give {length}")
            for index, value in enumerate(values):
                if not 0 <= value < inf:
                    raise ValueError(f"{name}[{index}] is {value}; it must be finite and not negative")
            if name.endswith("_s"):
                self._sums[name] = list(accumulate(values or [0.0] * layers, initial=0.0))

    @property
    def num_layers(self) -> int:
        return len(self.forward_s)

    def stage(self, start: int, stop: int) -> StageTimes:
        """Of layers start..stop - 1. What the last backward does not hide of the sums over replicas comes after."""
        sums = self._sums
        forward, backward, weights, update, reduce = (
            sums[name][stop] - sums[name][start]
            for name in ("forward_s", "backward_s", "weights_s", "update_s", "reduce_s")
        )
        return StageTimes(forward, backward, weights, update + max(0.0, reduce - backward - weights))

    def ahead_s(self, layer: int) -> float:
        """Forwards of all layers before this one."""
        return self._sums["forward_s"][layer]

    def back_s(self, layer: int) -> float:
        """Backwards, or I, of all layers before this one."""
        return self._sums["backward_s"][layer]

    def beyond_s(self, layer: int) -> float:
        """There and back through this layer and all after it."""
        ahead, back = self._sums["forward_s"], self._sums["backward_s"]
        return ahead[-1] - ahead[layer] + back[-1] - back[layer]

    def message(self, boundary: int) -> tuple[float, float]:
        """Bytes over a cut in front of layer `boundary`, forward and back."""
        if not self.activation_bytes:
            return 0.0, 0.0
        ahead = self.activation_bytes[boundary - 1]
        return ahead, self.gradient_bytes[boundary - 1] if self.gradient_bytes else ahead

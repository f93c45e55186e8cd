"""Seconds of the layers of a model, so that those of any stage are two look-ups.

A search looks at hundreds of thousands of stages. Sums over layers are differences of running sums, and what
a stage recomputes is its forward once more. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import NamedTuple

REMATS = ("never", "except_last", "always")
"""What a stage may recompute, what takes least first."""


_SUMMED = ("forward_s", "again_s", "backward_s", "inputs_s", "weights_s", "update_s", "reduce_s")


class StageTimes(NamedTuple):
    """Seconds of a stage: of each action of one micro-batch, and after its last action."""

    forward_s: float
    again_s: float  # R
    backward_s: float  # B
    inputs_s: float  # I
    weights_s: float  # W
    after_s: float


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of every layer on one micro-batch, and what lies between the layers.

    Args:
        forward_s: F
        backward_s: B
        inputs_s, weights_s: I and W; empty for schedules that have none
        activation_bytes, gradient_bytes: between layer i and i + 1, of one micro-batch each way
        update_s: of the optimizer
        reduce_s: of summing the layer's gradients over replicas, which begins inside the last backward
        again_s: R; as F if not given
        action_s: of an action of a stage whatever its layers, by kind

    Raises:
        ValueError: no layers, numbers that do not go with them, seconds that are negative or not finite.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    inputs_s: Sequence[float] = ()
    weights_s: Sequence[float] = ()
    activation_bytes: Sequence[float] = ()
    gradient_bytes: Sequence[float] = ()
    update_s: Sequence[float] = ()
    reduce_s: Sequence[float] = ()
    again_s: Sequence[float] = ()
    action_s: Mapping[str, float] = field(default_factory=dict)
    _sums: dict[str, list[float]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        layers = len(self.forward_s)
        if not layers:
            raise ValueError("a model without layers cannot be cut; give the seconds of one layer or more")
        lengths = dict.fromkeys(_SUMMED, layers)
        lengths |= dict.fromkeys(("activation_bytes", "gradient_bytes"), layers - 1)
        for name, length in lengths.items():
            values = getattr(self, name)
            if len(values) != length and (len(values) or name == "backward_s"):
                raise ValueError(f"{name} has {len(values)} entries for {layers} layers; give {length}")
            for index, value in enumerate(values):
                if not 0 <= value < inf:
                    raise ValueError(f"{name}[{index}] is {value}; it must be finite and not negative")
            if name.endswith("_s"):
                self._sums[name] = list(accumulate(values or [0.0] * layers, initial=0.0))
        least_s = [a + b for a, b in zip(self.inputs_s, self.weights_s, strict=True)]
        least_s = list(map(min, self.backward_s, least_s)) if least_s else list(self.backward_s)
        least_s = [a + b for a, b in zip(self.forward_s, least_s, strict=True)]
        self._sums["least_s"] = list(accumulate(least_s, initial=0.0))
        back_s = list(map(min, self.backward_s, self.inputs_s)) if self.inputs_s else self.backward_s
        self._sums["back_s"] = list(accumulate(back_s, initial=0.0))
        if not self.again_s:
            self._sums["again_s"] = self._sums["forward_s"]

    @property
    def num_layers(self) -> int:
        return len(self.forward_s)

    def stage(self, start: int, stop: int) -> StageTimes:
        """Of layers start..stop - 1; what its last backward does not hide of sums over replicas is after."""
        sums, more = self._sums, self.action_s
        forward, again, backward, inputs, weights, update, reduce = (
            sums[name][stop] - sums[name][start] for name in _SUMMED
        )
        halved = bool(self.inputs_s)
        hidden = weights if halved else backward
        return StageTimes(
            forward + more.get("F", 0.0),
            again + more.get("R", 0.0),
            backward + more.get("B", 0.0),
            inputs + more.get("I", 0.0) * halved,
            weights + more.get("W", 0.0) * halved,
            update + max(0.0, reduce - hidden),
        )

    def least_s(self, start: int, stop: int) -> float:
        """Work of layers start..stop - 1 on one micro-batch, its backward whole or in halves."""
        return self._sums["least_s"][stop] - self._sums["least_s"][start]

    def ahead_s(self, layer: int) -> float:
        """Forwards of all layers before this one."""
        return self._sums["forward_s"][layer]

    def back_s(self, layer: int) -> float:
        """Until a gradient has been back through all layers before this one."""
        return self._sums["back_s"][layer]

    def beyond_s(self, layer: int) -> float:
        """There and back through this layer and all after it."""
        ahead, back = self._sums["forward_s"], self._sums["back_s"]
        return ahead[-1] - ahead[layer] + back[-1] - back[layer]

    def message(self, boundary: int) -> tuple[float, float]:
        """Bytes over a cut in front of layer `boundary`, forward and back."""
        if not self.activation_bytes:
            return 0.0, 0.0
        ahead = self.activation_bytes[boundary - 1]
        return ahead, self.gradient_bytes[boundary - 1] if self.gradient_bytes else ahead

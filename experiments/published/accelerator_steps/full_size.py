"""A model at its published size: its cuts into stages, its steps on an accelerator, and what fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.experiments.published.accelerator_steps.layout import Steps
from gpipe_bench.experiments.published.accelerator_steps.memory import Memory
from gpipe_bench.experiments.published.accelerator_steps.operations import work_of
from gpipe_bench.experiments.published.accelerator_steps.work import Work
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.planner.accelerators import (
    HOST_BYTES_PER_S,
    UPDATE_BYTES,
    Accelerator,
)

Array = NDArray[np.float64]

RULES = {"least variance": "variance", "cumulative share": "cumulative"}
"""Rules of results/unknowns.toml by their names in pipeline/plan/partition.py."""

Setup = Literal["none", "the first accelerator", "the host, then sent"]


@dataclass(frozen=True)
class FullSize:
    """A model of the zoo with its options, and the optimizer it is trained with."""

    model: str
    options: Mapping[str, Any]
    optimizer: str = "rmsprop"
    _cuts: dict[tuple[str, str, int], Partition | None] = field(default_factory=dict, repr=False)

    @cached_property
    def work(self) -> Work:
        """Its operations."""
        return work_of(self.model, self.options)

    def memory(self, activation_format: str) -> Memory:
        """Its memory with activations of a format."""
        return Memory.of(self.model, self.options, activation_format)

    def cut(self, cost: str, rule: str, num_stages: int) -> Partition | None:
        """Its layers in stages, by an allowed cost and rule; None where the rule leaves a stage empty."""
        key = (cost, rule, num_stages)
        if key not in self._cuts:
            costs = self._costs(cost)
            try:
                self._cuts[key] = partition(costs, num_stages, RULES[rule])
            except ValueError:
                self._cuts[key] = None
        return self._cuts[key]

    def _costs(self, cost: str) -> tuple[float, ...]:
        match cost:
            case "operations":
                return tuple(float(layer.flops(1)) for layer in self.work.layers)
            case "parameters":
                return tuple(map(float, self.work.parameters))
            case "layers":
                return (1.0,) * len(self.work.layers)
        raise ValueError(f"unknown cost {cost!r} of a layer: use operations, parameters or layers")

    def steps(
        self,
        accelerator: Accelerator,
        activation_format: str,
        cuts: Sequence[Partition | None],
        batches: Sequence[int],
        num_microbatches: int,
        *,
        remat: str = "always",
        shares_of_peak: Sequence[float],
        link_bytes_per_s: Sequence[float],
        link_latency_s: Sequence[float],
        setup: Setup = "the first accelerator",
    ) -> Steps:
        """Steps over (cut, batch, share of the peak, bandwidth, latency), in these dimensions.

        Micro-batches are of the next whole size. A cut that is None gives NaN, as does a batch with fewer
        examples than micro-batches. A single micro-batch needs no set-up.
        """
        known = next((cut for cut in cuts if cut is not None), None)
        if known is None:
            raise ValueError("no rule cuts these layers into so many stages")
        stages = range(len(known))
        forward, backward = np.full((2, len(stages), len(cuts), len(batches), len(shares_of_peak)), np.nan)
        sent, returned = np.full((2, len(stages) - 1, len(cuts), len(batches)), np.nan)
        update = np.zeros((len(stages), len(cuts)))
        for column, batch in enumerate(batches):
            if batch < num_microbatches:
                continue
            examples = -(-batch // num_microbatches)
            layers = self.work.seconds(accelerator, activation_format, examples, tuple(shares_of_peak))
            ahead = np.cumsum([np.zeros(len(shares_of_peak)), *(layer.forward for layer in layers)], axis=0)
            back = np.cumsum([np.zeros(len(shares_of_peak)), *(layer.backward for layer in layers)], axis=0)
            for row, cut in enumerate(cuts):
                for number, span in enumerate(cut or ()):
                    forward[number, row, column] = ahead[span.stop] - ahead[span.start]
                    backward[number, row, column] = back[span.stop] - back[span.start]
                    if number < len(sent):
                        last = self.work.layers[span.stop - 1]
                        sent[number, row, column] = last.output_bytes(examples, activation_format)
                        returned[number, row, column] = last.gradient_bytes(examples, activation_format)
        for row, cut in enumerate(cuts):
            for number, span in enumerate(cut or ()):
                parameters = sum(self.work.parameters[layer] for layer in span)
                update[number, row] = parameters * UPDATE_BYTES[self.optimizer] / accelerator.bytes_per_s
        return Steps(
            num_microbatches=num_microbatches,
            remat=remat,
            forward_s=[each[..., None, None] for each in forward],
            backward_s=[each[..., None, None] for each in backward],
            activation_bytes=[each[..., None, None, None] for each in sent],
            gradient_bytes=[each[..., None, None, None] for each in returned],
            bandwidth_bytes_per_s=np.array(link_bytes_per_s)[:, None],
            latency_s=np.array(link_latency_s),
            setup_s=self._setup_s(
                accelerator, activation_format, batches, setup if num_microbatches > 1 else "none"
            ),
            update_s=[each[:, None, None, None, None] for each in update],
        )

    def _setup_s(
        self, accelerator: Accelerator, activation_format: str, batches: Sequence[int], setup: Setup
    ) -> Array:
        """Dividing and reshaping a mini-batch: read and written once where it lies, or sent by the host."""
        match setup:
            case "the first accelerator":
                seconds = [
                    2 * self.work.input_bytes(batch, activation_format, accelerator) / accelerator.bytes_per_s
                    for batch in batches
                ]
            case "the host, then sent":
                seconds = [
                    sum(tensor.num_bytes(batch, "float32") for tensor in self.work.inputs) / HOST_BYTES_PER_S
                    for batch in batches
                ]
            case _:
                seconds = [0.0 for _ in batches]
        return np.array(seconds)[:, None, None, None]

    def fits(
        self,
        activation_format: str,
        cuts: Sequence[Partition | None],
        batches: Sequence[int],
        num_microbatches: int,
        caps: Sequence[float],
        *,
        remat: str = "always",
    ) -> NDArray[np.bool_]:
        """Whether a step stays under each cap, over (cut, batch, cap); batches in rising order."""
        memory = self.memory(activation_format)
        found = np.zeros((len(cuts), len(batches), len(caps)), dtype=bool)
        known: dict[Partition, NDArray[np.bool_]] = {}
        for row, cut in enumerate(cuts):
            if cut is None:
                continue
            if cut not in known:
                fitting = np.zeros((len(batches), len(caps)), dtype=bool)
                for column, batch in enumerate(batches):
                    if batch < num_microbatches:
                        continue
                    examples = -(-batch // num_microbatches)
                    peak = memory.peak_bytes(cut, num_microbatches, examples, remat, self.optimizer)
                    fitting[column] = [peak <= cap for cap in caps]
                    if not fitting[column].any():  # a larger batch takes no less
                        break
                known[cut] = fitting
            found[row] = known[cut]
        return found

"""Cutting a model so that its fullest stage is as small as possible, or fits at all.

The peak of a stage is no sum over its layers (neighbours share storages, boundaries differ in width), so the
split is searched over the modelled peaks of all stages that could occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.footprint import Footprint, footprint
from pipeline.memory import OPTIMIZERS, StageMemory, demands, stage_memory
from pipeline.partition import Partition, partition_by
from pipeline.profile import LayerProfile
from pipeline.schedule import Schedule


class StagePeaks:
    """Modelled peaks of all contiguous stages of one model under one schedule, each computed once."""

    def __init__(
        self,
        layers: Sequence[LayerProfile],
        loss: LayerProfile,
        schedule: Schedule,
        optimizer: str = "rmsprop",
        *,
        receive_ahead: int = 0,
    ) -> None:
        if not layers:
            raise ValueError("a model without layers cannot be cut into stages")
        patterns = {
            tuple(replace(demand, when="") for demand in demands(row, receive_ahead))
            for row in schedule.actions
        }
        if len(patterns) > 1:
            raise ValueError(
                f"stages of schedule {schedule.name!r} hold different numbers of micro-batches: "
                "cut by costs instead (pipeline.partition)"
            )
        self.layers, self.loss, self.schedule, self.optimizer = tuple(layers), loss, schedule, optimizer
        self.receive_ahead = receive_ahead
        self._footprints: dict[tuple[tuple[int, ...], bool], Footprint] = {}
        self._peaks: dict[tuple[int, bool], int] = {}

    def memory(self, start: int, stop: int) -> StageMemory:
        """The stage of layers start..stop - 1 at its fullest."""
        return stage_memory(
            self._footprint(start, stop),
            self.schedule.actions[0],
            self.optimizer,
            is_first=start == 0,
            receive_ahead=self.receive_ahead,
        )

    def peak(self, start: int, stop: int) -> int:
        """Bytes of that stage. Equal layers in a row are looked at once, wherever they stand."""
        key = (id(self._footprint(start, stop)), start == 0)
        if key not in self._peaks:
            self._peaks[key] = self.memory(start, stop).peak
        return self._peaks[key]

    def _footprint(self, start: int, stop: int) -> Footprint:
        is_last = stop == len(self.layers)
        key = (tuple(map(id, self.layers[start:stop])), is_last)
        if key not in self._footprints:
            self._footprints[key] = footprint(self.layers[start:stop], self.loss if is_last else None)
        return self._footprints[key]

    def floor(self) -> list[int]:
        """Bytes that each layer adds to any stage, whatever stands beside it."""
        state = 1 + OPTIMIZERS[self.optimizer].state
        # A graph stands beside the gradients from the second backward of a step on.
        both = any(
            demand.after_first_backward and demand.moment in ("forward", "later")
            for demand in demands(self.schedule.actions[0], self.receive_ahead)
        )
        return [
            state * layer.parameter_bytes + layer.gradient_bytes + both * layer.first.kept_inside
            for layer in self.layers
        ]

    def partition(self, cap_bytes: int) -> Partition | None:
        """The split whose fullest stage is smallest, None if no split keeps every stage within the cap."""
        return partition_by(
            self.peak, len(self.layers), self.schedule.num_stages, cap=cap_bytes, floor=self.floor()
        )

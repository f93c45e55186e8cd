"""Cutting a model so that its fullest stage is as small as possible, or fits at all.

The peak of a stage is no sum over its layers (neighbours share storages, boundaries differ in width), so the
split is searched over the modelled peaks of all stages that could occur.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.partition import Partition, can_partition_by, partition_by
from ..plan.schedule import Kind, Schedule, derived
from .counts import Step, steps
from .peaks import Optimizer, StageMemory
from .stage_bytes import StageBytes, stage_bytes
from .trace import LayerProfile
from .workers import fullest_moment


@derived
def _common_steps(schedule: Schedule, receive_ahead: int) -> tuple[Step, ...]:
    """Returns the steps that all stages of the schedule share; cached, since a search asks repeatedly."""
    patterns = {
        tuple((step.alike, step.counts) for step in steps(row, receive_ahead)) for row in schedule.actions
    }
    if len(patterns) > 1:
        raise ValueError(
            f"stages of schedule {schedule.name!r} hold different numbers of micro-batches: "
            "cut by costs instead (pipeline.partition)"
        )
    return steps(schedule.actions[0], receive_ahead)


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
        self.layers, self.loss, self.schedule, self.optimizer = tuple(layers), loss, schedule, optimizer
        self._steps, self._receive_ahead = _common_steps(schedule, receive_ahead), receive_ahead
        self._num_microbatches = sum(action.kind is Kind.F for action in schedule.actions[0])
        # Stages with the same sequence of layers share a content number, keyed by the number of the sequence
        # without its last layer, and that layer.
        self._contents: dict[tuple[int, int], int] = {}
        self._latest = (-1, -1, -1)  # start, stop and content asked for last
        self._stages: dict[tuple[int, bool], StageBytes] = {}
        self._peaks: dict[tuple[int, bool, bool], int] = {}

    def memory(self, start: int, stop: int) -> StageMemory:
        """The stage of layers start..stop - 1 at its fullest."""
        is_last = stop == len(self.layers)
        key = (self._content(start, stop), is_last)
        if key not in self._stages:
            self._stages[key] = stage_bytes(self.layers[start:stop], self.loss if is_last else None)
        return fullest_moment(
            self._stages[key],
            self._steps,
            self._num_microbatches,
            self.optimizer,
            is_first=start == 0,
            receive_ahead=self._receive_ahead,
        )

    def peak(self, start: int, stop: int) -> int:
        """Bytes of that stage. Equal layers in a row are looked at once, wherever they stand."""
        key = (self._content(start, stop), start == 0, stop == len(self.layers))
        peak = self._peaks.get(key)
        if peak is None:
            peak = self._peaks[key] = self.memory(start, stop).peak
        return peak

    def _content(self, start: int, stop: int) -> int:
        first, last, content = self._latest
        if first != start or last > stop:
            last, content = start, -1
        for layer in self.layers[last:stop]:
            content = self._contents.setdefault((content, id(layer)), len(self._contents))
        self._latest = (start, stop, content)
        return content

    def floor(self) -> list[int]:
        """Bytes that each layer adds to any stage, whatever stands beside it."""
        state = Optimizer.named(self.optimizer).state
        # A graph stands beside the gradients from the second backward of a step on.
        both = any(
            step.counts.after_backward
            and step.action.kind in ((Kind.R, Kind.B) if step.recomputed else (Kind.F, Kind.R, Kind.B))
            for step in self._steps
        )
        return [
            layer.parameter_bytes
            + state * sum(layer.trained_sizes)
            + layer.gradient_bytes
            + both * layer.first.kept_inside
            for layer in self.layers
        ]

    def partition(self, cap_bytes: int) -> Partition | None:
        """The split whose fullest stage is smallest, None if no split keeps every stage within the cap."""
        return partition_by(
            self.peak, len(self.layers), self.schedule.num_stages, cap=cap_bytes, floor=self.floor()
        )

    def fits(self, cap_bytes: int) -> bool:
        """Whether `partition` finds a split under the cap, without looking for the best one."""
        return can_partition_by(
            self.peak, len(self.layers), self.schedule.num_stages, cap=cap_bytes, floor=self.floor()
        )

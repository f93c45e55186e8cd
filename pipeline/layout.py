"""Which layers, cut where, are whose: what the arguments of a pipeline come to in this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpipe_bench.pipeline.arguments import (
    Automatic,
    Device,
    costs_of,
    devices_of,
    named_layers,
    num_stages_of,
    refuse_split_statistics,
    refuse_split_ties,
    schedule_of,
    worker_of,
)
from gpipe_bench.pipeline.model.parts import OwnLayers
from gpipe_bench.pipeline.plan.auto import Calibration
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.remat import Remat
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.ranks.connect import Network
from gpipe_bench.pipeline.ranks.tied import Tie, find_ties
from gpipe_bench.pipeline.stage.trees import Tree


@dataclass(frozen=True)
class Layout:
    """The layers of the whole model by name, in stages, and what of it is in this process.

    Args:
        named: the layers with the names that the plain model's `state_dict` uses
        schedule: what the first step takes
        calibration: what finds a better schedule, where that is asked for
        partition: the layer indices of each stage
        local: the stages of this process
        devices: of every stage
        ties: weights with several places in the model
    """

    named: Sequence[tuple[str, nn.Module]]
    schedule: Schedule
    calibration: Calibration | None
    partition: Partition
    local: Sequence[int]
    devices: tuple[torch.device, ...]
    ties: tuple[Tie, ...]

    @property
    def modules(self) -> list[nn.Module]:
        return [layer for _, layer in self.named]

    def layers(self, *, move: bool) -> dict[str, nn.Module]:
        """The layers of this process, by name; moved to the devices of their stages, if asked to."""
        found = {}
        for index in self.local:
            span, device = self.partition[index], self.devices[index]
            for name, layer in self.named[span.start : span.stop]:
                found[name] = layer.to(device) if move else layer
        return found


def layout_of(
    layers: nn.Module | Iterable[nn.Module],
    network: Network | None,
    *,
    num_stages: int | None,
    num_microbatches: int,
    schedule: str | Schedule,
    automatic: Automatic,
    num_workers: int | None,
    remat: Remat,
    cost: str | Sequence[float] | None,
    example: Tree | None,
    devices: Device | Sequence[Device] | None,
) -> Layout:
    """The arguments of `Pipeline`, completed; `ValueError` names one that does not fit and what would."""
    named = named_layers(layers)
    modules = [layer for _, layer in named]
    calibration: Calibration | None = None
    if num_stages is None:
        num_stages = num_stages_of(schedule, network, num_workers)
    sizes = (num_stages, num_microbatches, remat, num_workers, None if network is None else network.size)
    if schedule == "auto":
        schedule, calibration = automatic.begin(*sizes)
    else:
        automatic.refuse(schedule)
        schedule = schedule_of(schedule, *sizes)
    cuts = partition(costs_of(cost, modules, example), num_stages)
    local: Sequence[int] = range(num_stages)
    if network is not None:
        local = schedule.stages_of(worker_of(network, schedule))
    places = devices_of(devices, num_stages, [modules[i] for k in local for i in cuts[k]])
    refuse_split_statistics(modules, cuts)
    homes = [schedule.worker(stage) for stage in range(num_stages)]
    if network is None:
        refuse_split_ties(modules, cuts, places)
        homes = [0] * num_stages
    ties = find_ties(
        [("", layer) for layer in modules] if isinstance(layers, OwnLayers) else named,
        cuts,
        homes,
    )
    return Layout(named, schedule, calibration, cuts, local, places, ties)

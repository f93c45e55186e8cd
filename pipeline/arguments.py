"""The arguments of a pipeline, checked and completed.

Whatever does not fit is a `ValueError` that says what would.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_bench.pipeline import devices as accelerators  # `devices` is an argument here
from gpipe_bench.pipeline.memory.cost import layer_costs
from gpipe_bench.pipeline.plan.schedule import Schedule, check_sizes
from gpipe_bench.pipeline.plan.schedules.known import NAMED, named
from gpipe_bench.pipeline.ranks.network import Network
from gpipe_bench.pipeline.stage.microbatch import Tree

Device = torch.device | str


def named_layers(layers: nn.Module | Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The layers by the names that the plain model's `state_dict` uses."""
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        named = [(name, layer) for name, layer in layers._modules.items() if layer is not None]
    elif isinstance(layers, nn.Module):
        raise ValueError(
            f"layers is a {type(layers).__name__}; a pipeline needs a sequence of layers, such as an "
            "nn.Sequential"
        )
    else:
        named = [(str(index), layer) for index, layer in enumerate(layers)]
    for name, layer in named:
        if not isinstance(layer, nn.Module):
            raise ValueError(f"layer {name} is a {type(layer).__name__}; every layer must be an nn.Module")
    if not named:
        raise ValueError("layers is empty; a pipeline needs at least one layer")
    return named


def schedule_of(
    schedule: str | Schedule,
    num_stages: int,
    num_microbatches: int,
    remat: str,
    num_workers: int | None = None,
    num_ranks: int | None = None,
) -> Schedule:
    """The schedule by its name, or as given if the numbers agree.

    Without `num_workers` a worker has as many stages as its schedule's name says. If any number will do,
    the stages are shared by `num_ranks`, or each worker has two.
    """
    check_sizes(num_stages, num_microbatches, "never")
    if isinstance(schedule, Schedule):
        if (schedule.num_stages, schedule.num_microbatches) != (num_stages, num_microbatches):
            raise ValueError(
                f"the schedule is for {schedule.num_stages} stages and {schedule.num_microbatches} "
                f"micro-batches, not for num_stages={num_stages} and num_microbatches={num_microbatches}"
            )
        if num_workers not in (None, schedule.num_workers):
            raise ValueError(
                f"the schedule is for {schedule.num_workers} workers, not for num_workers={num_workers}; "
                "leave num_workers out, or give a schedule for as many"
            )
        return schedule
    if schedule not in NAMED:
        raise ValueError(f"schedule is {schedule!r}; choose one of {', '.join(NAMED)} or give a Schedule")
    fixed = NAMED[schedule].stages_per_worker
    if num_workers is None:
        num_workers = num_ranks if fixed is None and num_ranks else max(1, num_stages // (fixed or 2))
    if num_workers < 1 or num_stages % num_workers:
        raise ValueError(
            f"num_stages={num_stages} cannot be shared by num_workers={num_workers} workers; give a multiple"
        )
    per_worker = num_stages // num_workers
    if fixed not in (None, per_worker):
        raise ValueError(
            f"schedule {schedule!r} has {fixed} stage{'s' * (fixed != 1)} per worker, so num_stages="
            f"{num_stages} is not for {num_workers} workers; give num_stages={fixed * num_workers}"
        )
    return named(schedule, num_workers, num_microbatches, remat=remat, stages_per_worker=per_worker)


def costs_of(
    cost: str | Sequence[float] | None, layers: Sequence[nn.Module], example: Tree | None
) -> Sequence[float]:
    """One number per layer, to balance the stages by."""
    if cost is None or cost == "parameters":
        # One more each, so that layers without parameters spread too.
        return [1 + sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    if cost == "auto":
        if example is None:
            raise ValueError(
                "cost='auto' estimates each layer on an example; pass example= with a micro-batch"
            )
        return layer_costs(layers, example)
    if isinstance(cost, str):
        raise ValueError(f"cost is {cost!r}; choose 'parameters', 'auto' or give one number per layer")
    if len(cost) != len(layers):
        raise ValueError(f"cost has {len(cost)} numbers for {len(layers)} layers; give one per layer")
    return cost


def devices_of(
    devices: Device | Sequence[Device] | None, num_stages: int, layers: Sequence[nn.Module]
) -> tuple[torch.device, ...]:
    """The device of every stage; without `devices`, where the `layers` of this process are."""
    if devices is None:
        found = {parameter.device for layer in layers for parameter in layer.parameters()} or {
            torch.device("cpu")
        }
        if len(found) > 1:
            raise ValueError(
                f"the layers are on {', '.join(sorted(map(str, found)))}; pass devices= with one device "
                "per stage"
            )
        return (found.pop(),) * num_stages
    if isinstance(devices, str | torch.device):
        return (_exact(devices),) * num_stages
    if len(devices) != num_stages:
        raise ValueError(
            f"{len(devices)} devices for {num_stages} stages; give one per stage, or one for all"
        )
    return tuple(_exact(device) for device in devices)


def _exact(device: Device) -> torch.device:
    """The device with its index, so that it compares equal to the device of a tensor on it."""
    found = torch.device(device)
    if found.index is None and accelerators.is_accelerator(found):
        return accelerators.current(found.type)
    return found


def refuse_split_ties(
    layers: Sequence[nn.Module], spans: Sequence[range], homes: Sequence[torch.device]
) -> None:
    """A parameter on two devices of one process would be two parameters; `homes` are those of the stages."""
    first: dict[nn.Parameter, int] = {}
    for stage, span in enumerate(spans):
        for index in span:
            for name, parameter in layers[index].named_parameters():
                other = first.setdefault(parameter, stage)
                if homes[other] != homes[stage]:
                    raise ValueError(
                        f"parameter {name!r} of layer {index} is shared by stages {other} and {stage}, but "
                        "each has a device of its own; keep tied layers in one stage, or the stages in "
                        "processes of their own"
                    )


def worker_of(network: Network, schedule: Schedule) -> int:
    """The worker that this process is: its rank in the group, which has one for each worker."""
    size = network.size
    if size != schedule.num_workers:
        holders = "workers" if schedule.placement else "stages"
        raise ValueError(
            f"the process group has {size} ranks for {schedule.num_workers} {holders}; it needs one rank per "
            f"{holders[:-1]}"
        )
    rank = network.rank
    if rank < 0:
        raise ValueError(
            "this process is not in the process group; build the pipeline on the group's ranks only"
        )
    return rank


def refuse_split_statistics(layers: Sequence[nn.Module], spans: Sequence[range]) -> None:
    """One batch normalization in two stages would move its averages once for each."""
    first: dict[nn.Module, int] = {}
    for stage, span in enumerate(spans):
        for index in span:
            for module in layers[index].modules():
                tracked = isinstance(module, _BatchNorm) and module.running_mean is not None
                if tracked and first.setdefault(module, stage) != stage:
                    raise ValueError(
                        f"a batch normalization of layer {index} is also in stage {first[module]}, so that "
                        "its moving averages would depend on the cut; keep both in one stage"
                    )

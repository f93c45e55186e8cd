"""Checks the arguments of a `Pipeline`, and finds the layers of each stage and the stages of this process.

An argument that does not fit is a `ValueError` that says what would fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from . import devices as accelerators  # `devices` is an argument here
from .memory.profile import layer_costs
from .mesh.gradients import find_ties
from .model.parts import OwnLayers
from .plan.named import NAMED, named, shared_by, suggestion
from .plan.partition import Partition
from .plan.partition import partition as balanced
from .plan.schedule import Remat, Schedule, check_sizes
from .ranks.connect import Network
from .stage.buffers import refuse_unsupported
from .stage.compiled import BACKEND, Compilation
from .stage.trees import Tree, portals_of

Device = torch.device | str
_STAGES_PER_WORKER = 2  # default for schedules that allow any number


# The types of each argument, and what to give instead of a value of another type.
_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "num_microbatches": (int, "a whole number, such as 4"),
    "num_stages": (int | None, "a whole number, such as 4"),
    "num_workers": (int | None, "a whole number, such as 4"),
    "timeout_s": (int | float, "seconds, more than 0, such as 600"),
    "group": (
        dist.ProcessGroup | Network | None,
        "a process group, such as torch.distributed.group.WORLD once init_process_group was called",
    ),
    "mesh": (DeviceMesh | None, "torch's init_device_mesh(..., mesh_dim_names=('dp', 'pp'))"),
}


def check_arguments(*, transport: object, **given: Any) -> None:
    """Raises `ValueError` for arguments of a wrong type, and for arguments that exclude each other."""
    for name, value in given.items():
        kinds, instead = _ARGUMENTS[name]
        is_one = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_one or (name == "timeout_s" and not 0 < value < inf):
            raise ValueError(f"{name} is {value!r}; give {instead}")
    group, mesh = given["group"], given["mesh"]
    if mesh is not None and group is not None:
        raise ValueError("mesh and group are both given; the mesh says which group the pipeline has")
    if transport is not None and (group is not None or mesh is not None):
        raise ValueError(
            "transport= is for stages of one process, and with group= or mesh= they are in several; leave it "
            "out, or say share_memory=False for gloo's messages on one host"
        )


class Assignment:
    """The layers of each stage, and the stages of this process, from the arguments of `Pipeline`. Raises
    `ValueError` for an argument that does not fit, and says what would.

    Attributes:
        named: the layers, with the names that the plain model's `state_dict` uses
        schedule: of the steps
        partition: the layer indices of each stage
        devices: of every stage
        local: the stages of this process
        ties: the weights that several layers share
        portals: the portals of each layer
    """

    def __init__(
        self,
        layers: nn.Module | Iterable[nn.Module],
        network: Network | None,
        *,
        num_stages: int | None,
        num_microbatches: int,
        schedule: str | Schedule,
        num_workers: int | None,
        remat: Remat,
        partition: Sequence[int | range] | None,
        cost: str | Sequence[float] | None,
        example: Tree | None,
        devices: Device | Sequence[Device] | None,
    ) -> None:
        self.named = named_layers(layers)
        self.modules = modules = [layer for _, layer in self.named]
        if num_stages is None and partition is not None:
            num_stages = len(partition)
        if num_stages is None:
            num_stages = num_stages_of(schedule, network, num_workers)
        sizes = (num_stages, num_microbatches, remat, num_workers, None if network is None else network.size)
        self.schedule = schedule_of(schedule, *sizes)
        if partition is None:
            self.partition = balanced(costs_of(cost, modules, example), num_stages)
        elif cost is None:
            self.partition = cut_of(partition, len(modules), num_stages)
        else:
            raise ValueError(
                "partition and cost are both given; partition says where to cut, cost what to balance instead"
            )
        cuts, self.local = self.partition, tuple(range(num_stages))
        if network is not None:
            self.local = self.schedule.stages_of(worker_of(network, self.schedule))
        self.devices = devices_of(
            devices, num_stages, [modules[i] for k in self.local for i in cuts[k]], modules
        )
        # Every rank checks all layers, so that all refuse together and none waits for another.
        refuse_unsupported(part for layer in modules for part in layer.modules())
        refuse_apart(modules, cuts, [None] * num_stages if network is not None else self.devices)
        homes = [0 if network is None else self.schedule.worker(stage) for stage in range(num_stages)]
        named = [("", layer) for layer in modules] if isinstance(layers, OwnLayers) else self.named
        self.ties = find_ties(named, cuts, homes)
        self.portals = portals_of(modules)

    def same_on_all(self) -> object:
        """The arguments that must be the same on all ranks of a pipeline."""
        ties = [(tie.names, tie.stages, tie.parameter.shape, tie.parameter.dtype) for tie in self.ties]
        return [name for name, _ in self.named], self.partition, self.schedule, ties, self.portals

    def layers(self, *, move: bool) -> dict[str, nn.Module]:
        """The layers of this process, by name; with `move` on the devices of their stages."""
        found = {}
        for index in self.local:
            span, device = self.partition[index], self.devices[index]
            for name, layer in self.named[span.start : span.stop]:
                found[name] = layer.to(device) if move else layer
        return found


def named_layers(layers: nn.Module | Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The layers by the names that the plain model's `state_dict` uses."""
    named: list[tuple[str, nn.Module]]
    if isinstance(layers, OwnLayers):
        named = list(zip(layers.names(), layers, strict=True))
    elif isinstance(layers, nn.Sequential | nn.ModuleList):
        named = [(name, layer) for name, layer in layers._modules.items() if layer is not None]
    elif isinstance(layers, nn.Module):
        raise ValueError(
            f"layers is a {type(layers).__name__}; give a sequence of layers, such as an nn.Sequential: "
            "pipeline.layers_of makes one of a model of transformers, pipeline.split of any other"
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
    remat: Remat,
    num_workers: int | None = None,
    num_ranks: int | None = None,
) -> Schedule:
    """The schedule with this name, or the given `Schedule` if its numbers agree. Without `num_workers` a
    worker has the number of stages that its schedule fixes, else an equal share over `num_ranks`, else two.
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
                f"the schedule is for {schedule.num_workers} workers; leave num_workers={num_workers} out"
            )
        return schedule
    if not isinstance(schedule, str) or schedule not in NAMED:
        known = f"{suggestion(str(schedule), NAMED)}; choose one of {', '.join(NAMED)}"
        raise ValueError(f"schedule is {schedule!r}{known}, or give a Schedule")
    fixed = NAMED[schedule].stages_per_worker
    if num_workers is None:
        usual = max(1, num_stages // (fixed or _STAGES_PER_WORKER))
        num_workers = num_ranks if fixed is None and num_ranks else usual
    per_worker = len(shared_by(num_workers, num_stages)) // num_workers
    if fixed not in (None, per_worker):
        raise ValueError(
            f"schedule {schedule!r} has {fixed} stage{'s' * (fixed != 1)} per worker, so num_stages="
            f"{num_stages} is not for {num_workers} workers; give num_stages={fixed * num_workers}"
        )
    return named(schedule, num_workers, num_microbatches, remat=remat, stages_per_worker=per_worker)


def num_stages_of(schedule: str | Schedule, network: Network | None, num_workers: int | None) -> int:
    """Default number of stages over processes: the workers times the schedule's stages per worker."""
    if isinstance(schedule, Schedule):
        return schedule.num_stages
    if network is None and num_workers is None:
        raise ValueError("num_stages is missing; give it, or mesh= for a pipeline over processes")
    workers = num_workers or (1 if network is None else network.size)
    return workers * ((NAMED[schedule].stages_per_worker or _STAGES_PER_WORKER) if schedule in NAMED else 1)


def costs_of(
    cost: str | Sequence[float] | None, layers: Sequence[nn.Module], example: Tree | None
) -> Sequence[float]:
    """One number per layer, to balance the stages by."""
    if cost is None or cost == "parameters":
        # 1 is added to each, so that layers without parameters spread evenly, too.
        return [1 + sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    if cost == "auto":
        if example is None:
            raise ValueError("cost='auto' estimates layers on an example; pass example= with a micro-batch")
        return layer_costs(layers, example)
    if isinstance(cost, str | int | float):
        raise ValueError(f"cost is {cost!r}; choose 'parameters', 'auto' or give one number per layer")
    if len(cost) != len(layers):
        raise ValueError(f"cost has {len(cost)} numbers for {len(layers)} layers; give one per layer")
    return cost


def cut_of(partition: Sequence[int | range], num_layers: int, num_stages: int) -> Partition:
    """The layers of each stage, from the user's numbers of layers or ranges."""
    if not isinstance(partition, Sequence) or not all(isinstance(each, int | range) for each in partition):
        raise ValueError(
            f"partition is {partition!r}; give each stage's layers, as in [3, 5] or [range(3), range(3, 8)]"
        )
    if len(partition) != num_stages:
        raise ValueError(f"partition has {len(partition)} stages, not num_stages={num_stages}; give as many")
    spans: list[range] = []
    for stage, each in enumerate(partition):
        start = spans[-1].stop if spans else 0
        span = range(start, start + each) if isinstance(each, int) else each
        if not span:
            raise ValueError(f"stage {stage} of partition has {each} layers; give each at least one")
        if span != range(start, span.stop):
            raise ValueError(f"stage {stage} of partition has the layers {span}; give those from {start} on")
        spans.append(span)
    if spans[-1].stop != num_layers:
        raise ValueError(
            f"partition has {spans[-1].stop} layers in all and the model {num_layers}; give each a stage"
        )
    return tuple(spans)


def devices_of(
    devices: Device | Sequence[Device] | None,
    num_stages: int,
    layers: Sequence[nn.Module],
    model: Sequence[nn.Module] = (),
) -> tuple[torch.device, ...]:
    """The device of every stage. Without `devices` it is the device of this process's `layers`; if those have
    no parameters, a device of the type that the rest of the `model` is on.
    """
    if devices is None:
        found = {parameter.device for layer in layers for parameter in layer.parameters()}
        if not found:
            types = {parameter.device.type for layer in model for parameter in layer.parameters()} or {"cpu"}
            found = {accelerators.current(min(types))} if len(types) == 1 else {torch.device("cpu")}
        if len(found) > 1:
            places = ", ".join(sorted(map(str, found)))
            raise ValueError(f"the layers are on {places}; pass devices= with one device per stage")
        return (found.pop(),) * num_stages
    if isinstance(devices, str | torch.device):
        return (_device(devices),) * num_stages
    if len(devices) != num_stages:
        raise ValueError(f"{len(devices)} devices for {num_stages} stages; give one each, or one for all")
    return tuple(map(_device, devices))


def _device(device: Device) -> torch.device:
    """The device of this name. Raises `ValueError` for one that this machine lacks."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"devices has {device!r}, which is no device of torch's; give 'cpu', 'cuda:0' or the like"
        ) from None
    if accelerators.is_accelerator(found):
        count = accelerators.count(found.type)
        if (found.index or 0) >= count:
            raise ValueError(
                f"devices has {device!r}, and torch finds {count} of that type here; give those, or 'cpu'"
            )
    return accelerators.exact(found)


def compilation_of(compile: bool | str | Mapping[str, Any]) -> Compilation | None:
    """The arguments of `torch.compile` for each layer; None where layers are not compiled."""
    if isinstance(compile, bool):
        return Compilation() if compile else None
    given = compile if isinstance(compile, Mapping) else {"backend": compile}
    if unknown := [name for name in given if name not in Compilation._fields]:
        raise ValueError(f"compile has {unknown[0]!r}; it takes {', '.join(Compilation._fields)}")
    found = Compilation(**given)
    known = torch.compiler.list_backends(exclude_tags=())
    if found.backend not in known:
        raise ValueError(f"compile is {compile!r}; choose True, False or a backend of {', '.join(known)}")
    if found.mode is None:
        return found
    from torch._inductor import list_mode_options  # takes a second, and most pipelines compile nothing

    modes = list_mode_options()
    if found.backend != BACKEND or found.mode not in modes:
        raise ValueError(
            f"compile has mode={found.mode!r} with backend={found.backend!r}; modes are of {BACKEND!r}: "
            f"{', '.join(modes)}"
        )
    if modes[found.mode].get("triton.cudagraphs"):
        raise ValueError(
            f"compile has mode={found.mode!r}, which replays CUDA graphs: each overwrites the results of the "
            "one before, which a pipeline holds; choose mode='max-autotune-no-cudagraphs', or leave mode out"
        )
    return found


def refuse_apart(
    layers: Sequence[nn.Module], spans: Sequence[range], homes: Sequence[torch.device | None]
) -> None:
    """Raises `ValueError` for a batch normalization in two stages, whose averages would move twice, and a
    parameter on two devices of one process (`homes` of the stages; None over processes, which have copies).
    """
    first: dict[object, int] = {}
    for stage, span in enumerate(spans):
        for index in span:
            for name, parameter in layers[index].named_parameters():
                other = first.setdefault(parameter, stage)
                if homes[other] != homes[stage]:
                    raise ValueError(
                        f"parameter {name!r} of layer {index} is shared by stages {other} and {stage}, on two"
                        " devices; keep tied layers in one stage, or the stages in processes of their own"
                    )
            for module in layers[index].modules():
                tracked = isinstance(module, _BatchNorm) and module.running_mean is not None
                if tracked and first.setdefault(module, stage) != stage:
                    raise ValueError(
                        f"a batch normalization of layer {index} is also in stage {first[module]}, and its "
                        "averages would depend on the cut; keep both in one stage"
                    )


def worker_of(network: Network, schedule: Schedule) -> int:
    """The worker of this process, which is its rank. The group must have one rank for each worker."""
    if network.size != schedule.num_workers:
        holder = "worker" if schedule.placement else "stage"
        raise ValueError(
            f"the process group has {network.size} ranks for {schedule.num_workers} {holder}s; it needs one "
            f"rank per {holder}, or a schedule by which each has several stages, such as 'interleaved'"
        )
    if network.rank < 0:
        raise ValueError("this process is not in the process group; build the pipeline on its ranks only")
    return network.rank

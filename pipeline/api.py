"""The user's side: an `nn.Module` that trains a sequence of layers as a pipeline.

    pipeline = Pipeline(model, num_stages=4, num_microbatches=16)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for inputs, target in data:
        loss = pipeline.step(inputs, target, torch.nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()

The layers keep the names they have in the plain model, whatever the split, so parameters, gradients and
checkpoints are interchangeable with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from pipeline import engine
from pipeline.clock import Clock
from pipeline.cost import layer_costs
from pipeline.microbatch import Tree, merge, num_examples, sizes, split
from pipeline.partition import partition
from pipeline.schedule import SCHEDULES, Schedule
from pipeline.stage import LossFn, Stage
from pipeline.timeline import Timeline
from pipeline.transport import InProcess, Transport

Device = torch.device | str
# Forward-only passes draw from streams of their own, so that evaluating does not change the training that
# follows.
_FORWARD_ONLY = 1 << 62


class Pipeline(nn.Module):
    """A sequence of layers, cut into stages and trained with a pipeline schedule.

    Args:
        layers: the model, an `nn.Sequential` or any sequence of modules; each maps a tensor or a tuple of
        tensors to the same. num_stages: K, the number of stages. num_microbatches: M, the micro-batches a
        mini-batch is split into; they may be uneven, but not empty. schedule: "gpipe", "1f1b" or "naive", or
        a `Schedule` of one's own. remat: which micro-batches are recomputed: "always", "except_last" or
        "never". Ignored with a `Schedule`. cost: what the stages are balanced by: "parameters" (the default),
        "auto" (estimated from `example`), or a number
            per layer.
        example: for `cost="auto"`: a micro-batch, also on the meta device.
        devices: where the stages live: one device for all, or one per stage. Default: where the layers are.
        seed: of the random streams of the layers (see `rng`).
        replica_group: process group of the data-parallel replicas of a stage, for batch normalization's
        averages. transport: another in-process transport, such as `InProcess(copy=True)`.

    `ValueError` names an argument that does not fit and what would.
    """

    def __init__(
        self,
        layers: nn.Module | Iterable[nn.Module],
        *,
        num_stages: int,
        num_microbatches: int,
        schedule: str | Schedule = "gpipe",
        remat: str = "always",
        cost: str | Sequence[float] | None = None,
        example: Tree | None = None,
        devices: Device | Sequence[Device] | None = None,
        seed: int = 0,
        replica_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
    ) -> None:
        super().__init__()
        named = _named_layers(layers)
        modules = [layer for _, layer in named]
        self._schedule = _schedule_of(schedule, num_stages, num_microbatches, remat)
        self._partition = partition(_costs_of(cost, modules, example), num_stages)
        self._devices = _devices_of(devices, num_stages, modules)
        _refuse_split_ties(modules, self._partition, self._devices)
        for name, layer in named:
            self._modules[name] = layer
        self._stages = {}
        for index, (span, device) in enumerate(zip(self._partition, self._devices, strict=True)):
            if devices is not None:
                for layer in modules[span.start : span.stop]:
                    layer.to(device)
            self._stages[index] = Stage(
                index,
                modules[span.start : span.stop],
                span.start,
                device=device,
                is_last=index == num_stages - 1,
                seed=seed,
                replica_group=replica_group,
            )
        self._transport = transport or InProcess(self._devices)
        self._programs = {
            training: engine.prepare(self._schedule, self._stages, training=training)
            for training in (True, False)
        }
        self._clocks = {
            training: Clock([step.action for step in program], self._devices)
            for training, program in self._programs.items()
        }
        self.num_steps = 0
        self._num_forwards = 0

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    @property
    def partition(self) -> tuple[range, ...]:
        """The layer indices of each stage."""
        return self._partition

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of this process."""
        return tuple(self._stages.values())

    @property
    def timeline(self) -> Timeline:
        """What happened when in the latest training step. On GPUs, asking waits for the device."""
        return self._clocks[True].timeline(self._schedule.num_stages)

    def step(
        self, batch: Tree, target: Tree | None, loss_fn: LossFn, *, observe: engine.Observer | None = None
    ) -> Tensor:
        """One training step without the optimizer: gradients of the mean loss over the mini-batch are added
        to `.grad`.

        `loss_fn(output, target)` returns the mean over the examples of a micro-batch. Returns the mean over
        the mini-batch, without a graph. `observe` is entered around every action. An exception inside an
        action becomes an `ActionError` that names it; gradients of completed actions stay in `.grad`.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "step() trains, but gradients are disabled here; call the pipeline itself to evaluate"
            )
        num_microbatches = self._schedule.num_microbatches
        feed = self._split(batch, "the mini-batch")
        examples = num_examples(batch)
        targets: Sequence[Tree | None] = [None] * num_microbatches
        if target is not None:
            if num_examples(target, "the target") != examples:
                raise ValueError(
                    f"the mini-batch has {examples} examples but the target "
                    f"{num_examples(target, 'the target')}"
                )
            targets = split(target, num_microbatches, "the target")
        shares = tuple(size / examples for size in sizes(examples, num_microbatches))
        for stage in self._stages.values():
            stage.begin(
                self.num_steps,
                num_microbatches,
                training=True,
                feed=feed if stage.is_first else (),
                targets=targets if stage.is_last else (),
                loss_fn=loss_fn if stage.is_last else None,
                shares=shares if stage.is_last else (),
            )
        self._run(True, observe)
        self.num_steps += 1
        losses = self._stages[self._schedule.num_stages - 1].losses
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def forward(self, batch: Tree) -> Tree:
        """The model's output for a mini-batch, computed micro-batch by micro-batch without a graph."""
        feed = self._split(batch, "the mini-batch")
        for stage in self._stages.values():
            stage.begin(
                _FORWARD_ONLY + self._num_forwards,
                self._schedule.num_microbatches,
                training=False,
                feed=feed if stage.is_first else (),
            )
        self._run(False, None)
        self._num_forwards += 1
        stage = self._stages[self._schedule.num_stages - 1]
        outputs, stage.outputs = [output for output in stage.outputs if output is not None], []
        return merge(outputs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their total norm is at most `max_norm`; returns the norm before.

        The norm is made from one norm per parameter in the model's order, so that every K gives the same
        bits.
        """
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients, norm_type)
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        return total

    def _run(self, training: bool, observe: engine.Observer | None) -> None:
        cache_casts = torch.is_autocast_cache_enabled()
        # A cached cast made without a graph must not meet one, and the cache would keep a copy of every
        # weight.
        torch.set_autocast_cache_enabled(False)
        try:
            engine.run(self._programs[training], self._transport, self._clocks[training], observe)
            for stage in self._stages.values():
                stage.finish()
        finally:
            torch.set_autocast_cache_enabled(cache_casts)

    def _split(self, batch: Tree, what: str) -> tuple[Tree, ...]:
        parts = (batch,) if isinstance(batch, Tensor) else batch
        if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
            raise ValueError(
                "the batch requires a gradient, which a pipeline does not compute; pass batch.detach()"
            )
        return split(batch, self._schedule.num_microbatches, what)


def _named_layers(layers: nn.Module | Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
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


def _schedule_of(schedule: str | Schedule, num_stages: int, num_microbatches: int, remat: str) -> Schedule:
    if isinstance(schedule, Schedule):
        if (schedule.num_stages, schedule.num_microbatches) != (num_stages, num_microbatches):
            raise ValueError(
                f"the schedule is for {schedule.num_stages} stages and {schedule.num_microbatches} "
                "micro-batches, not for "
                f"num_stages={num_stages} and num_microbatches={num_microbatches}"
            )
        return schedule
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; choose one of {', '.join(SCHEDULES)} or give a Schedule")
    return SCHEDULES[schedule](num_stages, num_microbatches, remat=remat)


def _costs_of(
    cost: str | Sequence[float] | None, layers: Sequence[nn.Module], example: Tree | None
) -> Sequence[float]:
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


def _devices_of(
    devices: Device | Sequence[Device] | None, num_stages: int, layers: Sequence[nn.Module]
) -> tuple[torch.device, ...]:
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
        return (torch.device(devices),) * num_stages
    if len(devices) != num_stages:
        raise ValueError(
            f"{len(devices)} devices for {num_stages} stages; give one per stage, or one for all"
        )
    return tuple(torch.device(device) for device in devices)


def _refuse_split_ties(
    layers: Sequence[nn.Module], spans: Sequence[range], devices: Sequence[torch.device]
) -> None:
    """A parameter on two devices would be two parameters; on one device a tie is just a shared parameter."""
    home: dict[nn.Parameter, int] = {}
    for stage, span in enumerate(spans):
        for index in span:
            for name, parameter in layers[index].named_parameters():
                other = home.setdefault(parameter, stage)
                if devices[other] != devices[stage]:
                    raise ValueError(
                        f"parameter {name!r} of layer {index} is shared by stages {other} and {stage}, "
                        "which are on "
                        f"{devices[other]} and {devices[stage]}; keep tied layers in one stage or on one "
                        "device"
                    )

"""Checks that a pipeline trains a model exactly: compares one of its steps with the plain model's.

A layer that leaves something in an attribute, reads it in another stage, draws from a generator of its own or
trains inside of its forward is right in the plain model, and may be silently wrong in a pipeline. Nobody can
list all such ways, so both steps are compared: outputs of stages, the loss, gradients from the last layer
back to the first, buffers and random streams. The first difference in this order is near its cause.

The plain step takes the same micro-batches one after another, with the draws that the pipeline makes. Over
processes it is taken on the rank of the last stage, and every rank is sent the values and gradients of all:
twice the size of the model, in the host's memory, until `verify` returns. Plain attributes are not sent: of
layers that change theirs from step to step, verify the first one.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .errors import VerifyError, summary
from .plan.schedule import Kind
from .stage.buffers import Statistics
from .stage.layers import Generators, LayerRunner, LossFn
from .stage.trees import (
    Message,
    Tree,
    change,
    divide,
    flatten,
    num_examples,
    portals_of,
    sizes,
    tensors_of,
)

# The largest difference that rounding explains, relative to the largest number of a tensor.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_SMALL = 1e-3  # gradients that are smaller than the largest by this cancel out: rounding, judged by that one

Pipeline: TypeAlias = Any  # `api.Pipeline`, whose method this is
Name = tuple[int, str]  # the layer, `num_layers` for the loss, and the name of a tensor in it


@dataclass
class _Step:
    """Results of a step: sums over the outputs of each stage and micro-batch, the loss, the later state."""

    outputs: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    loss: float = 0.0
    gradients: dict[Name, Tensor | None] = field(default_factory=dict)
    buffers: dict[Name, Tensor | None] = field(default_factory=dict)
    streams: dict[str, object] = field(default_factory=dict)  # Python's and numpy's, behind the step


@dataclass
class _Brought:
    """The data that a rank contributes to the comparison."""

    replica: int
    batch: Tree | None
    target: Tree | None
    values: dict[Name, Tensor | None]  # of its layers' parameters and buffers
    step: _Step


def verify(
    pipeline: Pipeline,
    batch: Tree | None,
    target: Tree | None,
    loss_fn: LossFn,
    *,
    tolerance: float | None = None,
) -> float:
    """See `Pipeline.verify`."""
    grid, num_layers = pipeline.grid, len(pipeline._layer_names)
    for name in ("fsdp", "tp"):
        if grid is not None and grid.size(name) > 1:
            raise ValueError(
                f"verify compares with the plain model, and along {name!r} no process has whole parameters; "
                f"verify the same model on a mesh without {name!r}, which changes nothing that a layer does"
            )
    own = {pipeline._layer_names.index(name): layer for name, layer in pipeline._layers.items()}
    if isinstance(loss_fn, nn.Module):
        own[num_layers] = loss_fn
    whole = ((index, each()) for index, each in enumerate(pipeline._whole))
    everything = own | {index: layer for index, layer in whole if layer is not None}
    before = _Before([*everything.values(), loss_fn])
    known = [(stage, stage.known()) for stage in pipeline._stages.values()]
    device = next(iter(pipeline._stages.values())).device
    replica, is_alone = 0 if grid is None else grid.replica, pipeline._ranks is None
    has_loss = pipeline._schedule.num_stages - 1 in pipeline._stages
    caches = torch.is_autocast_cache_enabled(), parametrize._cache_enabled
    torch.set_autocast_cache_enabled(False)  # as in a step
    parametrize._cache_enabled = 0
    try:
        is_here = is_alone and len(set(pipeline._devices)) == 1
        values = {} if is_here else {name: _kept(tensor) for name, tensor in _tensors(own)}
        step = _as_pipeline(pipeline, own, *copy.deepcopy((batch, target)), loss_fn)
        before.restore()
        own_batch, own_target = batch if 0 in pipeline._stages else None, target if has_loss else None
        brought = pipeline.gather_all(_Brought(replica, own_batch, own_target, values, step))
        found: str | float = 0.0
        if has_loss and replica == 0:
            try:
                if missing := sorted(set(range(num_layers)) - set(everything)):
                    raise ValueError(
                        f"layer {missing[0]} is not in this process any more; hold on to the layers that the "
                        "pipeline was built of, on the rank of the last stage, as in `model = ...`"
                    )
                with torch.enable_grad():  # as in a step
                    plain = _as_plain(pipeline, everything, brought, before, device, loss_fn)
                wide = tolerance if tolerance is not None else _tolerance(everything.values(), device)
                found = _compare(pipeline, everything, brought, plain, wide)
            except Exception as error:  # the other ranks wait for what is found here
                found = f"the plain model's step failed: {summary(error)}"
                if is_alone:
                    raise VerifyError(found) from error
    finally:
        before.end()
        pipeline.refresh()
        for stage, found_before in known:
            stage.know(found_before)
        torch.set_autocast_cache_enabled(caches[0])
        parametrize._cache_enabled = caches[1]
    said: list[Any] = pipeline.gather_all(found)
    for each in said:
        if isinstance(each, str):
            raise VerifyError(each)
    return float(max(said))


def _as_pipeline(
    pipeline: Pipeline, own: Mapping[int, nn.Module], batch: Tree | None, target: Tree | None, loss_fn: LossFn
) -> _Step:
    """A step of this pipeline. Its stages keep what they have learnt about their layers."""
    step = _Step()

    def watched(index: int, forward: Callable[..., Any], m: int, *arguments: Any) -> Any:
        message = forward(m, *arguments)
        if isinstance(message, Message):
            step.outputs[index, m] = _sums(message.tensors)
        return message

    for index, stage in pipeline._stages.items():
        stage.forward = partial(watched, index, stage.forward)
    try:
        step.loss = float(pipeline._steps.take(pipeline, pipeline.num_steps, batch, target, loss_fn))
    finally:
        for stage in pipeline._stages.values():
            del stage.forward
    step.gradients, step.buffers, step.streams = _gradients(own), _buffers(own), _streams()
    return step


def _as_plain(
    pipeline: Pipeline,
    layers: Mapping[int, nn.Module],
    brought: Sequence[_Brought],
    before: _Before,
    device: torch.device,
    loss_fn: LossFn,
) -> list[_Step]:
    """Runs the step on the plain model with each replica's share; all results have the summed gradients."""
    num_replicas = 1 + max(each.replica for each in brought)
    sequence = tuple([layers[index] for index in range(len(pipeline._layer_names))])
    schedule = pipeline._steps.latest
    ends = {span[-1]: stage for stage, span in enumerate(pipeline.partition[:-1])}
    mine = [[each for each in brought if each.replica == replica] for replica in range(num_replicas)]
    batches = [next(each.batch for each in ranks if each.batch is not None) for ranks in mine]
    total = sum(num_examples(batch) for batch in batches)
    statistics = Statistics(sequence)
    statistics.begin()
    steps = [_Step() for _ in range(num_replicas)]

    def noting(step: _Step, stage: int, m: int, call: Callable[..., Any], *arguments: Any) -> Any:
        output = call(*arguments)
        step.outputs[stage, m] = _sums(flatten(output)[0])
        return output

    for replica, (ranks, step) in enumerate(zip(mine, steps, strict=True)):
        before.restore(gradients=False)
        parts = dict(_tensors(layers))
        for name, value in (item for each in ranks for item in each.values.items()):
            if value is not None:
                parts[name].data = value.to(device)  # as their owner has it
        target = next((each.target for each in ranks if each.target is not None), None)
        batch, target = copy.deepcopy((batches[replica], target))
        count = min(num_examples(batch), schedule.num_microbatches)
        lengths = sizes(num_examples(batch), count)
        runner = LayerRunner(
            sequence, 0, device=device, seed=pipeline.seed, statistics=statistics,
            portals=portals_of(sequence),
            first_microbatch=replica * pipeline._schedule.num_microbatches,
        )  # fmt: skip
        feed = divide(_moved(batch, device), lengths)
        targets = [None] * count if target is None else divide(_moved(target, device), lengths)
        runner.begin(pipeline.num_steps, targets, loss_fn)
        calls = runner._calls
        for m in [a.microbatch for a in schedule.row(0) if a.kind is Kind.F and a.microbatch < count]:
            runner._calls = [
                (partial(noting, step, ends[i], m, call) if i in ends else call, key)
                for i, (call, key) in enumerate(calls)
            ]
            loss = runner.loss(m, runner.run(m, feed[m], recording=True))
            step.loss += float(loss.detach()) * lengths[m] / total
            runner.in_backward((loss * (lengths[m] / total)).sum().backward)
        step.buffers, step.streams = _buffers(layers), _streams()
    if statistics.meters:
        statistics.commit()
        averages = set(statistics.modules)
        for step in steps:
            step.buffers.update(_buffers(layers, averages))
    for step in steps:
        step.loss, step.gradients = sum(each.loss for each in steps), _gradients(layers)
    return steps


def _compare(
    pipeline: Pipeline,
    layers: Mapping[int, nn.Module],
    brought: Sequence[_Brought],
    plain: Sequence[_Step],
    tolerance: float,
) -> str | float:
    """The largest relative difference; else what differs first, where, by how much, and the likely cause."""
    largest = 0.0
    for what, by, cause in _differences(pipeline, layers, brought, plain):
        largest = max(largest, by)
        if not by <= tolerance:
            return (
                f"{what} differs from the plain model's by {by:.1e} of its largest number, and rounding "
                f"explains {tolerance:.0e}. {cause}"
            )
    for each in brought:
        for name, state in each.step.streams.items():
            if len(brought) == 1 and state != plain[0].streams[name]:
                return (
                    f"the random stream of {name} goes on elsewhere than behind the plain model's step: a "
                    "layer or loss_fn draws from it, once more in a recomputation. Draw from torch's "
                    "generators, which a pipeline looks after"
                )
    return largest


OUTSIDE = (
    "What computes it uses something that does not come with its input: an attribute of a module or a "
    "tensor, memory that another layer overwrites, or random numbers that are not of torch's generators"
)
BESIDE = (
    "Outputs and loss are right, so a gradient comes some other way than from layer to layer: through a "
    "tensor in an attribute, to a weight of another stage, or from a backward inside of a forward"
)
AGAIN = (
    f"{BESIDE}. Or layers find something else when they are called again; then remat='never' is right, "
    "and so is a buffer (register_buffer) in place of the attribute that they change"
)


def _differences(
    pipeline: Pipeline, layers: Mapping[int, nn.Module], brought: Sequence[_Brought], plain: Sequence[_Step]
) -> Iterator[tuple[str, float, str]]:
    """Yields each thing compared, its difference and the likely cause, in the order of a step."""
    stage_of = {layer: stage for stage, span in enumerate(pipeline.partition) for layer in span}
    last = len(pipeline.partition) - 1
    recomputes = {a.stage for row in pipeline._steps.latest.actions for a in row if a.kind is Kind.R}
    for key in sorted({key for each in brought for key in each.step.outputs}):
        for each in brought:
            found, wanted = each.step.outputs.get(key), plain[each.replica].outputs.get(key)
            if found is not None and wanted is not None:
                what = f"the output of stage {key[0]} for micro-batch {key[1]}"
                yield what, max(_off(a, b, wanted[1]) for a, b in zip(found, wanted, strict=True)), OUTSIDE
    for each in brought:
        by = _off(each.step.loss, plain[0].loss, abs(plain[0].loss))
        yield f"the loss, which is {each.step.loss:.6g}, in stage {last},", by, OUTSIDE
    largest = [float(g.abs().max()) for g in plain[0].gradients.values() if g is not None and g.numel()]
    small = _SMALL * max(largest, default=0.0)
    kinds = (("gradients", "the gradient of", small, BESIDE), ("buffers", "buffer", 0.0, OUTSIDE))
    for kind, what, least, cause in kinds:
        names = {name for each in brought for name in getattr(each.step, kind)}
        for layer, name in sorted(names, key=lambda name: (-name[0], name[1])):
            where = f"{name!r} of loss_fn"
            if layer in stage_of:
                where = (
                    f"{name!r} of layer {layer} ({type(layers[layer]).__name__}), in stage {stage_of[layer]},"
                )
            why = AGAIN if stage_of.get(layer, last) in recomputes else cause
            for each in brought:
                if (layer, name) in (mine := getattr(each.step, kind)):
                    theirs = getattr(plain[each.replica], kind)[layer, name]
                    yield f"{what} {where}", _difference(mine[layer, name], theirs, least), why


def _off(found: float, wanted: float, size: float) -> float:
    if found == wanted or (math.isnan(found) and math.isnan(wanted)):
        return 0.0
    by = abs(found - wanted) / max(size, 1e-300)
    return math.inf if math.isnan(by) else by


def _difference(found: Tensor | None, wanted: Tensor | None, least: float) -> float:
    """The difference over the largest number of `wanted`, at least `least`; a missing tensor is zeros."""
    if found is None and wanted is None:
        return 0.0
    found = torch.zeros_like(wanted) if found is None else found  # type: ignore[arg-type]
    wanted = torch.zeros_like(found) if wanted is None else wanted
    if found.shape != wanted.shape:
        return math.inf
    if not wanted.numel() or torch.equal(found, wanted):
        return 0.0
    kind = torch.complex128 if found.is_complex() else torch.float64
    a, b = ((t if t.layout is torch.strided else t.to_dense()).to(kind) for t in (found, wanted))
    same = (a == b) | (a.isnan() & b.isnan())
    size = max(float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0, least, 1e-300)
    by = torch.where(same, 0.0, (a - b).abs()).max()
    return float(by) / size if by.isfinite() else math.inf


def _tolerance(layers: Iterable[nn.Module], device: torch.device) -> float:
    kinds = {p.dtype for layer in layers for p in layer.parameters() if p.dtype in TOLERANCES}
    for place in {device.type, "cpu"}:
        if torch.is_autocast_enabled(place):
            kinds.add(torch.get_autocast_dtype(place))
    return max((TOLERANCES.get(kind, 0.1) for kind in kinds), default=TOLERANCES[torch.float32])


def _sums(tensors: Iterable[Tensor]) -> tuple[float, float]:
    """Returns the sum of all elements of the tensors, and the sum of their absolute values."""
    bare = [tensor.detach() for tensor in tensors]
    real = [(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double() for t in bare]
    return sum(float(each.sum()) for each in real), sum(float(each.abs().sum()) for each in real)


def _tensors(layers: Mapping[int, nn.Module]) -> Iterator[tuple[Name, Tensor]]:
    for index, layer in layers.items():
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            yield (index, name), tensor


def _kept(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu().clone()


def _gradients(layers: Mapping[int, nn.Module]) -> dict[Name, Tensor | None]:
    named = [((i, name), p) for i, layer in layers.items() for name, p in layer.named_parameters()]
    return {name: _kept(p.grad) for name, p in named if p.requires_grad}


def _buffers(
    layers: Mapping[int, nn.Module], of: Iterable[nn.Module] | None = None
) -> dict[Name, Tensor | None]:
    return {
        (index, f"{path}.{name}" if path else name): _kept(tensor)
        for index, layer in layers.items()
        for path, module in layer.named_modules()
        if of is None or module in of
        for name, tensor in module._buffers.items()
    }


def _streams() -> dict[str, object]:
    return {"Python's random": random.getstate(), "numpy.random": str(np.random.get_state())}


def _moved(tree: Tree, device: torch.device) -> Tree:
    is_there = all(tensor.device == device for tensor in tensors_of(tree))
    return tree if is_there else change(tree, lambda tensor: tensor.to(device), "the mini-batch")


class _Before:
    """Saves all that a step may change, to restore it any number of times: parameters, buffers, gradients,
    attributes, random streams, and what hooks and the loss count in their closures. From then on gradients
    begin as None, and functions called after a gradient, such as an optimizer's step, are set aside.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._values: list[tuple[Tensor, Tensor, Tensor]] = []
        self._gradients: list[tuple[Tensor, Tensor | None, Any, Any]] = []
        self._contents: list[tuple[Any, Any]] = []  # a dict, list, set or generator, and what was in it
        self._seen: dict[int, Any] = {}
        pending = [*roots]
        while pending:  # without recursion: a list may be linked a thousand times
            pending += self._keep(pending.pop())
        for tensor, _, hooks, _ in self._gradients:
            tensor.grad = None
            hooks.clear()
        device = next((t.device for t, *_ in self._values if t.device.type != "cpu"), torch.device("cpu"))
        self._generators = Generators(device)
        self._streams = self._generators.save(), random.getstate(), np.random.get_state()

    def _keep(self, value: Any) -> Iterable[Any]:
        """Saves the content of `value`; returns further objects to save."""
        if id(value) in self._seen:
            return ()
        self._seen[id(value)] = value  # the object too, so that no other one gets its id
        inside: Iterable[Any] = ()
        if isinstance(value, Tensor):
            if not value.is_inference() and not value.is_meta:
                self._values.append((value, value.data, value.detach().clone()))
            if value.is_leaf and value.requires_grad:
                hooks = value._post_accumulate_grad_hooks or {}  # torch keeps this very dict
                self._gradients.append((value, value.grad, hooks, dict(hooks)))
        elif isinstance(value, nn.Module):
            inside = (value.__dict__,)
        elif isinstance(value, dict):
            self._contents.append((value, dict(value)))
            inside = value.values()
        elif isinstance(value, list | set | collections.deque):
            self._contents.append((value, copy.copy(value)))
            inside = value
        elif isinstance(value, tuple | frozenset):
            inside = value
        elif isinstance(value, FunctionType):  # a hook, and what it counts
            inside = value.__closure__ or ()
        elif isinstance(value, CellType):
            with contextlib.suppress(ValueError):  # an empty one
                self._contents.append((value, value.cell_contents))
                inside = (value.cell_contents,)
        elif isinstance(value, torch.Generator):
            self._contents.append((value, value.get_state()))
        elif isinstance(value, random.Random):
            self._contents.append((value, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._contents.append((value, value.bit_generator.state))
        elif not isinstance(value, type | ModuleType) and not type(value).__module__.startswith("torch"):
            inside = (getattr(value, "__dict__", None),)
        return inside

    def restore(self, *, gradients: bool = True) -> None:
        """Restores everything. With `gradients`, gradients begin as None again, else they go on summing."""
        for place, content in self._contents:
            if isinstance(place, torch.Generator):
                place.set_state(content)
            elif isinstance(place, random.Random):
                place.setstate(content)
            elif isinstance(place, np.random.Generator):
                place.bit_generator.state = content
            elif isinstance(place, CellType):
                place.cell_contents = content
            else:
                place.clear()
                (place.extend if isinstance(place, list | collections.deque) else place.update)(content)
        for tensor, data, value in self._values:
            tensor.data = data
            tensor.data.copy_(value)
        if gradients:
            for tensor, *_ in self._gradients:
                tensor.grad = None
        states, python, numpy = self._streams
        self._generators.restore(states)
        random.setstate(python)
        np.random.set_state(numpy)

    def end(self) -> None:
        """Restores everything, including the gradients and the functions called after them."""
        self.restore()
        for tensor, gradient, hooks, called in self._gradients:
            tensor.grad = gradient
            hooks.update(called)

"""Buffers that a forward changes: a recomputation gets the values that the forward got, and changes none.

Under re-materialization a layer is called twice for every micro-batch, the second time when later
micro-batches have moved its buffers on. So before a forward that will be recomputed the buffers are copied,
and the recomputation works on the copies, which stand in their places while it runs:

    F0 sees v0, leaves v1    F1 sees v1, leaves v2    R1 on a copy of v1    R0 on a copy of v0    v2 stays

A buffer is copied once for every version that it has in a step: where nothing changes it, all micro-batches
share one copy. Versions are torch's count of in-place operations, and another tensor under the same name is
another version. A change through `.data` is none: where it shows in the output the first step refuses it
(`first_step`), and `Pipeline.verify` finds what begins later.

Batch normalization (GPipe, section 2.2) normalizes each micro-batch by its own statistics and tracks the
moving averages of the whole mini-batch. Stock modules update the averages at every forward and recomputation.
While a stage runs, their forward is therefore redirected: the statistics of the micro-batch land in scratch
buffers (an update with momentum 1 writes just them, at no extra pass over the data), are folded into the
mini-batch's, and reach the module's buffers once, at the end of the step. A recomputation throws its
statistics away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

Key = tuple[nn.Module, str]


@dataclass
class Saved:
    """Copies of the buffers that a forward read, by module and name; and the buffers that it changed."""

    copies: dict[nn.Module, dict[str, Tensor | None]]
    moved: frozenset[Key] = frozenset()


class Buffers:
    """The buffers of a stage's layers, except those of the modules `besides`."""

    def __init__(self, layers: Sequence[nn.Module], first_layer: int, besides: Collection[nn.Module]) -> None:
        self._layers, self._first_layer = layers, first_layer
        self._besides = frozenset(besides)
        self._loss: nn.Module | None = None
        self._modules: dict[nn.Module, str] = {}  # those that have buffers, and what to call them
        self._copies: dict[int, tuple[State, Tensor]] = {}  # of each tensor, of its version of the moment
        self._states: dict[Key, State] = {}  # before the forward of the moment
        self._is_new = True  # a forward may still register buffers
        self._has_looked = False
        self.known_empty = False  # whether a step before has found none
        self._find_modules()

    # A step

    def begin(self, loss_fn: object) -> None:
        """Prepares a training step; a loss that is a module may have buffers too."""
        loss = loss_fn if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.buffers()) else None
        if loss is not self._loss:
            self._loss = loss
            self._modules.clear()
            self.forget()
            self._find_modules()

    def end(self) -> None:
        """Drops the copies at the end of a step."""
        self._copies.clear()
        if self._has_looked:
            self._is_new, self.known_empty = False, not self._modules

    def forget(self) -> None:
        """Makes the next step look for new buffers again."""
        self._copies.clear()
        self._states.clear()
        self._is_new, self._has_looked, self.known_empty = True, False, False

    # Forward and recomputation

    def save(self) -> Saved | None:
        """Copies the buffers before a forward that will be recomputed. None if there are none."""
        if not self._modules and not self._is_new:
            return None
        self._states = self._now()
        return Saved({m: {name: self._copy(t) for name, t in m._buffers.items()} for m in self._modules})

    def look(self, saved: Saved) -> None:
        """After that forward."""
        if self._is_new:
            self._find_modules()
        self._has_looked = True
        saved.moved = self._moved(self._states)
        for key in saved.moved & self._states.keys():  # nobody else will see that version
            self._copies.pop(id(self._states[key].tensor), None)
        self._states.clear()  # a tensor that was replaced would linger

    @contextmanager
    def as_saved(self, saved: Saved) -> Iterator[None]:
        """While a recomputation runs, the buffers are copies of what its forward saw."""
        originals = {module: dict(module._buffers) for module in self._modules}
        copies: dict[int, Tensor] = {}  # of what is going to change; two names of one tensor are one copy
        for module in originals:
            module._buffers.clear()
            for name, value in saved.copies.get(module, {}).items():
                if value is not None and (module, name) in saved.moved:
                    if id(value) not in copies:
                        copies[id(value)] = value.clone()
                    value = copies[id(value)]
                module._buffers[name] = value
        copies.clear()
        states = self._now()
        try:
            yield
            moved = self._moved(states)
        finally:
            for module, buffers in originals.items():
                module._buffers.clear()
                module._buffers.update(buffers)
        if moved != saved.moved:
            key = next(iter(moved ^ saved.moved))
            changed, still = ("recomputation", "forward") if key in moved else ("forward", "recomputation")
            raise RuntimeError(
                f"buffer {key[1]!r} of {self._modules[key[0]]} changed in the {changed} of a micro-batch and "
                f"not in its {still}: the layer goes by something that has changed between, such as an "
                "attribute, or asks whether gradients are enabled; keep what it goes by in a buffer "
                "(register_buffer), or use remat='never'"
            )

    def apart(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs of a forward; one that is a buffer, or a view of one, is copied before it changes."""
        if not self._modules:
            return tensors
        storages = {
            buffer.untyped_storage()._cdata
            for module in self._modules
            for buffer in module._buffers.values()
            if buffer is not None
        }
        return tuple([t.clone() if t.untyped_storage()._cdata in storages else t for t in tensors])

    # Parts

    def _find_modules(self) -> None:
        places = [(f"layer {self._first_layer + i}", layer) for i, layer in enumerate(self._layers)]
        if self._loss is not None:
            places.append(("loss_fn", self._loss))
        for place, root in places:
            for path, module in root.named_modules():
                if module._buffers and module not in self._besides and module not in self._modules:
                    self._modules[module] = f"{place}{path and f', {path},'} ({type(module).__name__})"

    def _copy(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        known = self._copies.get(id(tensor))
        if known is None or known[0].has_moved(tensor):
            known = self._copies[id(tensor)] = State.of(tensor), tensor.detach().clone()
        return known[1]

    def _now(self) -> dict[Key, State]:
        return {(m, name): State.of(t) for m in self._modules for name, t in m._buffers.items()}

    def _moved(self, before: Mapping[Key, State]) -> frozenset[Key]:
        """The buffers that are other ones now, or of another version, or new."""
        now = self._now()
        keys = before.keys() | now.keys()
        return frozenset([k for k in keys if k not in before or before[k].has_moved(k[0]._buffers.get(k[1]))])


class State(NamedTuple):
    """A buffer at a moment: which tensor, and how often it has been changed in place."""

    tensor: Tensor | None
    version: int

    @classmethod
    def of(cls, tensor: Tensor | None) -> State:
        # Tensors made in inference mode have no version, and cannot change outside of it.
        return cls(tensor, 0 if tensor is None or tensor.is_inference() else tensor._version)

    def has_moved(self, tensor: Tensor | None) -> bool:
        return tensor is not self.tensor or self.version != State.of(tensor).version


# Batch normalization

Gather = Callable[[Tensor], list[Tensor]]
"""Collects a tensor from all data-parallel replicas of a stage, in the order of their ranks."""


class Statistics:
    """The batch-normalization modules of one stage and what they saw in the current mini-batch.

    With `gather` the moving averages follow the mini-batches of all data-parallel replicas together.
    (Normalization itself stays with the micro-batch of the replica.)
    """

    def __init__(self, layers: Iterable[nn.Module], gather: Gather | None = None) -> None:
        modules = list(dict.fromkeys(module for layer in layers for module in layer.modules()))
        refuse_unsupported(modules)
        tracked = [m for m in modules if isinstance(m, _BatchNorm) and m.running_mean is not None]
        self.meters = [_Meter(module, self) for module in tracked]
        self._gather = gather
        self.recording = False

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The batch normalizations whose averages this object updates."""
        return tuple([meter.module for meter in self.meters])

    def begin(self) -> None:
        """Prepares a step: anew at first, and when the averages have moved or changed their precision."""
        for meter in self.meters:
            meter.begin()

    def redirect(self, *, recording: bool) -> None:
        """From here to `release` the modules leave their moving averages alone; `recording` keeps the
        statistics.
        """
        self.recording = recording
        for meter in self.meters:
            if meter.module.training:
                meter.module.__dict__["forward"] = meter.forward

    def release(self) -> None:
        """Ends `redirect`, and folds in what was recorded."""
        for meter in self.meters:
            meter.module.__dict__.pop("forward", None)
        if self.recording:
            self.fold()

    @torch.no_grad()
    def fold(self) -> None:
        """Merges the scratch statistics into the totals."""
        seen = [meter for meter in self.meters if meter.new_count]
        if seen:
            means = [meter.scratch_mean.to(meter.mean.dtype) for meter in seen]
            variances = [meter.scratch_var.to(meter.mean.dtype) for meter in seen]
            squares = torch._foreach_mul(variances, [float(max(meter.new_count - 1, 0)) for meter in seen])
            _merge(seen, means, squares, [meter.new_count for meter in seen])
            for meter in seen:
                meter.new_count = 0

    @torch.no_grad()
    def commit(self) -> None:
        """Moves the averages once, by the statistics of the whole mini-batch, and starts the next one."""
        if self._gather is not None and self.meters:
            self._join_replicas(self._gather)
        seen = [meter for meter in self.meters if meter.count]
        if seen:
            modules = [meter.module for meter in seen]
            counters = [m.num_batches_tracked for m in modules if m.num_batches_tracked is not None]
            if counters:
                torch._foreach_add_(counters, 1)
            # An unbiased variance, as torch keeps it; of a single value there is none, so it stays 0.
            torch._foreach_mul_(
                [meter.squares for meter in seen], [1.0 / max(meter.count - 1, 1) for meter in seen]
            )
            averages, values, factors = list[Tensor](), list[Tensor](), list[float]()
            for meter in seen:
                factor, tracked = meter.module.momentum, meter.module.num_batches_tracked
                if factor is None:  # the cumulative average over mini-batches
                    assert tracked is not None
                    factor = 1.0 / float(tracked)
                for name, value in (("running_mean", meter.mean), ("running_var", meter.squares)):
                    average = meter.module._buffers[name]
                    assert average is not None
                    averages.append(average)
                    values.append(value.to(average.dtype))
                    factors.append(float(factor))
            torch._foreach_lerp_(averages, values, factors)
        self.forget()

    def _join_replicas(self, gather: Gather) -> None:
        """Replaces what was seen here by what all replicas have seen, merged in the order of their ranks: all
        get the same bits.
        """
        meters = self.meters
        counts = torch.tensor([m.count for m in meters], dtype=torch.float64, device=meters[0].mean.device)
        everywhere = gather(torch.cat([counts, *(m.mean for m in meters), *(m.squares for m in meters)]))
        self.forget()
        sizes = [len(meter.mean) for meter in meters]
        for replica in everywhere:
            found, *parts = replica.split([len(meters), *sizes, *sizes])
            new_counts = [int(count) for count in found.tolist()]
            _merge(meters, parts[: len(meters)], parts[len(meters) :], new_counts)

    @torch.no_grad()
    def forget(self) -> None:
        """Drops the statistics of the current mini-batch, as after an error."""
        for meter in self.meters:
            meter.count = meter.new_count = 0
        if self.meters:
            torch._foreach_zero_([total for meter in self.meters for total in (meter.mean, meter.squares)])


def _merge(
    meters: Sequence[_Meter],
    means: list[Tensor],
    squares: list[Tensor] | tuple[Tensor, ...],
    new_counts: Sequence[int],
) -> None:
    """Merges means and sums of squared deviations of another sample into those of `meters`, without
    cancellation (Chan et al. 1979).
    """
    counts = [meter.count for meter in meters]
    totals = [max(a + b, 1) for a, b in zip(counts, new_counts, strict=True)]
    own_means, own_squares = [meter.mean for meter in meters], [meter.squares for meter in meters]
    deltas = torch._foreach_sub(means, own_means)
    torch._foreach_add_(own_squares, squares)
    shifts = torch._foreach_mul(deltas, deltas)
    torch._foreach_mul_(shifts, [a * b / n for a, b, n in zip(counts, new_counts, totals, strict=True)])
    torch._foreach_add_(own_squares, shifts)
    torch._foreach_mul_(deltas, [b / n for b, n in zip(new_counts, totals, strict=True)])
    torch._foreach_add_(own_means, deltas)
    for meter, new_count in zip(meters, new_counts, strict=True):
        meter.count += new_count


def refuse_unsupported(modules: Iterable[nn.Module]) -> None:
    """`ValueError` for a normalization that would be wrong in a pipeline, and what to use instead."""
    for module in modules:
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                "SyncBatchNorm normalizes over replicas inside a micro-batch, which a pipeline does not "
                "schedule; use BatchNorm, whose moving averages follow the replicas of a mesh together"
            )
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise ValueError(
                f"{module} tracks moving averages at every forward, so micro-batches and recomputation would "
                "change them; set track_running_stats=False"
            )


class _Meter:
    """Mean and sum of squared deviations of one module's inputs, over the micro-batches seen so far."""

    __slots__ = ("count", "mean", "module", "new_count", "owner", "scratch_mean", "scratch_var", "squares")

    def __init__(self, module: _BatchNorm, owner: Statistics) -> None:
        self.module, self.owner = module, owner
        self.count = 0  # values per channel folded so far
        self.new_count = 0  # values per channel whose statistics are in the scratch buffers
        self.scratch_mean = self.scratch_var = self.mean = self.squares = torch.empty(0, device="meta")

    def begin(self) -> None:
        """Makes the tensors anew where the averages' precision or place is another one."""
        average = self.module._buffers["running_mean"]
        assert average is not None
        dtype, device = average.dtype, average.device
        if (self.scratch_mean.dtype, self.scratch_mean.device) != (dtype, device):
            wide = torch.promote_types(dtype, torch.float32)
            self.scratch_mean, self.scratch_var = torch.zeros(2, len(average), dtype=dtype, device=device)
            self.mean, self.squares = torch.zeros(2, len(average), dtype=wide, device=device)

    def forward(self, inputs: Tensor) -> Tensor:
        """The module's own forward, with scratch buffers in place of its moving averages."""
        if self.new_count:  # the same module a second time in one forward
            self.owner.fold()
        module = self.module
        buffers, attributes = module._buffers, module.__dict__
        kept = {name: buffers[name] for name in ("running_mean", "running_var", "num_batches_tracked")}
        momentum = module.momentum
        buffers["running_mean"], buffers["running_var"] = self.scratch_mean, self.scratch_var
        buffers["num_batches_tracked"], attributes["momentum"] = None, 1.0
        try:
            output = type(module).forward(module, inputs)
        finally:
            buffers.update(kept)
            attributes["momentum"] = momentum
        if self.owner.recording:
            self.new_count = inputs.numel() // inputs.shape[1]
        return output

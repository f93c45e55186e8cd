"""Batch normalization under micro-batches: normalize by the micro-batch, remember the mini-batch.

GPipe (paper section 2.2) normalizes each micro-batch by its own statistics and tracks the moving averages of
the whole mini-batch. Stock modules instead update the averages at every forward: once per micro-batch, and
again at every recomputation. While a stage runs, the forward of its batch-normalization modules is therefore
redirected: the statistics of the micro-batch land in scratch buffers (an update with momentum 1 writes just
them, at no extra pass over the data), are folded into the mini-batch's sufficient statistics, and reach the
module's buffers once, at the end of the step. Recomputation takes the same path and throws its statistics
away. The modules themselves, and so the keys of `state_dict`, are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

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
        self._blocks: list[_FlatStatistics] = []
        self._gather = gather
        self.recording = False

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules whose averages are looked after here."""
        return tuple([meter.module for meter in self.meters])

    def begin(self) -> None:
        """Prepares a step: anew at first, and when the averages have moved or changed their precision."""
        if all(m.kind == (m.scratch_mean.dtype, m.scratch_mean.device) for m in self.meters):
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[_Meter]] = {}
        for meter in self.meters:
            kinds.setdefault(meter.kind, []).append(meter)
        self._blocks = [_FlatStatistics(meters, *kind) for kind, meters in kinds.items()]

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
        for block in self._blocks:
            if any(meter.new_count for meter in block.meters):
                block.fold()

    @torch.no_grad()
    def commit(self) -> None:
        """Moves the averages once, by the statistics of the whole mini-batch, and starts the next one."""
        for block in self._blocks:
            if self._gather is not None:  # merged in the order of the ranks: all replicas get the same bits
                counts = torch.tensor(
                    [meter.count for meter in block.meters], dtype=torch.float64, device=block.mean.device
                )
                everywhere = self._gather(torch.cat([counts, block.mean.double(), block.squares.double()]))
                block.forget()
                lengths = [len(counts), len(block.mean), len(block.squares)]
                for replica in everywhere:
                    found, mean, squares = replica.split(lengths)
                    block.merge(mean, squares, [int(count) for count in found.tolist()])
            if any(meter.count for meter in block.meters):
                block.commit()
                block.forget()

    @torch.no_grad()
    def forget(self) -> None:
        """Drops what the current mini-batch has recorded, as after an error."""
        for block in self._blocks:
            block.forget()


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
    """Mean and sum of squared deviations of one module's inputs, over the micro-batches seen so far.

    The tensors are views of the `_FlatStatistics` that holds those of all modules.
    """

    __slots__ = ("count", "mean", "module", "new_count", "owner", "scratch_mean", "scratch_var", "squares")

    def __init__(self, module: _BatchNorm, owner: Statistics) -> None:
        self.module, self.owner = module, owner
        self.count = 0  # values per channel folded so far
        self.new_count = 0  # values per channel whose statistics are in the scratch buffers
        self.scratch_mean = self.scratch_var = self.mean = self.squares = torch.empty(0, device="meta")

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        """The averages' precision, and where they are."""
        average = self.module._buffers["running_mean"]
        assert average is not None
        return average.dtype, average.device

    def forward(self, inputs: Tensor) -> Tensor:
        """The module's own forward, with scratch buffers in place of its moving averages."""
        if self.new_count:  # the same module a second time in one forward
            self.owner.fold()
        module = self.module
        buffers, attributes = module._buffers, module.__dict__
        kept = (
            buffers["running_mean"],
            buffers["running_var"],
            buffers["num_batches_tracked"],
            module.momentum,
        )
        buffers["running_mean"], buffers["running_var"] = self.scratch_mean, self.scratch_var
        buffers["num_batches_tracked"], attributes["momentum"] = None, 1.0
        try:
            output = type(module).forward(module, inputs)
        finally:
            buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"] = kept[:3]
            attributes["momentum"] = kept[3]
        if self.owner.recording:
            self.new_count = inputs.numel() // inputs.shape[1]
        return output


class _FlatStatistics:
    """The statistics of modules of one precision on one device, end to end, so that an operation on all of
    them is one operation: there are a hundred modules in an AmoebaNet, with a few values each.
    """

    def __init__(self, meters: list[_Meter], dtype: torch.dtype, device: torch.device) -> None:
        self.meters = meters
        self.sizes = [meter.module.num_features for meter in meters]
        wide = torch.promote_types(dtype, torch.float32)
        size = sum(self.sizes)
        self.scratch_mean, self.scratch_var = torch.zeros(2, size, dtype=dtype, device=device)
        self.mean, self.squares = torch.zeros(2, size, dtype=wide, device=device)
        for name in ("scratch_mean", "scratch_var", "mean", "squares"):
            for meter, part in zip(meters, getattr(self, name).split(self.sizes), strict=True):
                # Views count in-place changes together, so one module's change would look to autograd like
                # one of what another has saved. `data` counts for itself.
                setattr(meter, name, part.data)

    def fold(self) -> None:
        """Merges the scratch statistics into the totals. Those of modules that saw nothing count 0."""
        new_counts = [meter.new_count for meter in self.meters]
        wide = self.mean.dtype
        # The graph has saved the scratch buffers, so they are not overwritten here.
        new_squares = self.scratch_var.to(wide, copy=True)
        self.weigh(new_squares, [float(max(count - 1, 0)) for count in new_counts])
        self.merge(self.scratch_mean.to(wide), new_squares, new_counts)
        for meter in self.meters:
            meter.new_count = 0

    def merge(self, new_mean: Tensor, new_squares: Tensor, new_counts: list[int]) -> None:
        """Merges mean and sum of squared deviations of another sample, without cancellation (Chan et al.
        1979).
        """
        counts = [meter.count for meter in self.meters]
        totals = [max(a + b, 1) for a, b in zip(counts, new_counts, strict=True)]
        delta = new_mean - self.mean
        self.squares.add_(new_squares)
        shift = delta * delta
        self.weigh(shift, [a * b / n for a, b, n in zip(counts, new_counts, totals, strict=True)])
        self.squares.add_(shift)
        self.weigh(delta, [b / n for b, n in zip(new_counts, totals, strict=True)])
        self.mean.add_(delta)
        for meter, new_count in zip(self.meters, new_counts, strict=True):
            meter.count += new_count

    def commit(self) -> None:
        """Moves the modules' averages by what has been seen."""
        meters, seen = self.meters, [meter for meter in self.meters if meter.count]
        counters = [m.module.num_batches_tracked for m in seen if m.module.num_batches_tracked is not None]
        if counters:
            torch._foreach_add_(counters, 1)
        # An unbiased variance, as torch keeps it; of a single value there is none, so it stays 0.
        self.weigh(self.squares, [1.0 / max(m.count - 1, 1) for m in meters])
        by_factor: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for meter in seen:
            factor, tracked = meter.module.momentum, meter.module.num_batches_tracked
            if factor is None:  # the cumulative average over mini-batches
                assert tracked is not None
                factor = 1.0 / float(tracked)
            averages, values = by_factor.setdefault(float(factor), ([], []))
            for name, value in (("running_mean", meter.mean), ("running_var", meter.squares)):
                average = meter.module._buffers[name]
                assert average is not None
                averages.append(average)
                values.append(value.to(average.dtype))
        for factor, (averages, values) in by_factor.items():
            torch._foreach_lerp_(averages, values, factor)

    def forget(self) -> None:
        for meter in self.meters:
            meter.count = meter.new_count = 0
        for tensor in (self.mean, self.squares, self.scratch_mean, self.scratch_var):
            tensor.zero_()

    def weigh(self, values: Tensor, weights: list[float]) -> None:
        """Multiplies each module's part of `values` by its weight, in place. Neighbours mostly share one."""
        runs = [
            (weight, list(run))
            for weight, run in groupby(zip(weights, self.sizes, strict=True), itemgetter(0))
        ]
        if len(runs) == 1:
            values.mul_(weights[0])
        else:
            parts = values.split([sum(size for _, size in run) for _, run in runs])
            torch._foreach_mul_(parts, [weight for weight, _ in runs])

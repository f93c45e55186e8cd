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

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


class _Meter:
    """Mean and sum of squared deviations of one module's inputs, over the micro-batches seen so far."""

    __slots__ = ("count", "mean", "module", "new_count", "owner", "scratch_mean", "scratch_var", "squares")

    def __init__(self, module: _BatchNorm, owner: Statistics) -> None:
        self.module, self.owner = module, owner
        self.count = 0  # values per channel folded so far
        self.new_count = 0  # values per channel whose statistics are in the scratch buffers
        self.scratch_mean = self.scratch_var = self.mean = self.squares = torch.empty(0, device="meta")

    def fit(self) -> None:
        """Makes buffers like the module's averages, which may have moved or changed their precision."""
        average = self.module._buffers["running_mean"]
        assert average is not None
        scratch = self.scratch_mean
        if scratch.dtype != average.dtype or scratch.device != average.device:
            wide = torch.promote_types(average.dtype, torch.float32)
            self.scratch_mean, self.scratch_var = torch.zeros_like(average), torch.zeros_like(average)
            self.mean, self.squares = (
                torch.zeros_like(average, dtype=wide),
                torch.zeros_like(average, dtype=wide),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """The module's own forward, with scratch buffers in place of its moving averages."""
        if self.new_count:  # the same module a second time in one forward
            self.owner.fold([self])
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


class Statistics:
    """The batch-normalization modules of one stage and what they saw in the current mini-batch.

    `group` is a process group of data-parallel replicas of the stage: the moving averages then follow the
    mini-batches of all replicas together. (Normalization itself stays with the micro-batch of the replica.)
    """

    def __init__(self, layers: Iterable[nn.Module], group: dist.ProcessGroup | None = None) -> None:
        modules = list(dict.fromkeys(module for layer in layers for module in layer.modules()))
        for module in modules:
            _refuse_unsupported(module)
        tracked = [m for m in modules if isinstance(m, _BatchNorm) and m.running_mean is not None]
        self._meters = [_Meter(module, self) for module in tracked]
        self._group = group
        self.recording = False

    def __bool__(self) -> bool:
        return bool(self._meters)

    def begin(self) -> None:
        """Prepares a step."""
        for meter in self._meters:
            meter.fit()

    def redirect(self, *, recording: bool) -> None:
        """From here to `release` the modules leave their moving averages alone; `recording` keeps the
        statistics.
        """
        self.recording = recording
        for meter in self._meters:
            if meter.module.training:
                meter.module.__dict__["forward"] = meter.forward

    def release(self) -> None:
        """Ends `redirect`, and folds in what was recorded."""
        for meter in self._meters:
            meter.module.__dict__.pop("forward", None)
        if self.recording:
            self.fold([meter for meter in self._meters if meter.new_count])

    @torch.no_grad()
    def fold(self, meters: list[_Meter]) -> None:
        """Merges the scratch statistics into the totals (Chan et al. 1979), for all modules at once."""
        first = [meter for meter in meters if not meter.count]
        later = [meter for meter in meters if meter.count]
        if first:
            torch._foreach_copy_([m.mean for m in first], [m.scratch_mean for m in first])
            torch._foreach_copy_([m.squares for m in first], [m.scratch_var for m in first])
            torch._foreach_mul_([m.squares for m in first], [float(m.new_count - 1) for m in first])
        if later:
            _merge(
                [m.mean for m in later],
                [m.squares for m in later],
                [m.count for m in later],
                [m.scratch_mean.to(m.mean.dtype) for m in later],
                torch._foreach_mul(
                    [m.scratch_var.to(m.squares.dtype) for m in later],
                    [float(m.new_count - 1) for m in later],
                ),
                [m.new_count for m in later],
            )
        for meter in meters:
            meter.count += meter.new_count
            meter.new_count = 0

    @torch.no_grad()
    def commit(self) -> None:
        """Moves the averages once, by the statistics of the whole mini-batch, and starts the next one."""
        if self._group is not None:
            self._gather_replicas(self._group)
        meters = [meter for meter in self._meters if meter.count]
        if not meters:
            return
        counters = [m.module.num_batches_tracked for m in meters if m.module.num_batches_tracked is not None]
        if counters:
            torch._foreach_add_(counters, 1)
        factors = [_update_factor(meter.module) for meter in meters]
        # An unbiased variance, as torch keeps it; of a single value there is none, so it stays 0.
        torch._foreach_mul_([m.squares for m in meters], [1.0 / max(m.count - 1, 1) for m in meters])
        for name, statistic in (("running_mean", "mean"), ("running_var", "squares")):
            averages = [getattr(m.module, name) for m in meters]
            seen = [getattr(m, statistic).to(getattr(m.module, name).dtype) for m in meters]
            torch._foreach_mul_(averages, [1.0 - factor for factor in factors])
            torch._foreach_add_(averages, torch._foreach_mul(seen, factors))
        self.forget()

    def forget(self) -> None:
        """Drops what the current mini-batch has recorded, as after an error."""
        for meter in self._meters:
            meter.count = meter.new_count = 0

    def _gather_replicas(self, group: dist.ProcessGroup) -> None:
        """Merges the statistics of all replicas in the order of their ranks: all get the same bits."""
        if not self._meters:
            return
        counts = self._meters[0].mean.new_tensor([m.count for m in self._meters], dtype=torch.float64)
        sums = [t.double() for m in self._meters for t in (m.mean, m.squares)]
        mine = torch.cat([counts, *sums])
        replicas = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(replicas, mine, group=group)
        lengths = [len(counts), *(len(t) for t in sums)]
        parts = [list(replica.split(lengths)) for replica in replicas]
        means, squares, total = parts[0][1::2], parts[0][2::2], [int(c) for c in parts[0][0]]
        for replica in parts[1:]:
            new = [int(c) for c in replica[0]]
            _merge(means, squares, total, replica[1::2], replica[2::2], new)
            total = [a + b for a, b in zip(total, new, strict=True)]
        for meter, mean, square, count in zip(self._meters, means, squares, total, strict=True):
            meter.mean.copy_(mean)
            meter.squares.copy_(square)
            meter.count = count


def _merge(
    means: list[Tensor],
    squares: list[Tensor],
    counts: list[int],
    new_means: list[Tensor],
    new_squares: Iterable[Tensor],
    new_counts: list[int],
) -> None:
    """Merges means and sums of squared deviations of two samples into the first, in place, without
    cancellation.
    """
    totals = [max(a + b, 1) for a, b in zip(counts, new_counts, strict=True)]
    deltas = torch._foreach_sub(new_means, means)
    torch._foreach_add_(squares, list(new_squares))
    shift = torch._foreach_mul(deltas, deltas)
    torch._foreach_mul_(shift, [a * b / n for a, b, n in zip(counts, new_counts, totals, strict=True)])
    torch._foreach_add_(squares, shift)
    torch._foreach_mul_(deltas, [b / n for b, n in zip(new_counts, totals, strict=True)])
    torch._foreach_add_(means, deltas)


def _update_factor(module: _BatchNorm) -> float:
    if module.momentum is not None:
        return float(module.momentum)
    assert module.num_batches_tracked is not None
    return 1.0 / float(module.num_batches_tracked)  # momentum None: the cumulative average over mini-batches


def _refuse_unsupported(module: nn.Module) -> None:
    if isinstance(module, nn.SyncBatchNorm):
        raise ValueError(
            "SyncBatchNorm normalizes over replicas inside a micro-batch, which a pipeline does not "
            "schedule; use BatchNorm, "
            "and replica_group for the moving averages of all replicas"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise ValueError(
            f"{module} tracks moving averages at every forward, so micro-batches and recomputation would "
            "change them; set "
            f"track_running_stats=False"
        )

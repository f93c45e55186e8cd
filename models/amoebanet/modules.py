"""Modules that AmoebaNet needs and torch lacks: SAME padding, a tolerant normalization, drop path.

With stride 2 on an even map TensorFlow's SAME padding puts the odd row and column at the bottom and right: a
3x3 window pads (0, 1), where torch's symmetric `padding=` would sample another grid. Averages and maxima
exclude the padding. Pools get the same windows by `ceil_mode`, without a padded copy of the input.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Rows (or columns) to add before and after, for an output of ceil(size / stride)."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class SameConv2d(nn.Conv2d):
    """A convolution with SAME padding: (N, C, H, W) -> (N, filters, H / stride, W / stride), rounded up."""

    def forward(self, x: Tensor) -> Tensor:
        pad_h, pad_w = (
            same_padding(size, kernel, stride)
            for size, kernel, stride in zip(x.shape[-2:], self.kernel_size, self.stride, strict=True)
        )
        if pad_h[0] == pad_h[1] and pad_w[0] == pad_w[1]:
            return F.conv2d(x, self.weight, self.bias, self.stride, (pad_h[0], pad_w[0]), groups=self.groups)
        x = F.pad(x, (*pad_w, *pad_h))
        return F.conv2d(x, self.weight, self.bias, self.stride, groups=self.groups)


class SamePool2d(nn.Module):
    """A maximum or average over square windows with SAME padding, padding excluded from the result.

    Args:
        kind: `"max"` or `"avg"`.
        kernel: side of the window.
        stride: step of the window; the output has ceil(size / stride) rows and columns.
    """

    def __init__(self, kind: str, kernel: int, stride: int) -> None:
        super().__init__()
        if kind not in ("max", "avg"):
            raise ValueError(f"unknown pooling kind {kind!r}: choose 'max' or 'avg'")
        if stride == 1 and kernel % 2 == 0:
            # ceil_mode adds the window that hangs over the end only if the stride leaves room for one.
            raise ValueError(
                f"kernel={kernel} with stride=1 is not allowed: SAME padding would need a padded copy"
            )
        self.kind = kind
        self.kernel = kernel
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        before = [same_padding(size, self.kernel, self.stride)[0] for size in x.shape[-2:]]
        if self.kind == "max":
            return F.max_pool2d(x, self.kernel, self.stride, before, ceil_mode=True)
        return F.avg_pool2d(x, self.kernel, self.stride, before, ceil_mode=True, count_include_pad=False)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, kernel={self.kernel}, stride={self.stride}"


class BatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` whose training mode also accepts (1, C, 1, 1), with the reference's result.

    The last maps of a network may be 1x1 (the auxiliary head's always is), and with one example per
    micro-batch torch refuses to train there: its running variance divides by (values - 1). The TensorFlow
    reference divides by at least 1, which gives the shift as output, no gradient for the input and a
    variance of 0. The same happens here.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.numel() != x.size(1):
            return super().forward(x)
        self._follow(x.detach().flatten())
        shape = (1, -1, 1, 1)
        return (x - x) * self.weight.view(shape) + self.bias.view(shape)

    @torch.no_grad()
    def _follow(self, mean: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1.0 / int(self.num_batches_tracked) if share is None else share
        share = 0.0 if share is None else share
        # As in torch, the update must not invalidate live autograd graphs, which have saved the averages and
        # do not read them in training.
        self.running_mean.data.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.data.mul_(1.0 - share)


class DropPath(nn.Module):
    """Keeps each example with probability `keep` and scales it by 1 / keep, or makes it zero.

    The keep probability changes during training: `set_drop_path` sets it for a model or a stage. Draws use
    torch's default generator; in evaluation and at `keep` = 1 nothing is drawn. Shape: (N, ...) -> the same.
    """

    def __init__(self, keep: float = 1.0) -> None:
        super().__init__()
        self.keep = check_keep(keep)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep == 1.0:
            return x
        kept = torch.rand((x.size(0),) + (1,) * (x.dim() - 1), device=x.device) < self.keep
        return x * (kept.to(x.dtype) / self.keep)

    def extra_repr(self) -> str:
        return f"keep={self.keep}"


def check_keep(keep: float) -> float:
    """Returns `keep` if 0 < keep <= 1, else raises `ValueError`."""
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"drop path keep={keep!r} is not allowed: give a number with 0 < keep <= 1")
    return float(keep)


def set_drop_path(model: nn.Module, keep: float) -> int:
    """Sets the keep probability of every `DropPath` in `model`; returns how many there are."""
    check_keep(keep)
    paths = [module for module in model.modules() if isinstance(module, DropPath)]
    for path in paths:
        path.keep = float(keep)
    return len(paths)

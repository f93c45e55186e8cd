"""TensorFlow's SAME padding for convolutions and pools, beyond torch's symmetric `padding=`.

With stride 2 on an even map SAME puts the odd row and column at the bottom and right: a 3x3 window pads
(0, 1), where `padding=1` would sample another grid. Averages leave the padding out of the divisor, maxima
never see it. Pools reach the same windows through `ceil_mode` without a padded copy of the input.
"""

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

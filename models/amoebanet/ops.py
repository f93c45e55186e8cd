"""The operations of AmoebaNet's cells, each built for its channels, stride and padding convention.

Two conventions exist. "same" is the TensorFlow reference: SAME padding (asymmetric at stride 2 on even
maps) and its initialisation. "symmetric" is torchgpipe's port: torch's `padding=kernel // 2`, a 2x2
maximum without padding, and torch's default initialisation. Every convolution is free of bias and
followed by batch normalization.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_bench.models.amoebanet.modules import BatchNorm2d, DropPath, SameConv2d, SamePool2d


@dataclass(frozen=True, slots=True)
class Style:
    """Settings that all operations of one network share.

    Args:
        padding: `"same"` or `"symmetric"`, see above.
        averaging_max_pool: `max3` takes averages instead of maxima, as torchgpipe's `max_pool_3x3` does
            by mistake.
        drop_path_keep: the initial keep probability of drop path.
    """

    padding: str = "same"
    averaging_max_pool: bool = False
    drop_path_keep: float = 1.0


def initialize_tf(weight: Tensor, fan_out: int) -> None:
    """The reference's weights: normal with sigma^2 = 1.3 * 2 / fan_out, truncated at 2 sigma.

    Uses the inverse distribution function, with one draw per weight; torch's own function rejects and
    redraws, which fake tensors cannot do. On the meta device nothing happens.
    """
    if not weight.is_meta:
        limit, sigma = math.erf(math.sqrt(2.0)), math.sqrt(1.3 * 2.0 / fan_out)
        with torch.no_grad():
            weight.uniform_(-limit, limit).erfinv_().mul_(math.sqrt(2.0) * sigma)
            weight.clamp_(-2.0 * sigma, 2.0 * sigma)


class ReferenceConv2d(nn.Conv2d):
    """A convolution with the reference's initialisation; a depthwise one has fan-out K x K."""

    def reset_parameters(self) -> None:
        filters, _, height, width = self.weight.shape
        initialize_tf(self.weight, filters // self.groups * height * width)


class ReferenceSameConv2d(SameConv2d, ReferenceConv2d):
    """A SAME convolution with the reference's initialisation."""


class ReferenceLinear(nn.Linear):
    """A fully connected layer with the reference's initialisation and no initial shift."""

    def reset_parameters(self) -> None:
        initialize_tf(self.weight, self.out_features)
        if not self.bias.is_meta:
            nn.init.zeros_(self.bias)


def linear(channels: int, filters: int, padding: str) -> nn.Linear:
    """A fully connected layer with the initialisation of the padding convention."""
    return (ReferenceLinear if padding == "same" else nn.Linear)(channels, filters)


def framed_conv(channels: int, filters: int, kernel: int, stride: int, frame: int, padding: str) -> nn.Conv2d:
    """A convolution over a map framed by `frame` zeros; `padding` only decides the initialisation."""
    kind = ReferenceConv2d if padding == "same" else nn.Conv2d
    return kind(channels, filters, kernel, stride, frame, bias=False)


def conv(
    channels: int,
    filters: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: str,
    groups: int = 1,
) -> nn.Conv2d:
    """A convolution without bias in the given padding convention."""
    if padding == "same":
        return ReferenceSameConv2d(channels, filters, kernel, stride, groups=groups, bias=False)
    symmetric = (kernel[0] // 2, kernel[1] // 2)
    return nn.Conv2d(channels, filters, kernel, stride, symmetric, groups=groups, bias=False)


def conv_bn(
    channels: int,
    filters: int,
    padding: str,
    kernel: tuple[int, int] = (1, 1),
    stride: tuple[int, int] = (1, 1),
) -> list[nn.Module]:
    """ReLU, convolution, batch normalization."""
    return [nn.ReLU(), conv(channels, filters, kernel, stride, padding), BatchNorm2d(filters)]


class FactorizedReduction(nn.Module):
    """Halves a map without losing pixels: a 1x1 convolution on the even pixels, one on the odd.

    (N, channels, H, W) -> (N, filters, ceil(H / 2), ceil(W / 2)); no ReLU; one normalization over both
    halves. The odd grid runs over a zero row and column at the bottom and right where the size is odd.
    With another `stride` the two grids are as far apart and take every so many pixels, as in the reference,
    which loses some. The reference demands an even number of filters; published sizes such as (18, 190)
    have an odd one, and the odd grid then gets one more.
    """

    def __init__(self, channels: int, filters: int, padding: str, stride: int = 2) -> None:
        super().__init__()
        self.stride = stride
        self.even = conv(channels, filters // 2, (1, 1), (1, 1), padding)
        self.odd = conv(channels, filters - filters // 2, (1, 1), (1, 1), padding)
        self.bn = BatchNorm2d(filters)

    def forward(self, x: Tensor) -> Tensor:
        step = self.stride
        height, width = (int(size % step == 1) for size in x.shape[2:])  # numbers of zeros
        odd = F.pad(x[:, :, 1::step, 1::step], (0, width, 0, height))
        halves: Tensor = self.bn(torch.cat([self.even(x[:, :, ::step, ::step]), self.odd(odd)], dim=1))
        return halves


def operation(name: str, channels: int, filters: int, stride: int, style: Style) -> nn.Module:
    """Builds the operation called `name`, one of `genotypes.OPERATIONS`.

    Shapes: (N, channels, H, W) -> (N, filters, H / stride, W / stride). Drop path follows every
    operation except `none`.
    """
    if name == "none":
        if stride == 1 and channels == filters:
            return nn.Identity()
        return nn.Sequential(*conv_bn(channels, filters, style.padding, stride=(stride, stride)))
    if name == "1x1":
        body = conv_bn(channels, filters, style.padding, stride=(stride, stride))
    elif name in ("3x3", "1x7_7x1"):
        body = _bottleneck(name, channels, filters, stride, style.padding)
    elif name.startswith("sep"):
        body = _separable(name, channels, filters, stride, style.padding)
    else:
        body = [_pool(name, stride, style)]
        if channels != filters:
            body += [conv(channels, filters, (1, 1), (1, 1), style.padding), BatchNorm2d(filters)]
    return nn.Sequential(*body, DropPath(style.drop_path_keep))


def _bottleneck(name: str, channels: int, filters: int, stride: int, padding: str) -> list[nn.Module]:
    """The convolution with filters // 4 channels, between two 1x1; without them if that is 0."""
    narrow = filters // 4
    before = conv_bn(channels, narrow, padding) if narrow else []
    after = conv_bn(narrow, filters, padding) if narrow else []
    width, channels = (narrow, narrow) if narrow else (filters, channels)
    if name == "3x3":
        middle = conv_bn(channels, width, padding, (3, 3), (stride, stride))
    else:
        middle = conv_bn(channels, width, padding, (1, 7), (1, stride))
        middle += conv_bn(width, width, padding, (7, 1), (stride, 1))
    return before + middle + after


def _separable(name: str, channels: int, filters: int, stride: int, padding: str) -> list[nn.Module]:
    """`sepKxK_n`: n times ReLU, depthwise KxK, pointwise, normalization; only the first is strided."""
    shape, repeats = name.removeprefix("sep").split("_")
    side = int(shape.split("x")[0])
    layers: list[nn.Module] = []
    for _ in range(int(repeats)):
        layers += [
            nn.ReLU(),
            conv(channels, channels, (side, side), (stride, stride), padding, groups=channels),
            conv(channels, filters, (1, 1), (1, 1), padding),
            BatchNorm2d(filters),
        ]
        channels, stride = filters, 1
    return layers


def _pool(name: str, stride: int, style: Style) -> nn.Module:
    kind, kernel = name[:3], int(name[3:])
    if name == "max3" and style.averaging_max_pool:
        kind = "avg"
    if style.padding == "same":
        return SamePool2d(kind, kernel, stride)
    if kind == "avg":
        return nn.AvgPool2d(kernel, stride, kernel // 2, count_include_pad=False)
    return nn.MaxPool2d(kernel, stride, padding=1 if kernel == 3 else 0)

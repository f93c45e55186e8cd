"""ResNet-101 as a flat sequence of 370 layers, so that a stage may begin inside a residual block.

Every convolution, normalization and ReLU is a layer. Inside a block layers pass (x, skip). Weights have
torchvision's layout and initialisation; with equal weights outputs are equal. torchgpipe's published
partitions of ResNet-101 count the same 370 layers. ReLUs are not in place: a stage that begins with one would
overwrite its own input.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from gpipe_bench.models import checks

EXPANSION = 4
RESNET101_BLOCKS = (3, 4, 23, 3)


class Conv2d(nn.Conv2d):
    """A convolution without bias, initialised as in torchvision: Kaiming normal by fan-out."""

    def __init__(self, channels: int, filters: int, kernel: int, stride: int = 1) -> None:
        super().__init__(channels, filters, kernel, stride, kernel // 2, bias=False)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class Stash(nn.Module):
    """x -> (x, skip) at the start of a block; both are the same tensor, nothing is copied."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Main(nn.Module):
    """Applies `module` to x of (x, skip) and passes the skip on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, skip = state
        return self.module(x), skip


class Residual(nn.Module):
    """(x, skip) -> x + skip at the end of a block, the skip projected where the shape changes."""

    def __init__(self, downsample: nn.Sequential | None) -> None:
        super().__init__()
        self.downsample = downsample

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        x, skip = state
        return x + (skip if self.downsample is None else self.downsample(skip))


def resnet101(
    *,
    num_classes: int = 1000,
    image_size: int = 224,
    num_blocks: Sequence[int] = RESNET101_BLOCKS,
    num_filters: int = 64,
) -> nn.Sequential:
    """Builds ResNet-101: images (N, 3, S, S) -> logits (N, num_classes).

    Args:
        num_classes: classes.
        image_size: S in pixels, the size of the example batches; the network itself takes any.
        num_blocks: residual blocks of the four stacks; (3, 4, 23, 3) is ResNet-101; smaller numbers scale it
            down.
        num_filters: channels of the stem and of the first stack's 3x3 convolutions; 64 is ResNet-101.

    Raises:
        ValueError: an option is out of range.
    """
    checks.positive_int("image_size", image_size)
    num_classes = checks.positive_int("num_classes", num_classes)
    num_filters = checks.positive_int("num_filters", num_filters)
    if len(num_blocks) != 4:
        raise ValueError(f"num_blocks={num_blocks!r} is not allowed: give the blocks of the four stacks")
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=Conv2d(3, num_filters, 7, 2),
        bn1=nn.BatchNorm2d(num_filters),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, 2, 1),
    )
    channels = num_filters
    for stack, blocks in enumerate(num_blocks, start=1):
        planes = num_filters * 2 ** (stack - 1)
        for block in range(checks.positive_int("num_blocks", blocks)):
            stride = 2 if stack > 1 and block == 0 else 1
            parts = _block(channels, planes, stride)
            layers.update((f"layer{stack}_{block}_{name}", layer) for name, layer in parts.items())
            channels = planes * EXPANSION
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(channels, num_classes)
    return nn.Sequential(layers)


def _block(channels: int, planes: int, stride: int) -> dict[str, nn.Module]:
    """The eleven layers of one bottleneck block; the stride is in the 3x3 convolution."""
    out = planes * EXPANSION
    downsample = None
    if stride != 1 or channels != out:
        downsample = nn.Sequential(Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out))
    return {
        "stash": Stash(),
        "conv1": Main(Conv2d(channels, planes, 1)),
        "bn1": Main(nn.BatchNorm2d(planes)),
        "relu1": Main(nn.ReLU()),
        "conv2": Main(Conv2d(planes, planes, 3, stride)),
        "bn2": Main(nn.BatchNorm2d(planes)),
        "relu2": Main(nn.ReLU()),
        "conv3": Main(Conv2d(planes, out, 1)),
        "bn3": Main(nn.BatchNorm2d(out)),
        "residual": Residual(downsample),
        "relu3": nn.ReLU(),
    }

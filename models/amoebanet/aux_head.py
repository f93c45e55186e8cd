"""The auxiliary classifier of AmoebaNet's reference, trained with weight 0.4."""

import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_bench.models.amoebanet.modules import BatchNorm2d
from gpipe_bench.models.amoebanet.ops import framed_conv, linear

AUX_SCALING = 0.4


class AuxHead(nn.Module):
    """The auxiliary classifier: in training appends its logits (N, classes) to the tuple.

    Args:
        channels, size: channels and side of the map `net` that it reads; the side must be at least 5.

    In evaluation the tuple passes unchanged.
    """

    def __init__(self, channels: int, size: int, num_classes: int, padding: str) -> None:
        super().__init__()
        narrow, wide, side = int(128 * AUX_SCALING), int(768 * AUX_SCALING), (size - 5) // 3 + 1
        self.pool = nn.AvgPool2d(5, stride=3)
        self.proj = framed_conv(channels, narrow, 1, 1, 0, padding)
        self.proj_bn = BatchNorm2d(narrow)
        self.conv = framed_conv(narrow, wide, side, 1, 0, padding)
        self.conv_bn = BatchNorm2d(wide)
        self.fc = linear(wide, num_classes, padding)

    def forward(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.training:
            return state
        x = F.relu(self.proj_bn(self.proj(self.pool(F.relu(state[0])))))
        x = F.relu(self.conv_bn(self.conv(x)))
        return *state, self.fc(x.flatten(1))

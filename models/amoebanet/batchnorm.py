"""Batch normalization that survives a single value per channel.

The last maps of a network may be 1x1 (the auxiliary head's always is), and with one example per
micro-batch torch refuses to train there: its running variance divides by (values - 1). The TensorFlow
reference divides by at least 1, which gives the shift as output, no gradient for the input and a variance
of 0. The same happens here.
"""

import torch
from torch import Tensor, nn


class BatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` whose training mode also accepts (1, C, 1, 1), with the reference's result."""

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
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.mul_(1.0 - share)

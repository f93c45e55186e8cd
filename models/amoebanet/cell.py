"""An AmoebaNet cell of any genotype, as a pipeline layer.

A cell reads the outputs of the two cells before it, so a layer passes on `(net, prev)`: its own output and
its input. Anything after these in the tuple (auxiliary logits) passes unchanged.
"""

import torch
from torch import Tensor, nn

from gpipe_bench.models.amoebanet.genotypes import CellPlan
from gpipe_bench.models.amoebanet.ops import FactorizedReduction, Style, conv_bn, operation


class Cell(nn.Module):
    """Maps `(net, prev, *rest)` to `(out, net, *rest)`; the first cell takes the stem's tensor for both.

    Args:
        plan: operations, their inputs and the concatenated states.
        filters: F, the width of each state; the output has len(plan.concat) * F channels.
        net_channels, prev_channels: channels of the two inputs.
        stride: 2 for a reduction cell (operations on states 0 and 1 are strided), else 1.
        prev_stride: ratio of the sides of `prev` and `net` where `prev` is reduced: the stride of the cell
            before.
        prev_match: how `prev` gets `net`'s size and F channels: `"raw"` (unchanged, for the reference's first
            cell), `"project"` (1x1 convolution if the channels differ) or `"reduce"` (`prev` is a larger
            map).
        reduce_concat: whether a concatenated state 0 or 1 is reduced to the size of the others; true for a
            reduction cell unless its input is a single pixel.

    Shapes: net (N, net_channels, H, W), prev (N, prev_channels, H', W'), out (N, C, ceil(H / stride),
    ...).
    """

    def __init__(
        self,
        plan: CellPlan,
        *,
        filters: int,
        net_channels: int,
        prev_channels: int,
        stride: int,
        prev_match: str,
        reduce_concat: bool,
        style: Style,
        prev_stride: int = 2,
    ) -> None:
        super().__init__()
        self.inputs = plan.inputs
        self.concat = plan.concat
        self.net = nn.Sequential(*conv_bn(net_channels, filters, style.padding))
        self.prev: nn.Module = nn.Identity()
        if prev_match == "reduce":
            reduction = FactorizedReduction(prev_channels, filters, style.padding, prev_stride)
            self.prev = nn.Sequential(nn.ReLU(), reduction)
        elif prev_match == "project" and prev_channels != filters:
            self.prev = nn.Sequential(*conv_bn(prev_channels, filters, style.padding))
        prev_width = prev_channels if prev_match == "raw" else filters
        self.ops = nn.ModuleList(
            operation(
                name,
                prev_width if state == 1 else filters,
                filters,
                stride if state < 2 else 1,
                style,
            )
            for name, state in zip(plan.operations, plan.inputs, strict=True)
        )
        # States 2 to 6 have the size of the output; only C's reduction cell concatenates another state (0).
        self.concat_match = nn.ModuleDict(
            {
                str(state): FactorizedReduction(filters, filters, style.padding, stride)
                for state in plan.concat
                if state < 2 and reduce_concat
            }
        )

    def forward(self, state: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        net, prev, *rest = state if isinstance(state, tuple) else (state, state)
        states = [self.net(net), self.prev(prev)]
        for pair in range(0, len(self.inputs), 2):
            left = self.ops[pair](states[self.inputs[pair]])
            right = self.ops[pair + 1](states[self.inputs[pair + 1]])
            states.append(left + right)
        parts = [
            self.concat_match[str(i)](states[i]) if str(i) in self.concat_match else states[i]
            for i in self.concat
        ]
        return torch.cat(parts, dim=1), net, *rest

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, concat={self.concat}"

"""An estimate of what each layer costs, the same on every machine.

Stages are balanced before anything has run, and all processes of a pipeline must come to the same cut, so
measured times will not do. The layers are run on fake tensors (nothing is computed, no state is touched) and
charged for their multiplications and for the bytes they move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.pipeline.memory.fake_tensors import QuickFakeTensors
from gpipe_bench.pipeline.memory.profile import fake_copy
from gpipe_bench.pipeline.stage.portals import Carried, declarations
from gpipe_bench.pipeline.stage.trees import Tree, change, tensors_of

# A CPU core and a GPU alike do about ten floating-point operations in the time in which they move a byte.
FLOPS_PER_BYTE = 10


def layer_costs(layers: Sequence[nn.Module], example: Tree) -> tuple[float, ...]:
    """Forward cost of each layer on one micro-batch, in floating-point operations or what takes as long.

    `example` is a micro-batch; only its shapes and dtypes count, so it may be on the meta device.
    """
    costs = []
    carried = Carried(declarations(layers))
    with QuickFakeTensors(), torch.no_grad():
        value: Tree = change(
            example, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), "the example"
        )
        for index, layer in enumerate(layers):
            fake = fake_copy(layer)
            moved = sum(_bytes(t) for t in (*fake.parameters(), *tensors_of(value)))
            with FlopCounterMode(display=False) as counter:
                value = carried.through(index, fake, value)
            moved += sum(_bytes(t) for t in tensors_of(value, f"the output of {type(layer).__name__}"))
            costs.append(float(counter.get_total_flops() + FLOPS_PER_BYTE * moved))
    return tuple(costs)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

"""The paper's models, each an `nn.Sequential` of layers to profile, cut into stages and train.

A layer maps a tensor or a tuple of tensors to a tensor or a tuple; equal layers are built equally, so
that one profile serves all of them. Everything can be built on the meta device, at full size and without
memory.
"""

from gpipe_bench.models.amoebanet.drop_path import set_drop_path
from gpipe_bench.models.counting import count_parameters, layer_parameters
from gpipe_bench.models.registry import MODELS, example_batch, loss_fn

__all__ = [
    "MODELS",
    "count_parameters",
    "example_batch",
    "layer_parameters",
    "loss_fn",
    "set_drop_path",
]

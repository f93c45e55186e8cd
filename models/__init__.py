"""The paper's models and some others, each an `nn.Sequential` of layers, ready to be profiled, cut into
stages and trained.

A layer maps a tensor or a tuple of tensors to a tensor or a tuple. Equal layers have equal configurations, so
that each is profiled once. Every model can be built on the meta device, at full size and without memory.
Names are imported at first use, so that `zoo` lists models without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_bench.models.amoebanet.modules import set_drop_path
    from gpipe_bench.models.registry import MODELS, example_batch, loss_fn
    from gpipe_bench.models.shapes import SHAPES
    from gpipe_bench.models.zoo import count_parameters, layer_parameters

_HOMES = {
    "MODELS": "registry",
    "SHAPES": "shapes",
    "example_batch": "registry",
    "loss_fn": "registry",
    "count_parameters": "zoo",
    "layer_parameters": "zoo",
    "set_drop_path": "amoebanet.modules",
}

__all__ = [
    "MODELS",
    "SHAPES",
    "count_parameters",
    "example_batch",
    "layer_parameters",
    "loss_fn",
    "set_drop_path",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

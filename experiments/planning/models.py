"""The models of `plan` and `size`: published shapes by name and one's own, built without memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.experiments.table1.model_costs import PRECISIONS, ModelProfile, resized
from gpipe_bench.models import MODELS, SHAPES, count_parameters, example_batch, loss_fn
from gpipe_bench.pipeline.memory.boundary import Boundary, as_tuple
from gpipe_bench.pipeline.memory.profile import Profiler

BATCH_SIZE = 32
"""Examples of the mini-batch of a published shape, where none are given."""

WANTED = (
    "it takes no arguments and returns (layers, inputs) or (layers, inputs, target, loss_fn), the inputs an "
    "example of a mini-batch"
)


@dataclass(frozen=True)
class Model:
    """A model with an example of its mini-batch, on the meta device.

    Args:
        name: as it was asked for
        layers: of the sequence
        loss_fn: (output, target) -> scalar
        inputs, target: of one mini-batch
        num_parameters: a matrix that two layers share counted once
    """

    name: str
    layers: tuple[nn.Module, ...]
    loss_fn: Callable[[Any, Tensor], Tensor]
    inputs: Boundary
    target: Boundary
    num_parameters: int
    _profiles: dict[tuple[object, ...], ModelProfile] = field(default_factory=dict, repr=False, compare=False)

    @property
    def batch_size(self) -> int:
        """Examples in a mini-batch."""
        return self.inputs.tensors[0].shape[0]

    def profile(
        self, num_microbatches: int, precision: str, *, compiled: bool = False, split_backward: bool = False
    ) -> ModelProfile:
        """Of one micro-batch; layers that are alike once. `num_microbatches` divides the mini-batch."""
        key = (num_microbatches, precision, compiled, split_backward)
        if key not in self._profiles:
            profiler = Profiler(PRECISIONS[precision], compiled=compiled, split_backward=split_backward)
            size = self.batch_size // num_microbatches
            self._profiles[key] = ModelProfile(
                *profiler.model(
                    self.layers, self.loss_fn, resized(self.inputs, size), resized(self.target, size)
                )
            )
        return self._profiles[key]


def model_of(name: str, batch_size: int | None = None, num_layers: int | None = None) -> Model:
    """The published shape or the user's `module:function` of that name.

    Args:
        name: a key of `gpipe_bench.models.SHAPES`, or where one's own function stands
        batch_size: examples of the mini-batch; None for 32 of a shape, or as many as one's own example has
        num_layers: blocks, instead of the shape's own; of GPT-2 and Llama only

    Raises ValueError, naming value and remedy, for what is neither or cannot be built.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"--batch-size {batch_size}: a mini-batch has at least 1 example")
    if num_layers is not None and (name not in SHAPES or SHAPES[name][0] == "unet"):
        raise ValueError(f"--num-layers {num_layers}: {name} has the layers it has; leave the option out")
    if name not in SHAPES:
        found = _own(name)
        if batch_size is None:
            return found
        return Model(
            found.name, found.layers, found.loss_fn, resized(found.inputs, batch_size),
            resized(found.target, batch_size), found.num_parameters,
        )  # fmt: skip
    builder, options = SHAPES[name]
    if num_layers is not None:
        options = {**options, "num_layers": num_layers}
    with torch.device("meta"):
        counted = model = MODELS[builder](**options)
        if builder == "gpt2":  # the two ends of the tie are in two processes, which hold the matrix each
            model = MODELS[builder](**options, tied=False)
    inputs, target = example_batch(builder, batch_size or BATCH_SIZE, device="meta", **options)
    return Model(
        name, tuple(model), loss_fn(builder, **options), Boundary.of(inputs), Boundary.of(target),
        count_parameters(counted),
    )  # fmt: skip


def _own(name: str) -> Model:
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ValueError(f"{name!r} is no module:function, such as my_models:small; {WANTED}")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name}: {error}; start from the folder that holds the module, or add that to PYTHONPATH"
        ) from error
    try:
        with torch.device("meta"):
            given = function()
    except Exception as error:
        raise ValueError(f"{name} failed with {type(error).__name__}: {error}; {WANTED}") from error
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 4):
        raise ValueError(f"{name} returned {_kind(given)}; {WANTED}")
    layers = tuple(given[0]) if isinstance(given[0], (nn.Sequential, list, tuple)) else ()
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise ValueError(
            f"{name} returned layers of {_kind(given[0])}: return an nn.Sequential or a list of layers"
        )
    examples = {tensor.shape[0] if tensor.dim() else 0 for tensor in as_tuple(given[1])}
    if len(examples) != 1 or 0 in examples:
        raise ValueError(
            f"{name}: the inputs have {sorted(examples)} examples: give all of them the same first dimension"
        )
    target, loss = (given[2], given[3]) if len(given) == 4 else (torch.empty(*examples, device="meta"), _mean)
    parameters = count_parameters(nn.ModuleList(layers))
    return Model(name, layers, loss, Boundary.of(given[1]), Boundary.of(target), parameters)


def _mean(output: Any, target: Tensor) -> Tensor:
    """A loss for a model that comes without one: it keeps nothing."""
    return torch.stack([each.float().mean() for each in as_tuple(output) if each.is_floating_point()]).sum()


def _kind(value: object) -> str:
    count = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"type {type(value).__name__}{count}"

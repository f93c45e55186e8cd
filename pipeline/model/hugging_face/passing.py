"""What the layers of every family pass to each other: activations, then what all layers need as it came.

Attention masks travel as they were given, (N, T), and each layer widens its own: a mask of (N, 1, T, T) would
be the largest message of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

Value = Tensor | tuple[Tensor, ...]


def named(batch: Value | Mapping[str, Tensor], inputs: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a batch by the names of the model's arguments, which a dict has already."""
    if isinstance(batch, Mapping):
        if set(batch) != set(inputs):
            raise ValueError(
                f"the batch has {', '.join(map(repr, batch))} for the inputs {', '.join(inputs)}; give "
                "layers_of the names of what the model shall be given as inputs=, and leave out of the batch "
                "what is not among them: labels are the target of the step"
            )
        return {name: batch[name] for name in inputs}
    tensors = (batch,) if isinstance(batch, Tensor) else batch
    if len(tensors) != len(inputs):
        raise ValueError(
            f"the batch has {len(tensors)} tensors for the inputs {', '.join(inputs)}; give layers_of the "
            "names of what the batch holds, in its order, as inputs="
        )
    return dict(zip(inputs, tensors, strict=True))


def parted(value: Value) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Activations, and what is passed on."""
    return (value, ()) if isinstance(value, Tensor) else (value[0], value[1:])


def joined(hidden: Tensor, rest: tuple[Tensor, ...]) -> Value:
    """The inverse of `parted`."""
    return (hidden, *rest) if rest else hidden

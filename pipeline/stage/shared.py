"""What all layers share in a step, as it travels: the tensors and the structure of the keyword arguments.

A mask without a batch dimension or a flag belongs to the step and not to the micro-batch: it is given once,
and every micro-batch uses the same tensors. So none of them may change while the step runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gpipe_bench.pipeline.stage import trees
from gpipe_bench.pipeline.stage.trees import Message, unflatten


def take_apart(shared: Mapping[str, Any]) -> Message:
    """`ValueError` for a tensor that requires a gradient, `TypeError` for what cannot travel."""
    tensors, structure = trees.take_apart(dict(shared), "shared", constant=True)
    if any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "shared holds a tensor that requires a gradient, which a pipeline does not compute; pass "
            "tensor.detach(), or make it a parameter of the layers"
        )
    return Message(tensors, structure, (False,) * len(tensors))


def put_together(message: Message | None, device: torch.device) -> Mapping[str, Any] | None:
    """The arguments on the device of a stage."""
    if message is None:
        return None
    tensors = [tensor.to(device, non_blocking=True) for tensor in message.tensors]
    return unflatten(tensors, message.structure)  # type: ignore[no-any-return]


def versions(message: Message | None) -> tuple[int, ...]:
    """How often each tensor has been changed in place, of those that count it."""
    return () if message is None else tuple([t._version for t in message.tensors if not t.is_inference()])

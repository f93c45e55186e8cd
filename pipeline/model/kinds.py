"""Which values of a graph are tensors for certain.

A portal carries tensors alone, and what a module gives a graph doesn't say. So it is looked at what makes a
value and what is done with it; where neither tells, the value is passed on from layer to layer, as any may.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

_ARITHMETIC = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, operator.neg),
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.pow),
    }
)
_TAKE_LISTS = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "einsum", "block_diag"})
_GIVE_TENSORS = (
    nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.Dropout, nn.Dropout2d, nn.Dropout3d,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid,
    nn.LeakyReLU, nn.Softmax, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Upsample,
)  # fmt: skip


def surely_tensor(model: nn.Module, node: fx.Node) -> bool:
    """Whether the value of a node is a tensor whatever its modules do."""
    if any(user.target in (operator.getitem, getattr) for user in node.users):
        return False
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        if type(module) in _GIVE_TENSORS:
            return True
    if node.op == "call_function" and node.target in _ARITHMETIC:
        return True
    return any(_takes_tensor(user, node) for user in node.users)


def _takes_tensor(user: fx.Node, node: fx.Node) -> bool:
    """Whether a user can only do with a tensor what it does with the node."""
    if user.op != "call_function":
        return False
    name = getattr(user.target, "__name__", "")
    if name in _TAKE_LISTS:
        return any(isinstance(each, tuple | list) and node in each for each in user.args)
    if user.target in _ARITHMETIC:
        return node in user.args
    return _is_of_torch(user.target) and bool(user.args) and user.args[0] is node


def _is_of_torch(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return module.startswith(("torch._C._nn", "torch.nn.functional", "torch._VariableFunctions"))

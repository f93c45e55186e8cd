"""Which weights' gradients can wait: operations known well enough to finish their backward without the graph.

The gradient of a weight needs one input of its operation and the gradient of its output, and nothing needs it
before the optimizer. A kind of node stands here if torch computes the gradient of its weight apart from that
of its input, by the same formula. The rest is not worth it: batch and layer normalization get theirs from
the pass over the activations that the gradient of the input takes anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

Formula = Callable[[Tensor], tuple[Tensor, ...]]  # gradient of the output -> of the weight and of the bias


class Kind(NamedTuple):
    """A kind of node of the autograd graph.

    `weight` and `bias` are the places of its weight and bias among `next_functions`. `prepare`, given a node
    and whether its bias needs a gradient, returns the tensors to hold until the weights' turn and the formula
    over them; None where this node is not like the others of its kind.
    """

    weight: int
    bias: int | None
    prepare: Callable[[Any, bool], tuple[tuple[Tensor, ...], Formula] | None]


def _saved(node: Any, name: str) -> Tensor | None:
    """What a node saved, apart from the graph; None if there is nothing, or nothing that can be held.

    Behind a hook a saved tensor may not exist: a checkpoint would compute it, at every look.
    """
    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:
        return None
    tensor: Tensor | None = getattr(node, f"_saved_{name}")
    if tensor is None or tensor.layout is not torch.strided or tensor.is_complex():
        return None
    return tensor.detach()


def _right_factor(node: Any, left: Tensor) -> Callable[[Tensor], Tensor]:
    """The gradient of the right factor of a matrix product, laid out like the factor, as torch does it."""
    (rows, _), (down, across) = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    if down == 1 and across == rows:
        return lambda gradient: gradient.t().mm(left).t()
    return lambda gradient: left.t().mm(gradient)


def _addmm(node: Any, bias: bool) -> tuple[tuple[Tensor, ...], Formula] | None:
    left = _saved(node, "mat1")
    if left is None or node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    weight = _right_factor(node, left)
    # The engine sums a gradient over the dimensions along which its tensor was expanded.
    return (left,), (lambda gradient: (weight(gradient), gradient)) if bias else lambda g: (weight(g),)


def _mm(node: Any, bias: bool) -> tuple[tuple[Tensor, ...], Formula] | None:
    left = _saved(node, "self")
    if left is None:
        return None
    weight = _right_factor(node, left)
    return (left,), lambda gradient: (weight(gradient),)


def _bmm(node: Any, bias: bool) -> tuple[tuple[Tensor, ...], Formula] | None:
    left = _saved(node, "self")
    if left is None:
        return None
    return (left,), lambda gradient: (left.transpose(1, 2).bmm(gradient),)


def _convolution(node: Any, bias: bool) -> tuple[tuple[Tensor, ...], Formula] | None:
    image, kernel = _saved(node, "input"), _saved(node, "weight")
    if image is None or kernel is None:
        return None
    options = (
        node._saved_bias_sym_sizes_opt, node._saved_stride, node._saved_padding, node._saved_dilation,
        node._saved_transposed, node._saved_output_padding, node._saved_groups, [False, True, bias],
    )  # fmt: skip

    def formula(gradient: Tensor) -> tuple[Tensor, ...]:
        _, *gradients = aten.convolution_backward(gradient, image, kernel, *options)
        return tuple(gradients) if bias else (gradients[0],)

    return (image,), formula


def _embedding(node: Any, bias: bool) -> tuple[tuple[Tensor, ...], Formula] | None:
    indices = _saved(node, "indices")
    if indices is None or node._saved_sparse:
        return None
    padding = node._saved_padding_idx
    options = (
        node._saved_weight_sym_argsize_0,
        padding if padding < 2**63 else padding - 2**64,  # it is read as unsigned, and none is -1
        node._saved_scale_grad_by_freq,
    )
    return (indices,), lambda gradient: (aten.embedding_dense_backward(gradient, indices, *options),)


KINDS: dict[str, Kind] = {
    "AddmmBackward0": Kind(weight=2, bias=0, prepare=_addmm),
    "MmBackward0": Kind(weight=1, bias=None, prepare=_mm),
    "BmmBackward0": Kind(weight=1, bias=None, prepare=_bmm),
    "ConvolutionBackward0": Kind(weight=1, bias=2, prepare=_convolution),
    "EmbeddingBackward0": Kind(weight=0, bias=None, prepare=_embedding),
}

# What may stand between a parameter and the operation that it is the weight of: other shapes, copies and
# autocast's casts. They save no tensors, so they can wait as they are; the engine passes them when W comes.
PASSAGES = frozenset(
    f"{name}Backward0"
    for name in (
        "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Expand",
        "Slice", "Select", "Split", "SplitWithSizes", "Clone", "ToCopy",
    )
)  # fmt: skip

"""Tensor parallelism for the Transformers of this package: torch's plans, and what plans leave undone.

A plan divides a block's first matrices by columns and its last by rows, so that a block needs one sum forward
and one backward. A plan alone leaves three errors, two of them silent: a head count of the whole model splits
a rank's channels into wrong heads; dropout inside a divided part draws the same mask on every rank; and plain
parameters beside distributed ones stop optimizers that update many at once. So `tensor_parallel` corrects
head counts, gives divided parts their own random streams, and makes every parameter distributed.

    layout of x between blocks   norm               into the block       out of the block
    whole on every rank          whole              column-wise          row-wise, all-reduce
    divided by tokens            divided, gathered  column-wise          row-wise, reduce-scatter
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from gpipe_bench.models import llama
from gpipe_bench.models.transformer import lm, seq2seq
from gpipe_bench.models.transformer.blocks import Attention, FeedForward, Softmax, TransformerLayer
from gpipe_bench.models.transformer.draws import Division

Plan = list[tuple[str, ParallelStyle]]  # module paths in a layer, and the style of each
TOKENS = 1  # the dimension of (N, T, d) that sequence parallelism divides


class Gathered(ParallelStyle):
    """A normalization that takes x in the layout between blocks and returns it whole.

    The output stays a DTensor, so that the gradients of all its readers are summed once, in the backward.
    """

    def __init__(self, layout: Placement) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, (self.layout,), run_check=False), *inputs[1:])

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.redistribute(mesh, (Replicate(),))

        return distribute_module(module, device_mesh, None, enter, leave)


class Divided(ParallelStyle):
    """An embedding whose outputs at `positions` are divided by tokens; a single output is position 0."""

    def __init__(self, positions: tuple[int, ...]) -> None:
        self.positions = positions

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(x: Tensor) -> Tensor:
            if x.size(TOKENS) % device_mesh.size():
                raise ValueError(
                    f"sequences of {x.size(TOKENS)} tokens cannot be divided over tp={device_mesh.size()}: "
                    "pad them to a multiple of it, or build the plan with sequence=False"
                )
            whole = DTensor.from_local(x, device_mesh, (Replicate(),), run_check=False)
            return whole.redistribute(device_mesh, (Shard(TOKENS),)).to_local()

        def leave(_: nn.Module, inputs: Any, output: Tensor | tuple[Tensor, ...]) -> Any:
            if isinstance(output, Tensor):
                return divide(output)
            return tuple(divide(x) if i in self.positions else x for i, x in enumerate(output))

        module.register_forward_hook(leave)
        return module


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> nn.Module:
    """Divides the Transformer layers of `model` over the ranks of `mesh`, in place; all ranks must call.

    Call it before the `Pipeline` is built; the first rank's weights are used. All parameters become DTensors,
    small ones whole on every rank. Dropout draws differently on each rank where ranks hold different parts,
    and alike where they hold the same.

    Args:
        model: the result of `transformer_lm`, `transformer_seq2seq` or `llama`
        mesh: one dimension, `mesh["tp"]`
        sequence: whether x is divided by tokens between blocks (sequence parallelism): messages,
            normalizations and residuals then have 1 / tp of their size; T must be a multiple of tp

    Returns `model`.

    Raises:
        ValueError: a layer has no known plan, heads or widths are no multiple of the ranks, or two layers
            share a weight.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions: give the one of the tensor parallelism, mesh['tp']"
        )
    for layer, plan in _plans(model, mesh.size(), sequence):
        for path, style in plan:
            parallelize_module(layer, mesh, {path: style})
        for module in layer.modules():
            _count(module, mesh, sequence)
    return model


def check_divisible(model: nn.Module, ranks: int) -> None:
    """`ValueError` where `tensor_parallel` of `model` over so many ranks raises it; needs no processes."""
    _plans(model, ranks, sequence=False)


def _plans(model: nn.Module, ranks: int, sequence: bool) -> list[tuple[nn.Module, Plan]]:
    """Each layer with the styles of its modules."""
    places: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in places:
            raise ValueError(
                f"{places[parameter]} and {name} are one weight, which would be divided twice; build the "
                "model with separate weights (num_tables=2, tied=False)"
            )
        places[parameter] = name
    return [(layer, _plan(name, layer, ranks, sequence)) for name, layer in model.named_children()]


def _plan(name: str, layer: nn.Module, ranks: int, sequence: bool) -> Plan:
    """The styles of a layer's modules; `ValueError` if none are known or sizes don't divide."""
    between: Placement = Shard(TOKENS) if sequence else Replicate()
    into, out = ColwiseParallel(), RowwiseParallel(output_layouts=between)
    table, norm = RowwiseParallel(input_layouts=Replicate()), Gathered(between)
    match layer:
        case TransformerLayer():
            return [
                (f"{part}.{path}", style)
                for part, block in layer.named_children()
                for path, style in _plan(f"{name}.{part}", block, ranks, sequence)
            ]
        case Attention():
            _divides(f"{name}.num_heads", layer.num_heads, ranks)
            read = ColwiseParallel(input_layouts=between) if layer.source == "memory" else into
            return [("norm", norm), ("query", into), ("key", read), ("value", read), ("out", out)]
        case FeedForward():
            _divides(f"the width of {name}.inner", layer.inner.out_features, ranks)
            return [("norm", norm), ("inner", into), ("outer", out)]
        case llama.Block():
            _divides(f"the key and value heads of {name}", layer.key.out_features // layer.head_dim, ranks)
            _divides(f"the width of {name}.inner", layer.inner.out_features, ranks)
            columns = [(path, into) for path in ("query", "key", "value", "gate", "inner")]
            return [("norm_1", norm), ("norm_2", norm), *columns, ("out", out), ("outer", out)]
        case Softmax():
            return [("linear", ColwiseParallel(input_layouts=between, output_layouts=Replicate()))]
        case llama.Output():
            return [("norm", norm), ("logits", ColwiseParallel(output_layouts=Replicate()))]
        case nn.Embedding():
            return [("", table), *_divided(sequence, 0)]
        case lm.Embedding() | seq2seq.TargetEmbedding():
            return [("table", table), *_divided(sequence, 0)]
        case seq2seq.SourceEmbedding():
            return [("table", table), *_divided(sequence, *range(1 + layer.both))]
    if next(layer.parameters(), None) is None:
        return []
    raise ValueError(
        f"no plan is known for layer {name} ({type(layer).__name__}); apply one of your own with "
        "torch.distributed.tensor.parallel.parallelize_module"
    )


def _divided(sequence: bool, *positions: int) -> Plan:
    return [("", Divided(positions))] if sequence else []


def _divides(what: str, number: int, ranks: int) -> None:
    if number % ranks:
        raise ValueError(f"{what} is {number}, which tp={ranks} does not divide")


def _count(module: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """Sets a block's number of heads on this rank, and which of its random draws are this rank's own."""
    if isinstance(module, Attention):
        module.num_heads //= mesh.size()
    if isinstance(module, Attention | FeedForward):
        rank = mesh.get_local_rank()
        module.division = Division(inside=rank, between=rank if sequence else None)

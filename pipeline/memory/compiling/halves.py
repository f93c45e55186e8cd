"""A layer as a compiler sees it: one graph, cut into what runs forward and what runs backward.

`torch.compile` traces a layer's forward and backward together, takes the operations apart into simple ones
and decides by a minimal cut which results are kept between the two and which are computed again. The same
functions are called here, on fake tensors and without compiling anything, so the cut is torch's own.

Everything of torch that is private or takes long to import is imported when a layer is traced.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx, nn

from gpipe_bench.pipeline.memory.boundary import Boundary, as_tuple

VIEWS = frozenset(("_unsafe_view", "reshape", "lift_fresh", "expand"))
"""Operations whose result lies in the storage of their input although their schema does not say so, or not
in every release."""


@dataclass(frozen=True)
class Halves:
    """The two graphs of a layer, and which of their nodes are what.

    Positions are those of `Boundary.tensors`. An output that is an input, handed on, is in no graph:
    ``handed_on`` gives the input's position, for others None.
    """

    forward: fx.Graph
    backward: fx.Graph
    weights: tuple[fx.Node, ...]  # parameters and buffers, in the forward graph
    inputs: dict[int, fx.Node]  # by position, a tensor that stands twice once
    outputs: dict[int, fx.Node]  # by position, without those that are handed on
    handed_on: tuple[int | None, ...]
    kept: tuple[fx.Node, ...]  # in the forward graph, what the backward graph takes ...
    taken: tuple[fx.Node, ...]  # ... and these are the same in the backward graph
    tangents: dict[int, fx.Node]  # gradients of outputs, by position
    parameter_gradients: tuple[fx.Node | None, ...]
    input_gradients: dict[int, fx.Node | None]  # by position


class _Cut(Exception):  # noqa: N818  # no error: it ends the tracing once the graph is cut
    """Carries the two graphs out of torch's tracing."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
        super().__init__()
        self.forward, self.backward, self.num_outputs = forward, backward, num_outputs


def halves(
    layer: nn.Module,
    inputs: Boundary,
    unused: frozenset[int] = frozenset(),
    precision: AbstractContextManager[object] | None = None,
) -> Halves | None:
    """The graphs of a layer, whose parameters are fake tensors; call it under their fake mode.

    None where there is nothing to differentiate, or where an output is a view of an input, which no compiled
    graph returns. ``unused`` are positions of outputs that get no gradient; ``precision`` is entered around
    the forward. Raises ValueError for a layer that returns several views of one tensor.
    """
    import_module("torch._inductor.compile_fx")  # the decompositions look into its lowerings
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch.func import functional_call

    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    num_weights = len(parameters) + len(buffers)
    values = [inputs.tensors[position] for position in inputs.distinct]
    leaves = [spec.empty().requires_grad_(spec.requires_grad) for spec in values]
    place = {position: index for index, position in enumerate(inputs.distinct)}
    handed_on: list[int | None] = []
    returned: list[int] = []
    differentiable: list[bool] = []

    def run(weights: list[Tensor], held: list[Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
        names = dict(zip(parameters, weights, strict=True))
        # Copies, so that a layer that counts its calls or follows statistics writes to no input of the graph.
        state = {name: buffer.clone() for name, buffer in zip(buffers, held, strict=True)}
        every = [tensors[place[first]] for first in inputs.same_as]
        with precision if precision is not None else nullcontext():
            result = functional_call(layer, {**names, **state}, (inputs.build(every),))
        found = {id(t): position for position, t in zip(inputs.distinct, tensors, strict=True)}
        handed_on.clear()
        returned.clear()
        made: dict[int, Tensor] = {}
        for position, tensor in enumerate(as_tuple(result)):
            handed_on.append(found.get(id(tensor)))
            if handed_on[-1] is None and id(tensor) not in made:
                made[id(tensor)] = tensor
                returned.append(position)
        outputs = [t.detach() if p in unused else t for p, t in zip(returned, made.values(), strict=True)]
        differentiable[:] = [t.requires_grad for t in outputs]
        return tuple(outputs)

    def cut(joint: fx.GraphModule, traced: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(
            joint,
            traced,
            compiler="inductor",
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=list(range(num_weights)),
        )
        raise _Cut(forward, backward, num_fwd_outputs)

    traced = aot_function(
        run, fw_compiler=nop, bw_compiler=nop, partition_fn=cut, decompositions=select_decomp_table()
    )
    try:
        traced(list(parameters.values()), list(buffers.values()), leaves)
    except _Cut as found:
        graphs = found
    else:
        return None
    return _named(layer, inputs, graphs, num_weights, len(parameters), handed_on, returned, differentiable)


def _named(
    layer: nn.Module,
    inputs: Boundary,
    graphs: _Cut,
    num_weights: int,
    num_parameters: int,
    handed_on: list[int | None],
    returned: list[int],
    differentiable: list[bool],
) -> Halves | None:
    forward, backward = graphs.forward.graph, graphs.backward.graph
    results = list(_results(forward))
    outputs, kept = results[: graphs.num_outputs], results[graphs.num_outputs :]
    placeholders = [node for node in forward.nodes if node.op == "placeholder"]
    taken = [node for node in backward.nodes if node.op == "placeholder"]
    tangents = [node for node in taken if "tangents" in str(node.target)]
    weights, given = placeholders[:num_weights], placeholders[num_weights:]
    if any(base(node) in given for node in outputs):
        return None
    followed = [position for position, each in zip(returned, differentiable, strict=True) if each]
    if len(outputs) != len(returned) or len(tangents) != len(followed):
        raise ValueError(
            f"layer {type(layer).__name__} returns several views of one tensor, which the model of compiled "
            "layers cannot follow: let it return copies, or leave it uncompiled"
        )
    gradients = list(_results(backward))
    return Halves(
        forward=forward,
        backward=backward,
        weights=tuple(weights),
        inputs=dict(zip(inputs.distinct, given, strict=True)),
        outputs=dict(zip(returned, outputs, strict=True)),
        handed_on=tuple(handed_on),
        kept=tuple(kept),
        taken=tuple(node for node in taken if node not in tangents),
        tangents=dict(zip(followed, tangents, strict=True)),
        parameter_gradients=tuple(gradients[:num_parameters]),
        input_gradients=dict(zip(inputs.distinct, gradients[num_weights:], strict=True)),
    )


def _results(graph: fx.Graph) -> tuple[Any, ...]:
    (end,) = graph.find_nodes(op="output")
    results = end.args[0]
    return tuple(results)


def base(node: fx.Node) -> fx.Node:
    """The node that made the storage in which this one's tensor lies."""
    while node.op == "call_function":
        if _name(node) == "getitem":
            source = node.args[0]
            if not (isinstance(source, fx.Node) and is_view(source)):
                return node
            node = source
        elif not is_view(node):
            return node
        source = node.args[0]
        assert isinstance(source, fx.Node), "a view is a view of something"
        node = source
    return node


def is_view(node: fx.Node) -> bool:
    """Whether the operation makes no storage of its own."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    return _name(node) in VIEWS or any(
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    )


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "_overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def tensor_of(node: fx.Node) -> Tensor | None:
    """The fake tensor that stands for the node's result, None where that is no single tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None

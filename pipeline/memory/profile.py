"""What one layer costs in bytes, found by running it once on fake tensors of the real size.

Everything downstream adds up layer profiles, so a profile must say whether an input is kept by the layer's
graph (its neighbour may keep the same storage), when in the backward pass it is let go, and how high the
transients stand at that moment. It tells the *order of events*, which storage appears and dies when, of three
traces:

    free     forward without a graph                                       (F under re-materialization)
    first    forward with a graph, backward that creates the gradients     (first B of a step)
    later    the same with a backward that accumulates into them           (every other B)

Nothing of the real size is allocated: the layer runs on fake tensors, on the CPU device. A GPU's kernels may
keep other things. Gradients of outputs are made up dense and in the order of the dimensions, so what a layer
copies because its gradient has another layout is not seen. A few real kernels return a small result in a
large workspace (the CPU's `mse_loss` a number in as many bytes as its input has), fake ones do not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ..plan.simulate import no_collections
from ..stage.buffers import Statistics
from ..stage.compiled import signature
from ..stage.trees import Portals, Tree, change, portals_of, tensors_of
from .trace import Boundary, LayerProfile
from .tracker import EventLog, LayerRun, buffer_roles, on_this_rank

PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
"""Dtypes of activations for `autocast`; parameters, gradients and optimizer state stay float32."""


class ModelProfile(NamedTuple):
    """Profiles of all layers of a model, and of its loss, at one micro-batch size."""

    layers: tuple[LayerProfile, ...]
    loss: LayerProfile

    @property
    def num_parameters(self) -> int:
        """Number of parameters of all layers."""
        return sum(layer.num_parameters for layer in self.layers)


@dataclass
class Profiler:
    """Profiles layers, each distinct one once: same configuration, same inputs, same precision.

    Layers are eager; what a compiled layer keeps is no more than that.

    Args:
        autocast: dtype of mixed precision, None for none. Casts of weights are not cached, as in the engine.
        attention: device whose kernels of attention the layers take (`ATTENTIONS`); with a GPU's, what
            autocast computes in float32 there is so here.
        number_format: dtype in which layers read their parameters without keeping copies of them; their own
            sizes stay. With inputs of that dtype all activations and gradients in the traces have it.
        split_backward: whether to profile the halves of a backward too, for schedules with I and W.
        ties_apart: whether each layer counts a shared parameter as its own, as processes have it that hold
            one of them each. Without it such layers are refused.
        divided: makes the fake copy of a layer that one rank has of it (tensor parallelism).
    """

    autocast: torch.dtype | None = None
    attention: str = "cpu"
    number_format: torch.dtype | None = None
    split_backward: bool = False
    ties_apart: bool = False
    divided: Callable[[nn.Module], nn.Module] | None = None
    _known: dict[tuple[object, ...], LayerProfile] = field(default_factory=dict, repr=False)

    def layer(self, layer: nn.Module, inputs: Boundary, unused: frozenset[int] = frozenset()) -> LayerProfile:
        """The profile of one layer. ``unused`` are positions of outputs that nothing after it differentiates.
        `ValueError` if it returns anything but tensors.
        """
        key = (signature(layer), inputs, unused)
        if key not in self._known:
            with FakeTensors(), no_collections(), attention_of(self.attention):
                self._known[key] = self._run(layer, inputs, unused)
        return self._known[key]

    def chain(
        self,
        layers: Iterable[nn.Module],
        inputs: Boundary,
        unused: frozenset[int] = frozenset(),
    ) -> tuple[LayerProfile, ...]:
        """Profiles of layers in sequence, each fed with what the one before it returns. ``unused`` are
        positions of the last one's outputs that nothing differentiates. `ValueError` if two layers share a
        parameter, unless ``ties_apart``.
        """
        modules, profiles = list(layers), list[LayerProfile]()
        owners: dict[nn.Parameter, int] = {}
        for index, module in enumerate(() if self.ties_apart else modules):
            for name, parameter in module.named_parameters():
                if owners.setdefault(parameter, index) != index:
                    raise ValueError(
                        f"layers {owners[parameter]} and {index} share the parameter {name!r}, which "
                        "profiles would count twice: put both layers into one module, give each its own, or "
                        "profile with Profiler(ties_apart=True)"
                    )
        for module in modules:
            profiles.append(self.layer(module, inputs))
            inputs = profiles[-1].outputs
        # No gradient comes back for what the layers after do not use (AmoebaNet's last "previous" tensor).
        for index in range(len(modules) - 1, -1, -1):
            if unused:
                profiles[index] = self.layer(modules[index], profiles[index].inputs, unused)
            unused = profiles[index].first.without_gradient
        return tuple(profiles)

    def model(
        self,
        layers: Iterable[nn.Module],
        loss_fn: Callable[[Any, Tensor], Tensor],
        inputs: Boundary,
        target: Boundary,
    ) -> ModelProfile:
        """Profiles of all layers of a model and of its loss, which may leave outputs unused. Portals count as
        passed on from layer to layer.
        """
        modules = passed_on(list(layers))
        profiles = self.chain(modules, inputs)
        loss = self.loss(loss_fn, profiles[-1].outputs, target)
        if loss.first.without_gradient:
            profiles = self.chain(modules, inputs, loss.first.without_gradient)
        return ModelProfile(profiles, loss)

    def loss(
        self, loss_fn: Callable[[Any, Tensor], Tensor], outputs: Boundary, target: Boundary
    ) -> LayerProfile:
        """The loss as one more layer, which takes the outputs and the target."""
        return self.layer(LossLayer(loss_fn, outputs, target), outputs.join(target))

    def _run(self, given: nn.Module, inputs: Boundary, unused: frozenset[int]) -> LayerProfile:
        def run_of(layer: nn.Module) -> LayerRun:
            casts = precision(self.autocast, self.attention)
            return LayerRun(layer, inputs, unused, casts)

        layer = self._copy(given, self.number_format)
        run = run_of(layer)
        first = run.whole()
        outputs = run.outputs
        with torch.no_grad():
            free = run_of(layer).whole()
        run = run_of(layer)  # which the buffers are told by: a table may have been made in the first
        later = run.whole()
        has_gradient = [p.grad is not None for p in layer.parameters()]
        halves = None
        if self.split_backward:
            halves = run_of(self._copy(given, self.number_format)).halves(first)
        layer = self._copy(given)
        held = [on_this_rank(p) for p in layer.parameters()]
        trained = [p for p, has in zip(held, has_gradient, strict=True) if has]
        with EventLog() as added:
            statistics = Statistics([layer])
            statistics.begin()
        return LayerProfile(
            name=type(layer).__name__,
            inputs=inputs,
            outputs=outputs,
            unused=unused,
            parameter_counts=tuple(
                mine.numel() for mine, p in zip(held, layer.parameters(), strict=True) if p.requires_grad
            ),
            parameter_sizes=tuple(p.nbytes for p in held),
            trained_sizes=tuple(p.nbytes for p in trained),
            buffer_sizes=(*(b.nbytes for b in layer.buffers()), *added.sizes),
            free=free,
            first=first,
            later=later,
            halves=halves,
            overwritten=run.overwritten,
            buffer_roles=buffer_roles(layer, run.moved),
        )

    def _copy(self, given: nn.Module, number_format: torch.dtype | None = None) -> nn.Module:
        return fake_copy(given, number_format) if self.divided is None else self.divided(given)


class LossLayer(nn.Module):
    """A loss function as a layer that takes the tensors of the outputs, then those of the target."""

    def __init__(self, loss_fn: Callable[..., Tensor], outputs: Boundary, target: Boundary) -> None:
        super().__init__()
        self.loss_fn, self.outputs, self.target = loss_fn, outputs, target

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        count = len(self.outputs.tensors)
        return self.loss_fn(self.outputs.build(values[:count]), self.target.build(values[count:]))


@contextmanager
def precision(autocast: torch.dtype | None, attention: str = "cpu") -> Iterator[None]:
    """Mixed precision as in the engine, on fake tensors, with the autocast of the device of `attention`."""
    if autocast is None:
        yield
        return
    on_gpu = nullcontext() if attention == "cpu" else _GpusAutocast()
    with torch.autocast("cpu", autocast, cache_enabled=False), on_gpu:
        yield


class _GpusAutocast(TorchFunctionMode):
    """Computes in float32 what autocast does on a GPU, and on a CPU does in 16 bits."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _INTO_32_BITS:
            if args and isinstance(args[0], Tensor) and args[0].dtype in _HALF:
                kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
        elif name in _IN_32_BITS:
            args = tuple([x.float() if isinstance(x, Tensor) and x.dtype in _HALF else x for x in args])
        return func(*args, **kwargs)


_HALF = (torch.bfloat16, torch.float16)
# `AT_FORALL_FP32_SET_OPT_DTYPE` and `AT_FORALL_FP32` of torch, by the names of functions that call these.
_INTO_32_BITS = frozenset(["softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"])
_IN_32_BITS = frozenset([
    "layer_norm", "group_norm", "normalize", "norm", "linalg_vector_norm", "pow", "__pow__", "square",
    "exp", "expm1", "log", "log2", "log10", "log1p", "logsumexp", "reciprocal", "rsqrt", "softplus",
    "interpolate", "cdist", "cosine_similarity", "cross_entropy", "nll_loss", "kl_div", "mse_loss",
    "l1_loss", "smooth_l1_loss", "huber_loss",
])  # fmt: skip


def fake_copy(layer: nn.Module, number_format: torch.dtype | None = None) -> nn.Module:
    """The layer with fake CPU tensors for its parameters and buffers, whatever device they are on.

    ``number_format`` is the dtype of the floating-point parameters, None for their own.
    """
    stand_ins: dict[int, Any] = {}
    for parameter in layer.parameters():
        changed = number_format if parameter.is_floating_point() else None
        fake = torch.empty(parameter.shape, dtype=changed or parameter.dtype, device="cpu")
        stand_ins[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
    for buffer in layer.buffers():
        stand_ins[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return copy.deepcopy(layer, stand_ins).train()


# Floating-point operations in the time in which a CPU core, or a GPU, moves a byte.
FLOPS_PER_BYTE = 10


def layer_costs(layers: Sequence[nn.Module], example: Tree) -> tuple[float, ...]:
    """An estimate of what each layer costs, the same on every machine and process: forward on one
    micro-batch, in floating-point operations or what takes as long. `example` is a micro-batch, of which only
    shapes and dtypes count; it may be on the meta device.
    """
    costs = []
    with FakeTensors(), torch.no_grad():
        value: Tree = change(
            example, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), "the example"
        )
        for layer, portals in zip(layers, portals_of(layers), strict=True):
            fake = fake_copy(layer)
            own = value[0] if portals.arriving else value  # what passes the layer by costs it nothing
            moved = [*fake.parameters(), *tensors_of(own)]
            with FlopCounterMode(display=False) as counter:
                value = portals.around(fake)(value)
            own = value[0] if portals.leaving else value
            moved += tensors_of(own, f"the output of {type(layer).__name__}")
            moved_bytes = sum(tensor.nbytes for tensor in moved)
            costs.append(float(counter.get_total_flops() + FLOPS_PER_BYTE * moved_bytes))
    return tuple(costs)


def passed_on(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers of a model, each with the portals that pass it as part of what it takes and gives."""
    every = zip(layers, portals_of(layers), strict=True)
    return [_Passing(layer, portals) if any(portals) else layer for layer, portals in every]


class _Passing(nn.Module):
    """A layer as a stage of its own, which portals enter and leave."""

    def __init__(self, layer: nn.Module, portals: Portals) -> None:
        super().__init__()
        self.layer = layer
        # By their places, so that equal layers between other portals are equal.
        place = {name: str(i) for i, name in enumerate((*portals.arriving, *portals.stashes))}
        self.portals = Portals(*[tuple([place[name] for name in names]) for names in portals])

    def forward(self, given: Any) -> Any:
        return self.portals.around(self.layer)(given)


_NORMALIZATION_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_MASK = 9  # its argument that says which gradients are asked for


class FakeTensors(FakeTensorMode):
    """Torch's fake tensors, but for the backward of a batch normalization whose input needs no gradient: it
    makes none, and torch's rule for it makes one.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func is _NORMALIZATION_BACKWARD and not args[_MASK][0]:
            return (None, *result[1:])
        return result


# The attention of an accelerator, for layers that run on fake tensors of the CPU. Which kernel
# `scaled_dot_product_attention` takes decides what a layer keeps: with dropout a CPU makes all weights, where
# a GPU keeps none. So the operations that torch would take on the device are called by their names, and fake
# tensors follow torch's rules for them. So is dropout: a GPU keeps a byte for each element, a CPU what it
# multiplied by.
#
#     flash       GPUs since Ampere: in 16 bits and without a mask; otherwise as efficient
#     efficient   older GPUs, and float32: where keys have as many heads as queries; otherwise as math
#     math        whatever has no fused kernel: the weights of all pairs of tokens are made, and kept
#     cpu         whatever torch takes on this CPU

ATTENTIONS = ("cpu", "math", "efficient", "flash")
_MOST_CHANNELS = 256
"""Largest number of channels of a head in the flash kernel."""


@contextmanager
def attention_of(kind: str) -> Iterator[None]:
    """Layers that run inside take this attention, one of ATTENTIONS, if they call torch's by its module."""
    if kind not in ATTENTIONS:
        raise ValueError(f"attention is {kind!r}; choose one of {', '.join(ATTENTIONS)}")
    if kind == "cpu":
        yield
    else:
        attention = patch.object(F, "scaled_dot_product_attention", partial(_attend, kind))
        with attention, patch.object(F, "dropout", partial(_drop, F.dropout)):
            yield


def _drop(
    otherwise: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if inplace or not training:
        return otherwise(input, p, training, inplace)  # type: ignore[no-any-return]
    return torch.native_dropout(input, p, training)[0]


def _attend(
    kind: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if torch.is_autocast_enabled("cpu"):  # which knows the function that is replaced, not what replaces it
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    aten: Any = torch.ops.aten
    is_fused = kind != "math" and query.dim() == 4 and query.dtype != torch.float64
    is_small = query.itemsize == 2 and max(query.size(-1), value.size(-1)) <= _MOST_CHANNELS
    output: Tensor
    if is_fused and kind == "flash" and is_small and attn_mask is None:
        output, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    elif is_fused and query.size(1) == key.size(1):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.size(2))
        output, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
    else:
        output = _by_pairs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return output


def _by_pairs(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """The steps of torch's operation, with a GPU's dropout, and in 16 bits where layers are of 16 bits."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value))
    factor = math.sqrt(1 / math.sqrt(query.size(-1)) if scale is None else scale)
    scores = (query * factor) @ (key.transpose(-2, -1) * factor)
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.ops.aten._softmax(scores, -1, False)  # inside of the operation autocast is off
    return (torch.native_dropout(weights, dropout_p, True)[0] if dropout_p else weights) @ value

"""Profiles the memory of one layer by running it on fake tensors of the real size.

A stage's memory is computed from its layers' profiles. So a profile says which inputs the layer's graph keeps
(a neighbour may keep the same storage), when the backward frees them, and what else is alive then: the *order
of events*, which storage appears and dies when, in three traces:

    free     forward without a graph                                       (F under re-materialization)
    first    forward with a graph, backward that creates the gradients     (first B of a step)
    later    the same with a backward that accumulates into them           (every other B)

Nothing of the real size is allocated. The layer runs as on the CPU; a GPU's kernels may keep other tensors.
Gradients of outputs are dense and contiguous, so copies that a layer makes of gradients with another layout
are missed, and so are a few kernels whose small result has a large storage (`mse_loss` on the CPU).
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
        """Number of trainable elements of all layers."""
        return sum(layer.num_parameters for layer in self.layers)


@dataclass
class Profiler:
    """Profiles layers. Layers with the same configuration, inputs and precision are profiled once.

    Layers run eagerly; a compiled layer keeps no more.

    Args:
        autocast: dtype of mixed precision, None for none. As in the engine, casts of weights are not cached.
        attention: attention kernels that layers use (`ATTENTIONS`); a GPU's also imply float32 for operations
            that its autocast computes in float32.
        number_format: dtype in which layers read their parameters without keeping copies; parameters count
            with their own size. Give inputs of this dtype: all activations and gradients then have it.
        split_backward: whether to profile I and W too, for schedules that split the backward.
        ties_apart: whether each layer counts a shared parameter as its own, as separate processes do. If not,
            layers that share one are refused.
        divided: makes the fake copy of a layer as one rank of tensor parallelism has it.
    """

    autocast: torch.dtype | None = None
    attention: str = "cpu"
    number_format: torch.dtype | None = None
    split_backward: bool = False
    ties_apart: bool = False
    divided: Callable[[nn.Module], nn.Module] | None = None
    _known: dict[tuple[object, ...], LayerProfile] = field(default_factory=dict, repr=False)

    def layer(self, layer: nn.Module, inputs: Boundary, unused: frozenset[int] = frozenset()) -> LayerProfile:
        """The profile of one layer. ``unused`` are positions of outputs that get no gradient. `ValueError` if
        it returns anything but tensors.
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
        """Profiles of layers in sequence; each takes what the one before returns. ``unused`` are positions of
        the last one's outputs that get no gradient. `ValueError` if two layers share a parameter, unless
        ``ties_apart``.
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
        # Outputs that the next layers do not use get no gradient (AmoebaNet's last "previous" tensor).
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
        """Profiles of all layers of a model and of its loss, which may ignore outputs. A portal counts as
        passed from layer to layer.
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
        """The profile of the loss, as a layer that takes outputs and target."""
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
        run = run_of(layer)  # the second run: in the first, the layer may have made a table
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
    """A loss function as a layer that takes the tensors of outputs and target."""

    def __init__(self, loss_fn: Callable[..., Tensor], outputs: Boundary, target: Boundary) -> None:
        super().__init__()
        self.loss_fn, self.outputs, self.target = loss_fn, outputs, target

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        count = len(self.outputs.tensors)
        return self.loss_fn(self.outputs.build(values[:count]), self.target.build(values[count:]))


@contextmanager
def precision(autocast: torch.dtype | None, attention: str = "cpu") -> Iterator[None]:
    """The engine's mixed precision on fake tensors, with the autocast of `attention`'s device."""
    if autocast is None:
        yield
        return
    on_gpu = nullcontext() if attention == "cpu" else _GpusAutocast()
    with torch.autocast("cpu", autocast, cache_enabled=False), on_gpu:
        yield


class _GpusAutocast(TorchFunctionMode):
    """Computes in float32 the operations that a GPU's autocast does in float32 and a CPU's in 16 bits."""

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
    """Estimates the cost of each layer's forward on one micro-batch, in floating-point operations; bytes
    moved count as FLOPS_PER_BYTE each. The result is the same on every machine. Of `example`, a micro-batch,
    only shapes and dtypes count; it may be on the meta device.
    """
    costs = []
    with FakeTensors(), torch.no_grad():
        value: Tree = change(
            example, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), "the example"
        )
        for layer, portals in zip(layers, portals_of(layers), strict=True):
            fake = fake_copy(layer)
            own = value[0] if portals.arriving else value  # portals that pass the layer cost it nothing
            moved = [*fake.parameters(), *tensors_of(own)]
            with FlopCounterMode(display=False) as counter:
                value = portals.around(fake)(value)
            own = value[0] if portals.leaving else value
            moved += tensors_of(own, f"the output of {type(layer).__name__}")
            moved_bytes = sum(tensor.nbytes for tensor in moved)
            costs.append(float(counter.get_total_flops() + FLOPS_PER_BYTE * moved_bytes))
    return tuple(costs)


def passed_on(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers of a model, each with passing portals among its inputs and outputs."""
    every = zip(layers, portals_of(layers), strict=True)
    return [_Passing(layer, portals) if any(portals) else layer for layer, portals in every]


class _Passing(nn.Module):
    """A layer that also takes and returns the portals that pass it."""

    def __init__(self, layer: nn.Module, portals: Portals) -> None:
        super().__init__()
        self.layer = layer
        # Named by position: equal layers between different portals stay equal.
        place = {name: str(i) for i, name in enumerate((*portals.arriving, *portals.stashes))}
        self.portals = Portals(*[tuple([place[name] for name in names]) for names in portals])

    def forward(self, given: Any) -> Any:
        return self.portals.around(self.layer)(given)


_NORMALIZATION_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_MASK = 9  # index of its argument output_mask


class FakeTensors(FakeTensorMode):
    """Torch's fake tensors, except for the backward of a batch normalization whose input needs no gradient:
    the real one makes none, torch's fake one does.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func is _NORMALIZATION_BACKWARD and not args[_MASK][0]:
            return (None, *result[1:])
        return result


# Attention as an accelerator computes it, for layers on fake CPU tensors. The kernel of
# `scaled_dot_product_attention` decides what a layer keeps: with dropout a CPU's keeps all attention weights,
# a GPU's none. So the operations of the device are called directly. The same holds for dropout: a GPU keeps a
# byte per element, a CPU the scaled mask.
#
#     flash       GPUs since Ampere: in 16 bits and without a mask; otherwise as efficient
#     efficient   older GPUs, and float32: where keys have as many heads as queries; otherwise as math
#     math        whatever has no fused kernel: the weights of all pairs of tokens are made, and kept
#     cpu         whatever torch takes on this CPU

ATTENTIONS = ("cpu", "math", "efficient", "flash")
_MOST_CHANNELS = 256
"""Largest head dimension of the flash kernel."""


@contextmanager
def attention_of(kind: str) -> Iterator[None]:
    """Layers that run inside use this attention, one of ATTENTIONS, if they call torch.nn.functional's."""
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
    if torch.is_autocast_enabled("cpu"):  # the CPU's autocast does not know these operations
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
    """Attention in separate operations, as torch's math kernel, with a GPU's dropout and in the layer's
    dtype.
    """
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
    weights = torch.ops.aten._softmax(scores, -1, False)  # autocast does not apply inside attention
    return (torch.native_dropout(weights, dropout_p, True)[0] if dropout_p else weights) @ value

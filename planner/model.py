"""The models of `plan`, built without memory: published shapes, and the user's own."""

from __future__ import annotations

import copy
import importlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gpipe_bench.models import MODELS, SHAPES, count_parameters, example_batch, gpt2, loss_fn
from gpipe_bench.models.paper import HALVES, Half
from gpipe_bench.models.parallel import check_divisible, tensor_parallel
from gpipe_bench.pipeline.memory.profile import ModelProfile, Profiler, fake_copy
from gpipe_bench.pipeline.memory.trace import Boundary, as_tuple, resized
from gpipe_bench.pipeline.memory.workers import SharedWeight, shared_weights
from gpipe_bench.pipeline.model.layers_of import layers_of
from gpipe_bench.pipeline.plan.named import suggestion
from gpipe_bench.pipeline.stage.trees import flatten, unflatten

from .candidate import WRAPPED

BATCH_SIZE = 32
"""Examples of the mini-batch of a published shape, where none are given."""

WANTED = (
    "it takes no arguments and returns (layers, inputs) or (layers, inputs, target, loss_fn), the inputs an "
    "example of a mini-batch"
)
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes in which mixed precision multiplies."""
_aten: Any = torch.ops.aten
PRODUCTS = [
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default,
    _aten.convolution.default, _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
]  # fmt: skip
"""Operations whose results a selective checkpoint keeps; a written script has their names."""
DIVIDES = "a fifth value: a function of (layers, mesh) that divides the layers over a mesh's ranks, in place"
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Source:
    """Where a model comes from, for a script or a process that makes it again.

    Args:
        name: of the zoo, with its `options`; or `module:function`, which returns (layers, inputs, target,
            loss_fn, ...), and whose batches repeat these
        has_loss, divides: whether the function gives a loss, and what divides its layers over ranks
        is_foreign: whether it gives a whole model in the place of layers
    """

    name: str
    options: Mapping[str, Any] | None = None
    has_loss: bool = True
    is_foreign: bool = False
    divides: bool = False

    @property
    def called(self) -> str:
        """The name of the zoo's builder or of the user's function."""
        return self.name.rpartition(":")[2]

    @property
    def imports(self) -> str:
        """The line with which a script imports it."""
        if self.options is not None:
            return "from gpipe_bench.models import MODELS, example_batch, loss_fn"
        return f"from {self.name.partition(':')[0]} import {self.called}"

    def build(self) -> tuple[list[nn.Module], Loss]:
        """Builds the layers and the loss."""
        if self.options is not None:
            return list(MODELS[self.name](**self.options)), loss_fn(self.name, **self.options)
        layers, _, _, loss, *_ = _function(self.name)()
        return list(layers), loss

    def batch(self, examples: int, device: str = "cpu") -> tuple[Any, Any]:
        """Returns inputs and target of that number of examples."""
        if self.options is not None:
            return example_batch(self.name, examples, device=device, **self.options)
        with torch.device(device):
            _, *given, _ = _function(self.name)()[:4]
        found = []
        for tensors, structure in map(flatten, given):
            more = [torch.cat([t] * -(-examples // t.shape[0]))[:examples] for t in tensors]
            found.append(unflatten(tuple(more), structure))
        return found[0], found[1]


@dataclass(frozen=True)
class Model:
    """A model with an example of its mini-batch, on the meta device.

    Args:
        name: as it was asked for
        layers: of the sequence
        loss_fn: (output, target) -> scalar
        inputs, target: of one mini-batch
        num_parameters: a matrix that two layers share counted once
        ties: what layers share; each of them is profiled with its own
        source: how a script makes it
        attention: of the device that it is profiled for, as `pipeline.memory.profile` has it
        divide: (layers, mesh) -> what divides one's own layers over ranks; None for the zoo's
    """

    name: str
    layers: tuple[nn.Module, ...]
    loss_fn: Loss
    inputs: Boundary
    target: Boundary
    num_parameters: int
    ties: tuple[SharedWeight, ...] = ()
    source: Source = Source("")
    attention: str = "cpu"
    divide: Callable[..., object] | None = field(default=None, repr=False, compare=False)
    _profiles: dict[tuple[object, ...], ModelProfile] = field(default_factory=dict, repr=False, compare=False)
    _profilers: dict[tuple[object, ...], Profiler] = field(default_factory=dict, repr=False, compare=False)

    @property
    def batch_size(self) -> int:
        """Examples in a mini-batch."""
        return self.inputs.tensors[0].shape[0]

    def check_divisible(self, ranks: int) -> None:
        """`ValueError` where nothing says how the layers are divided over so many ranks (tp)."""
        if self.source.divides or ranks == 1:
            return
        if self.by_megatron:
            block: Any = self.layers[1]
            for what, number in (("heads", block.num_heads), ("width", block.inner.out_features)):
                if int(number) % ranks:
                    raise ValueError(f"--tp {ranks}: {number} {what} of {self.name} are no multiple")
            return
        if self.source.options is None:
            raise ValueError(f"--tp {ranks}: nothing divides the layers of {self.name}; return {DIVIDES}")
        named = OrderedDict((f"layer_{index}", layer) for index, layer in enumerate(self.layers))
        try:
            check_divisible(nn.Sequential(named), ranks)
        except ValueError as error:
            raise ValueError(f"--tp {ranks}: {self.name}: {error}; leave --tp out") from error

    def is_divisible(self, ranks: int) -> bool:
        """Whether so many ranks may compute each of its layers together."""
        with suppress(ValueError):
            self.check_divisible(ranks)
            return True
        return False

    @property
    def by_megatron(self) -> bool:
        """Whether a rank of several has what Megatron gives it, since nothing here divides these layers."""
        return self.source.called == "gpt2" and self.source.options is not None

    def ties_over(self, ranks: int) -> tuple[SharedWeight, ...]:
        """Weights that layers share on one of `ranks` tensor-parallel ranks: for GPT-2, some of the words."""
        if ranks == 1 or not self.by_megatron:
            return self.ties
        first: Any = self.layers[0]
        rows = first.tokens.num_embeddings
        return tuple(replace(tie, num_bytes=tie.num_bytes // rows * -(-rows // ranks)) for tie in self.ties)

    @cached_property
    def blocks(self) -> frozenset[int]:
        """The layers that a checkpoint is put around: the most common kind's, or all if that is no half."""
        ((kind, count),) = Counter(map(type, self.layers)).most_common(1)
        is_rare = 2 * count < len(self.layers)
        return frozenset(i for i, layer in enumerate(self.layers) if is_rare or type(layer) is kind)

    @property
    def least_examples(self) -> int:
        """The smallest micro-batch that the layers take: two examples where one fails, as with batch norm."""
        return 1 if self.why_not_one is None else 2

    @cached_property
    def why_not_one(self) -> str | None:
        """The error of the layers with a micro-batch of one example; None where they accept it."""
        try:
            if self.source.options is None:
                self.profile_of(1, "float32")
        except (ValueError, RuntimeError) as error:
            return str(error)
        return None

    def recomputing(self, remat: str) -> tuple[nn.Module, ...]:
        """The layers, with torch's checkpoint around the blocks where `remat` is one of WRAPPED."""
        if remat not in WRAPPED:
            return self.layers
        return tuple(Checkpointed(e, remat) if i in self.blocks else e for i, e in enumerate(self.layers))

    def in_half(self) -> Model:
        """Returns a copy of the model with everything in bfloat16."""
        layers = tuple(copy.deepcopy(nn.ModuleList(self.layers)).to(torch.bfloat16))
        inputs, target = self.of_microbatch(self.batch_size, torch.bfloat16)
        return self.changed(layers=layers, ties=shared_weights(layers), inputs=inputs, target=target)

    def changed(self, **changes: Any) -> Model:
        """Returns a copy with other fields, and without profiles."""
        return replace(self, **changes, _profiles={}, _profilers={})

    def sequence_parallel(self, ranks: int) -> bool:
        """Whether `ranks` that compute a layer together also divide what lies between layers, by tokens."""
        shape = self.inputs.tensors[0].shape
        known = self.source.options is not None and not self.by_megatron
        return known and len(shape) > 1 and shape[1] % ranks == 0

    def of_microbatch(self, size: int, dtype: torch.dtype | None = None) -> tuple[Boundary, Boundary]:
        """Returns inputs and target of a micro-batch; floating-point inputs in that dtype."""
        inputs, target = (resized(each, size) for each in (self.inputs, self.target))
        if dtype is not None:
            tensors = [replace(t, dtype=dtype) if t.dtype.is_floating_point else t for t in inputs.tensors]
            inputs = replace(inputs, tensors=tuple(tensors))
        return inputs, target

    def profile_of(
        self,
        microbatch_size: int,
        precision: str,
        *,
        split_backward: bool = False,
        tp: int = 1,
        remat: str = "never",
        sharded: bool = False,
    ) -> ModelProfile:
        """Profiles the layers at one micro-batch size; layers that are alike are profiled once.

        Args:
            microbatch_size: examples.
            precision: one of `request.PRECISIONS`.
            split_backward: also the two halves of backwards.
            tp: ranks that compute every layer together; the profile is that of one of them.
            remat: what blocks recompute inside, one of `candidate.WRAPPED`, or anything else for nothing.
            sharded: mixed precision gathers parameters in 16 bits; autocast would copy them in each graph.
        """
        remat = remat if remat in WRAPPED else "never"
        half = HALF.get(precision)
        read = half if sharded else None
        about = (microbatch_size, half, split_backward, self.attention, tp, read)
        if (remat, *about) not in self._profiles:
            with self.divided_over(tp, read) as divided:
                made = Profiler(
                    None if read else half, attention=self.attention, number_format=read,
                    split_backward=split_backward, ties_apart=True,
                )  # fmt: skip
                profiler = self._profilers.setdefault(about, made)
                profiler.divided = divided
                ends = self.of_microbatch(microbatch_size, read)
                found = profiler.model(self.recomputing(remat), self.loss_fn, *ends)
                self._profiles[remat, *about] = found
        return self._profiles[remat, *about]

    @contextmanager
    def divided_over(
        self, ranks: int, dtype: torch.dtype | None = None
    ) -> Iterator[Callable[[nn.Module], nn.Module] | None]:
        """Yields a function that returns one rank's part of a layer, divided as in the written script."""
        if ranks == 1:
            yield None
            return
        self.check_divisible(ranks)
        if self.by_megatron:
            yield partial(_of_a_rank, ranks=ranks, dtype=dtype)
            return
        if dist.is_initialized():
            raise ValueError(f"--tp {ranks} has a group of its own: plan before processes join one")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
            sequence = self.sequence_parallel(ranks)

            def divided(layer: nn.Module) -> nn.Module:
                bare = layer.layer if isinstance(layer, Checkpointed) else layer
                mine = self.layers if self.divide is not None and bare in self.layers else (bare,)
                copies = nn.Sequential(*(fake_copy(each, dtype) for each in mine))
                if bare in self.layers and self.divide is not None:
                    self.divide(copies, mesh)
                elif bare in self.layers:
                    tensor_parallel(copies, mesh, sequence=sequence)
                own = copies[mine.index(bare)]
                return Checkpointed(own, layer.remat) if isinstance(layer, Checkpointed) else own

            yield divided
        finally:
            dist.destroy_process_group()


class Checkpointed(nn.Module):
    """A layer with torch's own checkpoint around it, as a script has it; equal ones are profiled once."""

    def __init__(self, layer: nn.Module, remat: str) -> None:
        super().__init__()
        self.layer, self.remat = layer, remat
        for name in ("stashes", "pops"):
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(self, value: Any) -> Any:
        more: dict[str, Any] = {}
        if self.remat == "selective":
            more["context_fn"] = partial(create_selective_checkpoint_contexts, PRODUCTS)
        return checkpoint(self.layer, value, use_reentrant=False, **more)


def _of_a_rank(layer: nn.Module, ranks: int, dtype: torch.dtype | None) -> nn.Module:
    """One rank's part of a GPT-2 layer as Megatron divides it: some heads, columns and words; norms whole."""
    if isinstance(layer, Checkpointed):
        return Checkpointed(_of_a_rank(layer.layer, ranks, dtype), layer.remat)
    own = fake_copy(layer, dtype)
    narrow: list[tuple[nn.Module, int]] = []
    match own:
        case gpt2.Block():
            own.num_heads //= ranks
            narrow = [(own.qkv, 0), (own.inner, 0), (own.out, 1), (own.outer, 1)]
        case gpt2.Embedding():
            narrow = [(own.tokens, 0)]
        case gpt2.Output():
            narrow = [(own.logits, 0)]
    for module, dimension in narrow:
        for name, parameter in list(module.named_parameters()):
            if dimension < parameter.dim():
                size = -(-parameter.size(dimension) // ranks)
                part = parameter.detach().narrow(dimension, 0, size).clone()
                setattr(module, name, nn.Parameter(part, parameter.requires_grad))
    return own


def model_of(
    name: str,
    batch_size: int | None = None,
    num_layers: int | None = None,
    *,
    num_filters: int | None = None,
    seq_len: int | None = None,
) -> Model:
    """The published shape, Table 1's model or the user's `module:function` of that name. ValueError, naming
    value and remedy, for what is neither or cannot be built.

    Args:
        name: a key of `gpipe_bench.models.SHAPES`, "transformer-lm" or "amoebanet-d" with Table 1's options,
            or where one's own function stands
        batch_size: examples of the mini-batch; None for 32 of a shape, Table 1's of its models, or as many as
            one's own example has
        num_layers: blocks, instead of the shape's own; of GPT-2, Llama and Table 1's models only
        num_filters: of AmoebaNet-D only
        seq_len: tokens of an example, instead of the shape's own; of GPT-2 and Llama only
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"--batch-size {batch_size}: a mini-batch has at least 1 example")
    half = next((half for half in HALVES.values() if half.model == name), None)
    if num_filters is not None and name != HALVES["amoebanet"].model:
        raise ValueError(f"--num-filters {num_filters} is AmoebaNet's; leave it out")
    if half is not None:
        return _of_table_1(half, batch_size or half.batch_size, num_layers, num_filters)
    if name not in SHAPES and ":" not in name:
        names = [*(half.model for half in HALVES.values()), *SHAPES]
        known, close = ", ".join(names), suggestion(name, names)
        raise ValueError(f"unknown model {name!r}{close}; known: {known}, and one's own as module:function")
    is_fixed = name not in SHAPES or SHAPES[name][0] == "unet"
    if seq_len is not None and (is_fixed or seq_len < 1):
        raise ValueError(f"--seq-len {seq_len}: {name} has the tokens it has; leave the option out")
    if num_layers is not None and is_fixed:
        raise ValueError(f"--num-layers {num_layers}: {name} has the layers it has; leave the option out")
    if name not in SHAPES:
        found = _own(name)
        if batch_size is None:
            return found
        inputs, target = found.of_microbatch(batch_size)
        return found.changed(inputs=inputs, target=target)
    builder, options = SHAPES[name]
    changed = {"num_layers": num_layers, "seq_len": seq_len}
    options = options | {option: number for option, number in changed.items() if number is not None}
    return built(name, builder, options, batch_size or BATCH_SIZE)


def _of_table_1(half: Half, batch_size: int, num_layers: int | None, num_filters: int | None) -> Model:
    """`transformer-lm` or `amoebanet-d` of a size."""
    if num_layers is None:
        raise ValueError(f"{half.model} comes in any size; give --num-layers L")
    size = {"num_layers": num_layers}
    if half.model == HALVES["amoebanet"].model:
        if num_filters is None:
            raise ValueError(f"{half.model} needs --num-filters, such as 208")
        size["num_filters"] = num_filters
    for option, number in size.items():
        if number < 1:
            raise ValueError(f"--{option.replace('_', '-')} {number}: give 1 or more")
    return built(half.model, half.model, {**half.options, **size}, batch_size)


def built(name: str, builder: str, options: dict[str, Any], batch_size: int) -> Model:
    """A model of the zoo: `MODELS[builder](**options)`, called `name`."""
    with torch.device("meta"):
        model = MODELS[builder](**options)
    inputs, target = example_batch(builder, batch_size, device="meta", **options)
    return Model(
        name, tuple(model), loss_fn(builder, **options), Boundary.of(inputs), Boundary.of(target),
        count_parameters(model), shared_weights(tuple(model)),
        Source(builder, options),
    )  # fmt: skip


def _own(name: str) -> Model:
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ValueError(f"{name!r} is no module:function, such as my_models:small; {WANTED}")
    try:
        function = _function(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name}: {error}; start from the module's folder, or add it to PYTHONPATH"
        ) from error
    try:
        with torch.device("meta"):
            given = function()
    except Exception as error:
        raise ValueError(f"{name} failed with {type(error).__name__}: {error}; {WANTED}") from error
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 4, 5):
        raise ValueError(f"{name} returned {_kind(given)}; {WANTED}")
    whole = given[0]
    is_foreign = isinstance(whole, nn.Module) and type(whole).__module__.startswith("transformers.")
    is_sequence = is_foreign or isinstance(whole, nn.Sequential | list | tuple)
    layers = tuple(layers_of(whole) if is_foreign else whole) if is_sequence else ()
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise ValueError(f"{name} returned layers of {_kind(given[0])}: return an nn.Sequential or a list")
    if len(given) == 5 and not callable(given[4]):
        raise ValueError(f"{name} returned {_kind(given[4])} as its fifth value; give {DIVIDES[15:]}")
    examples = {tensor.shape[0] if tensor.dim() else 0 for tensor in as_tuple(given[1])}
    if len(examples) != 1 or 0 in examples:
        raise ValueError(f"{name}: the inputs have {sorted(examples)} examples: give all as many")
    target, loss = (given[2], given[3]) if len(given) > 2 else (torch.empty(*examples, device="meta"), _mean)
    parameters = count_parameters(nn.ModuleList(layers))
    return Model(
        name, layers, loss, Boundary.of(given[1]), Boundary.of(target), parameters, shared_weights(layers),
        Source(name, None, len(given) > 2, is_foreign, len(given) == 5),
        divide=given[4] if len(given) == 5 else None,
    )  # fmt: skip


def _mean(output: Any, target: Tensor) -> Tensor:
    """A loss for models without one, the outputs' means: it keeps nothing for the backward."""
    return torch.stack([each.float().mean() for each in as_tuple(output) if each.is_floating_point()]).sum()


def _kind(value: object) -> str:
    count = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"type {type(value).__name__}{count}"


def _function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)

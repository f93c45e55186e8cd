"""ZeRO: the replicas of a stage keep a shard of each parameter, by torch's `fully_shard` on every layer.

ZeRO level 2 divides gradients and optimizer state among replicas, level 3 parameters too. torch gathers a
layer's parameters before the layer runs, and after its backward reduces its gradients and scatters the sum,
by hooks. A pipeline has to tell torch when, because it calls a layer M times forward, perhaps M times again,
and M times backward in a step:

    zero=2   F F F F R B R B R B R B       gathers      a a a                 once per layer and step
                                           scatters                     s s s inside of the last B, or behind
                                                                              the last W
    zero=3   F F F F R B R B R B R B       gathers      in every F, R and B of a layer
                                           scatters     in every B of a layer

`memory.grids` computes the memory that this takes.

torch matches collectives by their order alone. A replica that leaves a layer out, or has gradients of other
parameters, would compute wrong numbers or hang without an error. So before each collective the replicas
compare what they are about to do (`Announcer`) and raise an error if they differ.

After a pass without backwards gathered parameters are freed, too; else the next training step would use
weights from before the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.utils._pytree import tree_leaves, tree_map

from ..plan.schedule import Kind, Schedule
from ..stage.stage import Reduction, Stage
from ..stage.tensors import is_divided
from .grid import Grid, Replicas


def check_sharded(layers: Mapping[str, nn.Module], schedule: Schedule, zero: int) -> None:
    """`ValueError` for layers and schedules whose parameters cannot be sharded; the message says what can."""
    if zero == 3 and any(action.kind is Kind.W for action in schedule):
        raise ValueError(
            f"{schedule.name} has I and W, and with zero=3 the parameters are gone before W; use zero=2, or "
            "a schedule with B"
        )
    for name, layer in layers.items():
        types = {p.dtype for p in layer.parameters() if p.requires_grad}
        for path, parameter in layer.named_parameters():
            if parameter.is_complex():
                raise ValueError(
                    f"{name}.{path} is {parameter.dtype}, and fsdp sums parts of real numbers; keep its real "
                    "and imaginary parts as two parameters, or use the dimension 'dp' instead"
                )
        for path, module in layer.named_modules():
            if getattr(module, "sparse", False):
                raise ValueError(
                    f"{f'{name}.{path}'.rstrip('.')} is a {type(module).__name__} with sparse=True, and fsdp "
                    "sums dense gradients; use sparse=False"
                )
        if len(types) > 1:
            raise ValueError(
                f"the parameters of layer {name} are of {' and '.join(sorted(map(str, types)))}, and fsdp "
                "sends those of a layer together; make them of one type, or use the dimension 'dp' instead"
            )


def shard_layers(layers: Mapping[str, nn.Module], grid: Grid, zero: int) -> None:
    """Shards the parameters of each layer over the replicas of its stage; all of them must call."""
    mesh = grid.mesh["fsdp"]
    for layer in layers.values():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh, reshard_after_forward=zero == 3)
            hidden = _HiddenHooks()
            layer.register_forward_pre_hook(hidden.come, prepend=True)
            layer.register_forward_pre_hook(hidden.enter)
            layer.register_forward_hook(hidden.leave, prepend=True)


class Shards(Reduction):
    """The `Reduction` of a stage whose layers are sharded: tells FSDP2 which backward is the last."""

    def __init__(self, stage: Stage, zero: int, grid: Grid, replicas: Replicas) -> None:
        self._stage, self._zero = stage, zero
        self._announcer = Announcer(stage.index, replicas)
        copies = grid.group("dp") if grid.size("dp") > 1 else None
        self._layers = [
            _Sharded(layer, position, zero, self._announcer, copies)
            for position, layer in enumerate(stage.layers)
            if isinstance(layer, FSDPModule)
        ]

    def begin(self) -> None:
        """Starts gathering the step's parameters, while the stage waits for its first micro-batch.
        `ValueError` for a parameter that is not sharded, whose gradients would not be summed.
        """
        if any(not is_divided(parameter) for parameter in self._stage.trainable):
            raise ValueError(
                f"stage {self._stage.index} trains a parameter that is not divided along 'fsdp': it is of "
                "loss_fn, or has come to a layer since the pipeline was built; build the pipeline of layers "
                "that have all their parameters, or use the dimension 'dp' instead"
            )
        if self._zero == 2:
            for layer in self._layers:
                layer.begin()

    def before(self, kind: Kind, m: int, *, last: bool) -> None:
        if last and kind is Kind.B and self._zero == 2:
            for layer in self._layers:
                layer.finishes(finishes=True)

    def after(self, kind: Kind, m: int, *, last: bool) -> None:
        if last and self._zero == 2:
            # After W, and for layers without a gradient in this micro-batch, no backward hook has run.
            for layer in self._layers:
                layer.conclude()

    def finish(self) -> None:
        if self._zero == 3:
            self._announcer.announce("ends its step")

    def evaluated(self) -> None:
        for layer in self._layers:
            layer.conclude()

    def reset(self) -> None:
        for layer in self._layers:
            layer.reset()


class Announcer:
    """Lets the replicas of a stage compare what they are about to do."""

    def __init__(self, stage: int, replicas: Replicas) -> None:
        self._stage, self._replicas = stage, replicas

    def announce(self, what: str) -> None:
        """Waits for all replicas. Raises `ValueError` on all of them if they announce different things."""
        if len(set(self._replicas.numbers(crc32(what.encode())))) == 1:
            return
        said = [f"replica {rank} {text}" for rank, text in enumerate(self._replicas.share(what))]
        raise ValueError(
            f"the replicas of stage {self._stage} part ways: {', '.join(said)}; along 'fsdp' all replicas "
            "have to run the same layers and train the same parameters with every micro-batch: let each "
            "layer use all of its parameters, times zero where need be, or use the dimension 'dp' instead, "
            "which sums the gradients that there are"
        )


class _Sharded:
    """One layer and its FSDP2 state; `copies` are the processes with the same shards."""

    def __init__(
        self,
        module: FSDPModule,
        position: int,
        zero: int,
        announcer: Announcer,
        copies: dist.ProcessGroup | None,
    ) -> None:
        self.module, self._announcer = module, announcer
        self._name = f"layer {position} ({type(module).__name__.removeprefix('FSDP')})"
        self._hooked: set[nn.Parameter] = set()
        self._with_gradient: set[str] = set()  # names of parameters with a gradient since the last sum
        self._has_summed = True
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if zero == 3:  # level 2 gathers all layers when a step begins
            what = f"fetches the parameters of {self._name}"
            module.set_custom_all_gather(_Gather(partial(announcer.announce, what)))
        module.set_custom_reduce_scatter(_Scatter(self.sums))
        if copies is not None:
            module.set_all_reduce_hook(lambda mine: dist.all_reduce(mine, group=copies))
        module.register_forward_pre_hook(self._look)  # type: ignore[attr-defined]  # every FSDPModule is one
        self._state = module._get_fsdp_state()

    def begin(self) -> None:
        """Begins a step that gathers the parameters once."""
        self._has_summed = False
        self.finishes(finishes=False)
        self.module.unshard(async_op=True)

    def finishes(self, *, finishes: bool) -> None:
        """Sets whether the next backward sums the gradients and frees the gathered parameters."""
        self.module.set_is_last_backward(finishes)
        self.module.set_requires_gradient_sync(finishes, recurse=False)
        self.module.set_reshard_after_backward(finishes, recurse=False)

    def conclude(self) -> None:
        """Ends the last backward of layers that it did not reach; does nothing for others."""
        self.finishes(finishes=True)
        self._state._root_post_backward_final_callback()
        if not self._has_summed:  # without gradients, torch calls no reduction
            self.sums()

    def sums(self) -> None:
        """Announces that the module's gradients are about to be summed."""
        names, self._has_summed = ", ".join(sorted(self._with_gradient)) or "no parameter", True
        self._with_gradient.clear()
        self._announcer.announce(f"sums the gradients of {names} of {self._name}")

    def reset(self) -> None:
        """Discards a step that failed, with its gradients."""
        for parameter in self.module.parameters():  # type: ignore[attr-defined]
            parameter.grad = None
        self._with_gradient.clear()
        with suppress(RuntimeError):  # a gather failed; the step's error says why
            self.module.reshard()

    def _look(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Runs before the layer, after the gather: hooks parameters to note which get a gradient."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: self._with_gradient.add(name)
                )


class _Announced:
    """A collective that runs after `announce` has found all replicas about to run it."""

    def __init__(self, announce: Callable[[], None]) -> None:
        self._announce = announce

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._announce()
        return super().__call__(*arguments, **options)  # type: ignore[misc]


class _Gather(_Announced, DefaultAllGather):
    """Gathers parameters from their shards."""


class _Scatter(_Announced, DefaultReduceScatter):
    """Scatters summed gradients to the shards."""


class _HiddenHooks:
    """Hides the effects of torch's hooks around a layer on the layer's tensors.

    torch's hook before a layer makes views of inputs, with other strides in dimensions of length 1. Strides
    decide the layout of results, and layouts which elements dropout drops: a recomputation, which has a
    graph, would drop others than the forward. Nor may such views be changed in place. torch's hook behind a
    layer is lost if an output that is a view is changed in place.
    """

    def __init__(self) -> None:
        self._strides: list[tuple[int, ...]] = []

    def come(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Runs before torch's hook before the layer."""
        leaves = tree_leaves(inputs) if torch.is_grad_enabled() else ()
        self._strides = [leaf.stride() for leaf in leaves if isinstance(leaf, Tensor)]

    def enter(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Runs after torch's hook before the layer."""
        if not self._strides:
            return inputs
        strides = iter(self._strides)

        def as_it_came(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            stride = next(strides)
            return _NoView.apply(leaf, stride) if leaf.requires_grad else leaf

        return tree_map(as_it_came, inputs)  # type: ignore[no-any-return]

    def leave(self, _: nn.Module, inputs: Any, output: Any) -> Any:
        """Runs before torch's hook behind the layer."""

        def as_no_view(leaf: Any) -> Any:
            is_view = isinstance(leaf, Tensor) and leaf.requires_grad and leaf._base is not None
            return _NoView.apply(leaf, leaf.stride()) if is_view else leaf

        return tree_map(as_no_view, output)


class _NoView(torch.autograd.Function):
    """Returns the same memory as a tensor that autograd does not treat as a view, with the given strides;
    they may differ from the tensor's own where strides have no effect.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
        return tensor.as_strided(tensor.shape, stride).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

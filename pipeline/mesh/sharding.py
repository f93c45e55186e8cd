"""Parameters that the holders of a stage keep a part of each, by torch's `fully_shard` on every layer.

ZeRO divides what every replica has a copy of: the state of the optimizer and the gradients (2), and the
parameters too (3). torch gathers a layer's parameters before the layer runs and scatters the sum of its
gradients behind its backward, by hooks; when it does so it has to be told, because a pipeline calls a layer M
times forward, perhaps M times again, and M times backward in a step:

    zero=2   F F F F R B R B R B R B       gathers      a a a                 once per layer and step
                                           scatters                     s s s inside of the last B, or behind
                                                                              the last W
    zero=3   F F F F R B R B R B R B       gathers      in every F, R and B of a layer
                                           scatters     in every B of a layer

What is alive of a layer with P bytes of parameters among n holders (shards are padded to equal rows):

    always                    P / n of parameters, and as much for each state of the optimizer
    between steps             P / n of gradients, from the first step to `zero_grad`
    zero=2, the whole step    P of gathered parameters from the beginning of the step to the layer's last
                              backward; P of gradients from its first backward to its last
    zero=3, while it runs     P of gathered parameters in F, R and B, of one layer at a time; P of gradients
                              in its B
    a gather                  P more, the message, until it is copied into the parameters
    a scatter                 P more, the message, beside P of gradients until it is copied; then P and the
                              P / n that becomes the gradient

Parts travel by connections of the pipeline's own (`PartHolders`), which wait no longer than the pipeline
does and are cut when a replica fails, so that the others learn what happened; the process group of the mesh
would wait for half an hour. Only with them a sum of gradients can go on while the backward does on a CPU,
too: it is waited for when the step is over, unless somebody reads it before.

The sums are sums: a replica's loss counts the examples of all replicas. After forwards alone, gathered
parameters are given up too, or the next training step would use the weights from before the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter
from torch.utils._pytree import tree_leaves, tree_map

from gpipe_bench.pipeline.errors import PeerError
from gpipe_bench.pipeline.mesh.collectives import Replicas
from gpipe_bench.pipeline.mesh.grid import Grid
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.stage.stage import Reduction, Stage
from gpipe_bench.pipeline.stage.tensors import is_divided


def check_sharded(layers: Mapping[str, nn.Module], schedule: Schedule | None, zero: int) -> None:
    """`ValueError` for layers and schedules whose parameters cannot be stored in parts, and what can."""
    if zero == 3:
        if schedule is None:
            raise ValueError(
                'schedule="auto" may choose one with I and W, and with zero=3 the parameters are gone before '
                "W; name a schedule, or use zero=2"
            )
        if any(action.kind is Kind.W for row in schedule.actions for action in row):
            raise ValueError(
                f"{schedule.name} has I and W, and with zero=3 the parameters are gone before W; use zero=2, "
                "or a schedule with B"
            )
    for name, layer in layers.items():
        types = {p.dtype for p in layer.parameters() if p.requires_grad}
        if len(types) > 1:
            raise ValueError(
                f"the parameters of layer {name} are of {' and '.join(sorted(map(str, types)))}, and fsdp "
                "sends those of a layer together; make them of one type, or use the dimension 'dp' instead"
            )


def shard_layers(layers: Mapping[str, nn.Module], grid: Grid, zero: int) -> None:
    """Divides the parameters of each layer among the holders of its stage; all of them call."""
    mesh = grid.mesh["fsdp"]
    for layer in layers.values():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh, reshard_after_forward=zero == 3)
            around = _Around()
            layer.register_forward_pre_hook(around.come, prepend=True)
            layer.register_forward_pre_hook(around.enter)
            layer.register_forward_hook(around.leave, prepend=True)


class Shards(Reduction):
    """The `Reduction` of a stage whose layers are sharded: tells FSDP2 which backward is the last. Which
    parameters are trained, torch looks up when it gathers them.

    Args:
        stage: whose layers they are
        zero: 2 or 3
        holders: who holds the parts
    """

    def __init__(self, stage: Stage, zero: int, holders: PartHolders) -> None:
        self._stage, self._zero = stage, zero
        self._layers = [_Sharded(layer, holders) for layer in stage.layers if isinstance(layer, FSDPModule)]
        self._watched = False

    def begin(self, num_microbatches: int, *, sync: bool) -> None:
        """The parameters of the step are fetched while the stage waits for its first micro-batch.

        Gradients are kept in parts whatever `sync` says, so there is nothing to put off. `ValueError` for a
        parameter that is not divided, whose gradients nobody would sum.
        """
        if any(not is_divided(parameter) for parameter in self._stage.trainable):
            raise ValueError(
                f"stage {self._stage.index} trains a parameter that is not divided along 'fsdp': it is of "
                "loss_fn, or has come to a layer since the pipeline was built; build the pipeline of layers "
                "that have all their parameters, or use the dimension 'dp' instead"
            )
        self._watched = False
        if self._zero == 2:
            for layer in self._layers:
                layer.begin()

    def before(self, kind: Kind, m: int, *, last: bool) -> None:
        if self._zero == 3:
            return
        if not self._watched:
            self._stage.look_for_first_gradients()
            self._watched = True
        if last and kind is Kind.B:
            for layer in self._layers:
                layer.finishes(finishes=True)

    def after(self, kind: Kind, m: int, *, last: bool) -> None:
        if last and self._zero == 2:
            # What no backward hook has ended: after W, and layers that this micro-batch did not lead to.
            for layer in self._layers:
                layer.conclude()

    def finish(self) -> None:
        for layer in self._layers:
            layer.sums.finish()

    def evaluated(self) -> None:
        for layer in self._layers:
            layer.conclude()

    def reset(self) -> None:
        for layer in self._layers:
            layer.reset()


class _Sharded:
    """One layer, and what is asked of its FSDP2 state."""

    def __init__(self, module: FSDPModule, holders: PartHolders) -> None:
        self.module, self.sums = module, Scatter(holders)
        self._has_copies, self._accelerated = holders.copies > 1, holders.accelerated
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(GatherParts(holders))
        module.set_custom_reduce_scatter(self.sums)
        if self._has_copies:
            module.set_all_reduce_hook(holders.sum_copies)
        self._state = module._get_fsdp_state()

    def begin(self) -> None:
        """A step begins that fetches the parameters once."""
        # torch reads a sum where it adds it to an earlier one, or to its copies'; on an accelerator it lets
        # the device wait.
        new = all(parameter.grad is None for parameter in self.module.parameters())  # type: ignore[attr-defined]
        self.sums.later = new and not (self._has_copies or self._accelerated)
        self.finishes(finishes=False)
        self.module.unshard(async_op=True)

    def finishes(self, *, finishes: bool) -> None:
        """Whether the next backward sums the gradients and gives the gathered parameters up."""
        self.module.set_is_last_backward(finishes)
        self.module.set_requires_gradient_sync(finishes, recurse=False)
        self.module.set_reshard_after_backward(finishes, recurse=False)

    def conclude(self) -> None:
        """As a last backward does for layers that it did not pass through; nothing where it did."""
        self.finishes(finishes=True)
        self._state._root_post_backward_final_callback()

    def reset(self) -> None:
        """Forgets a step that failed, with its gradients."""
        for parameter in self.module.parameters():  # type: ignore[attr-defined]  # every FSDPModule is one
            parameter.grad = None
        self.sums.forget()
        if self._state._is_root is None:  # no forward has come as far as this layer
            return
        with suppress(PeerError):  # of parts that were on their way; why they do not come is told already
            self.conclude()


class PartHolders:
    """The processes that hold the parts of a stage, and those that hold copies of this one's.

    Args:
        replicas: all of them.
        grid: this process's place in the job.
        accelerated: whether the tensors are on accelerators.
    """

    def __init__(self, replicas: Replicas, grid: Grid, *, accelerated: bool) -> None:
        self.replicas, self.accelerated = replicas, accelerated
        part, copy = grid.index("fsdp"), grid.index("dp")
        self.copies = grid.size("dp")
        self._parts = replicas.connect(
            f"parts of copy {copy}", accelerated=accelerated, place=(part, grid.size("fsdp"))
        )
        self._copies = None
        if self.copies > 1:
            self._copies = replicas.connect(
                f"copies of part {part}", accelerated=accelerated, place=(copy, self.copies)
            )

    def gather(self, whole: Tensor, mine: Tensor) -> Any:
        """Begins to make `whole` of the parts of all holders, end to end."""
        return self.replicas.bounded(lambda: self._parts._allgather_base(whole, mine))

    def scatter(self, mine: Tensor, whole: Tensor, op: Any) -> Any:
        """Begins to make `mine` of this holder's part of what `whole` is on all holders together."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        return self.replicas.bounded(lambda: self._parts._reduce_scatter_base(mine, whole, options))

    def sum_copies(self, mine: Tensor) -> None:
        """Makes `mine` the sum over its copies."""
        copies = self._copies
        assert copies is not None
        self.wait(self.replicas.bounded(lambda: copies.allreduce([mine])))

    def wait(self, work: Any) -> None:
        """Until it is done, or, on an accelerator, before what is enqueued next; errors as in `Replicas`."""
        self.replicas.wait(work)


class _Memory(Comm):
    """Where messages are put together."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatherParts(_Memory, AllGather):
    """Parameters from the holders of their parts."""

    def __init__(self, holders: PartHolders) -> None:
        self._holders = holders

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work = self._holders.gather(output_tensor, input_tensor)
        if async_op:
            return _Awaited(self._holders, work)
        self._holders.wait(work)
        return None


class _Awaited(dist.Work):
    """A collective that torch's own code will wait for."""

    def __init__(self, holders: PartHolders, work: Any) -> None:
        super().__init__()
        self._holders, self._work = holders, work

    def wait(self, timeout: Any = None) -> bool:
        self._holders.wait(self._work)
        return True


class Scatter(_Memory, ReduceScatter):
    """Gradients to the holders of their parts.

    `later` says that nobody reads the sums before `finish`: they are no addition to earlier ones.
    """

    def __init__(self, holders: PartHolders) -> None:
        self._holders = holders
        self._under_way: list[tuple[Any, Tensor]] = []
        self.later = False

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        work = self._holders.scatter(output_tensor, input_tensor, op)
        if self.later:
            self._under_way.append((work, input_tensor))
        else:
            self._holders.wait(work)
        return None

    def finish(self) -> None:
        """Waits for what is under way."""
        under_way, self._under_way = self._under_way, []
        for work, _ in under_way:
            self._holders.wait(work)

    def forget(self) -> None:
        """Nobody will wait any more."""
        self._under_way = []


class _Around:
    """Hides torch's hooks around a layer from what the layer and its neighbours do with their tensors.

    The hook before makes views of the inputs, and a view has other strides where a dimension has the length
    1. Kernels choose the layout of their results by strides, and a mask follows the layout: a recomputation,
    which has a graph, would drop other elements than the forward, which has none. Nor may such a view be
    changed in place. The hook behind is lost where somebody changes a view that leaves the layer in place.
    """

    def __init__(self) -> None:
        self._strides: list[tuple[int, ...]] = []

    def come(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Runs before torch's hook."""
        self._strides = []
        if torch.is_grad_enabled():
            self._strides = [leaf.stride() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]

    def enter(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Runs behind it."""
        if not self._strides:
            return inputs
        strides = iter(self._strides)

        def as_it_came(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            stride = next(strides)
            return _NoView.apply(leaf, stride) if leaf.requires_grad else leaf

        found: tuple[Any, ...] = tree_map(as_it_came, inputs)
        return found

    def leave(self, _: nn.Module, inputs: Any, output: Any) -> Any:
        """Runs before torch's hook behind the layer."""
        return tree_map(_as_no_view, output)


def _as_no_view(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.requires_grad and leaf._base is not None:
        return _NoView.apply(leaf, leaf.stride())
    return leaf


class _NoView(torch.autograd.Function):
    """The same tensor, in the same memory, but for autograd none of its views; with these strides, which may
    differ from its own where that means nothing.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
        return tensor.as_strided(tensor.shape, stride).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

"""Data parallelism: what the replicas of a pipeline do together in a step, as one process sees it.

Each replica takes a share of the batch. A micro-batch is weighted by its share of all replicas' examples. The
loss, and by a `Reduction` the gradients of each stage, become means over all replicas.

Along `fsdp` layers compute with whole parameters that are stored in shards (`sharding`), along `tp` with
parts (`tensor_parallel`). Both modules import parts of torch that take half a second to load, so they are
imported only when used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import check_equal
from ..plan.schedule import Kind, Schedule
from ..ranks.failure import FailureDetector
from ..ranks.wire import Transit
from ..stage.layers import LossFn
from ..stage.stage import Reduction, Stage
from ..stage.tensors import is_divided, local
from .gradients import Tie
from .grid import FlatBucket, GlobalShares, Grid, Replicas, buckets_of

LEVELS = (2, 3)


class DataParallel:
    """One process's part. `replicas` hold the same stages; `splits` says whether the schedule has W, whose
    gradients come from the first layer on; `divided` says how parameters are divided.
    """

    def __init__(
        self, replicas: Replicas | None, divided: Divided | None, *, bucket_bytes: int | None, splits: bool
    ) -> None:
        self.replicas, self._bucket_bytes, self._splits = replicas, bucket_bytes, splits
        self._divided = divided
        self._stages: list[Stage] = []
        self._reductions: dict[int, Reduction] = {}
        self._alike: list[nn.Parameter] = []  # of the stages, equal on all replicas

    def start_alike(self, plan: object, model: nn.Module) -> None:
        """Copies the first replica's parameters and buffers to all; `ValueError` if plans differ."""
        if self.replicas is None:
            return
        values = [*model.named_parameters(), *model.named_buffers()]
        forms = [(name, value.shape, value.dtype) for name, value in values]
        mine = (plan, forms, self._bucket_bytes)
        check_equal(self.replicas.share(mine), "replica")
        with torch.no_grad():
            self.replicas.copy_from_first([local(value) for _, value in values])

    def _go_on_alike(self) -> None:
        """Copies parameters that layers or a loss module got since the last step from the first replica to
        all. `ValueError` if replicas got different ones, or if two stages would sum the same parameter.
        """
        now = [parameter for stage in self._stages for parameter in stage.parameters]
        if len(now) == len(self._alike) and all(map(is_, now, self._alike)):
            return
        received = [parameter for stage in self._stages for parameter in stage.receiving]
        if len(set(received)) < len(received):
            raise ValueError(
                "a parameter that belongs to one stage has come to another one too, or to loss_fn, since the "
                "pipeline was built, and both would sum its gradients over replicas; tie weights before the "
                "pipeline is built, and give loss_fn parameters of its own"
            )
        if self.replicas is not None:
            known = set(self._alike)
            new = [p for p in dict.fromkeys(now) if p not in known and not is_divided(p)]
            forms = [(parameter.shape, parameter.dtype) for parameter in now]
            if any(theirs != forms for theirs in self.replicas.share(forms)):
                raise ValueError(
                    "the replicas of a stage have been given different parameters since the pipeline was "
                    "built; change the layers, and loss_fn, alike on all ranks"
                )
            with torch.no_grad():
                self.replicas.copy_from_first([parameter.detach() for parameter in new])
        self._alike = now

    def reduction(self, stage: Stage) -> Reduction:
        """Returns the reduction for the gradients of one of this process's stages."""
        found = Reduction()
        if self.replicas is not None and (self._divided is None or not self._divided.by_shards):
            found = Buckets(stage, self.replicas, self._bucket_bytes, splits=self._splits)
        if self._divided is not None:
            found = self._divided.reduction(stage, found, self.replicas)
        self._stages.append(stage)
        self._alike += stage.parameters
        self._reductions[stage.index] = found
        return found

    def agree(self, num_microbatches: int) -> int:
        """The number of micro-batches of a pass: the smallest of all replicas' where all gather parameters
        together, else the given number. All replicas of the first stage must call.
        """
        if self.replicas is None or self._divided is None or not self._divided.by_layer:
            return num_microbatches
        return min(self.replicas.share(num_microbatches))

    def begin(self, lengths: Sequence[int], loss_fn: LossFn | None, *, has_loss: bool) -> Sequence[float]:
        """Begins a training step with micro-batches of `lengths` examples. Returns the weight of each on the
        process that has the loss.
        """
        for stage in self._stages:
            stage.look(loss_fn)
        self._go_on_alike()
        for reduction in self._reductions.values():
            reduction.begin()
        if self.replicas is not None:
            return GlobalShares(lengths, self.replicas) if has_loss else ()
        return tuple([length / sum(lengths) for length in lengths])

    def finish(self, loss: Tensor) -> Tensor:
        """Waits for the gradients after a training step's last action. Returns the loss of all replicas."""
        if self.replicas is not None:
            loss = loss.clone()
            of_all = self.replicas.sum(loss)
        for reduction in self._reductions.values():
            reduction.finish()
        if self.replicas is not None:
            self.replicas.wait(of_all)
        return loss

    def sum_of(self, like: Tensor, gradient: Tensor | None) -> Tensor | None:
        """The sum of the replicas' gradients of a parameter; None if none has one. All replicas must call."""
        assert self.replicas is not None
        (bucket,) = buckets_of([like.detach()])
        self.replicas.wait(self.replicas.sum(bucket.fill([gradient])))
        return bucket.views[0] if bucket.marks[0] else None

    def evaluated(self) -> None:
        """Ends a pass without backwards."""
        for reduction in self._reductions.values():
            reduction.evaluated()

    def reset(self) -> None:
        """Discards the state of a step that failed."""
        for reduction in self._reductions.values():
            reduction.reset()


def data_parallel_of(
    grid: Grid | None,
    detector: FailureDetector | None,
    device: torch.device,
    bucket_bytes: int | None,
    divided: Divided | None,
    schedule: Schedule,
) -> DataParallel | None:
    """Data parallelism on a grid; None for a single pipeline with undivided parameters."""
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket holds at least one byte")
    replicas = None
    if grid is not None and grid.batch_group is not None and detector is not None:
        replicas = Replicas(grid.batch_group, device, detector)
    if replicas is None and divided is None:
        return None
    splits = any(action.kind is Kind.W for action in schedule)
    return DataParallel(replicas, divided, bucket_bytes=bucket_bytes, splits=splits)


class Buckets(Reduction):
    """The `Reduction` of a stage whose replicas have all of its parameters: sums gradients while the last
    backward of a step still runs.

        0B3 . . . . .[0B0                 ]                      the last backward of stage 0 in this step
                         .[bucket][bucket] [bucket]              each leaves as soon as all of it is there
                                                    ^            the end of the step waits

    During the last backward a hook of each parameter reports that its gradient is there. When a bucket's
    gradients are complete they are copied end to end, the copies become `.grad`, and the sum over replicas
    begins. Gradients that never come (the loss does not depend on the parameter) are sent as zeros when the
    backward ends, with a mark; if no replica has a gradient, `.grad` becomes None.

    Gradients in `.grad` from before the step must count once: replica 0 adds to them, the others start from
    None.
    """

    def __init__(self, stage: Stage, replicas: Replicas, bucket_bytes: int | None, *, splits: bool) -> None:
        self._stage, self._replicas, self._splits = stage, replicas, splits
        self._bucket_bytes = bucket_bytes
        self._trainable: tuple[nn.Parameter, ...] = ()
        self._parameters: tuple[nn.Parameter, ...] = ()  # parameters that receive the gradients
        self._buckets: list[FlatBucket] = []
        self._number_of: dict[int, int] = {}  # the bucket of each parameter
        self._seen: set[int] = set()  # parameters whose gradient has come in
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._sent: list[tuple[Transit, bool]] = []  # with whether this replica lacks one of the gradients

    def begin(self) -> None:
        trainable, before = self._stage.trainable, len(self._parameters)
        self._parameters = self._stage.receiving
        if (
            len(self._parameters) != before
            or len(trainable) != len(self._trainable)
            or any(a is not b for a, b in zip(trainable, self._trainable, strict=True))
        ):
            self._trainable = trainable
            parts = [local(parameter.detach()) for parameter in self._parameters]
            order = range(len(parts)) if self._splits else ()
            self._buckets = buckets_of(parts, order, self._bucket_bytes)
            self._number_of = {i: n for n, bucket in enumerate(self._buckets) for i in bucket.positions}
        if self._replicas.rank:
            for parameter in self._parameters:
                parameter.grad = None

    def before(self, kind: Kind, m: int, *, last: bool) -> None:
        if not last:
            return
        self._seen = set()
        for position, parameter in enumerate(self._parameters):
            hook = parameter.register_post_accumulate_grad_hook(partial(self._came_in, position))
            self._hooks.append(hook)

    def after(self, kind: Kind, m: int, *, last: bool) -> None:
        if not last:
            return
        self._unhook()
        while len(self._sent) < len(self._buckets):
            self._send()

    def finish(self) -> None:
        for bucket, (work, is_missing) in zip(self._buckets, self._sent, strict=False):
            self._replicas.wait(work)
            if is_missing:
                for position, mark in zip(bucket.positions, bucket.marks.tolist(), strict=True):
                    if not mark:
                        self._parameters[position].grad = None
        self.reset()

    def reset(self) -> None:
        self._unhook()
        self._sent = []
        for bucket in self._buckets:
            bucket.empty()

    def _came_in(self, position: int, _: Tensor) -> None:
        """Called when a parameter has received its gradient."""
        if self._number_of[position] < len(self._sent):
            raise RuntimeError(
                f"a parameter of stage {self._stage.index} got another gradient in a backward when the sum "
                "over replicas had begun; where a layer is checkpointed, use use_reentrant=False"
            )
        self._seen.add(position)
        while len(self._sent) < len(self._buckets) and self._seen.issuperset(
            self._buckets[len(self._sent)].positions
        ):
            self._send()

    def _unhook(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks = []

    @torch.no_grad()
    def _send(self) -> None:
        """Begins to sum the next bucket over replicas."""
        bucket = self._buckets[len(self._sent)]
        gradients = [local(self._parameters[i].grad) for i in bucket.positions]
        if any(each is not None and each.layout is not torch.strided for each in gradients):
            raise RuntimeError(
                f"a gradient of stage {self._stage.index} is sparse and cannot be summed over replicas; "
                "use sparse=False"
            )
        is_missing = any(each is None for each in gradients)
        numbers = bucket.fill(gradients)
        del gradients  # frees them before the sum begins
        for position, gradient in zip(bucket.positions, bucket.views, strict=True):
            parameter = self._parameters[position]
            if is_divided(parameter):  # this process's part
                like: Any = parameter if parameter.grad is None else parameter.grad
                whole = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
                gradient = like.from_local(gradient, like.device_mesh, like.placements, **whole)
            parameter.grad = gradient
        self._sent.append((self._replicas.sum(numbers), is_missing))


class Divided:
    """Divides the layers on a grid with several processes along `fsdp` or `tp`. `zero` is the level: 2 shards
    gradients and optimizer state along `fsdp`, 3 parameters too.
    """

    def __init__(self, grid: Grid, zero: int) -> None:
        self._grid, self._zero = grid, zero
        self._sharding: ModuleType | None = None
        self._tensor_parallel: ModuleType | None = None
        self.makes: Callable[..., Stage] = Stage  # the class of the stages
        self.by_shards = grid.size("fsdp") > 1  # layers are sharded; torch sums their gradients
        # Whether the replicas gather a layer's parameters together whenever the layer runs.
        self.by_layer = self.by_shards and zero == 3
        if self.by_shards:
            from . import sharding

            self._sharding = sharding
        if grid.size("tp") > 1:
            from . import tensor_parallel

            self._tensor_parallel, self.makes = tensor_parallel, tensor_parallel.DividedStage

    def check(
        self, layers: Mapping[str, nn.Module], ties: Sequence[Tie], schedule: Schedule, *, compiles: bool
    ) -> None:
        """`ValueError` for what divided parameters do not allow; the message says what to do."""
        if compiles:
            raise ValueError(
                "compile= makes programs of layers whose parameters are whole and stay where they are; leave "
                "it out, or use the dimension 'dp' instead of 'fsdp' and 'tp'"
            )
        for tie in ties:
            used = [name for name, layer in layers.items() if tie.parameter in set(layer.parameters())]
            if len(used) > 1 or self._tensor_parallel is not None:
                raise ValueError(
                    f"{' and '.join(tie.names)} are one weight, which cannot be divided with each of the "
                    "modules that have it; give them weights of their own, or use the dimension 'dp' instead "
                    "of 'fsdp' and 'tp'"
                )
        if self._tensor_parallel is not None:
            self._tensor_parallel.check_divided(layers, self._grid)
        if self._sharding is not None:
            self._sharding.check_sharded(layers, schedule, self._zero)

    def divide(self, layers: Mapping[str, nn.Module]) -> None:
        """Replaces this process's parameters by its parts of them; `ValueError` where that is impossible."""
        if self._tensor_parallel is not None:
            self._tensor_parallel.refuse_mixed(layers)
        if self._sharding is not None:
            self._sharding.shard_layers(layers, self._grid, self._zero)

    def reduction(self, stage: Stage, over_replicas: Reduction, replicas: Replicas | None) -> Reduction:
        """The reduction of a divided stage; `over_replicas` sums whole gradients over replicas."""
        if self._sharding is not None:
            return self._sharding.Shards(stage, self._zero, self._grid, replicas)  # type: ignore[no-any-return]
        assert self._tensor_parallel is not None, "one of the two divides"
        return self._tensor_parallel.Layouts(stage, over_replicas)  # type: ignore[no-any-return]


def divided_over(grid: Grid | None, zero: int | None) -> Divided | None:
    """The division that a grid requires; None if every process has all parameters of its stages."""
    if zero is not None and zero not in LEVELS:
        raise ValueError(f"zero={zero!r} is not known; choose one of {', '.join(map(str, LEVELS))}")
    if zero is not None and (grid is None or "fsdp" not in grid):
        raise ValueError(f"zero={zero} divides along the dimension 'fsdp' of a mesh, and there is none")
    if grid is None or grid.size("fsdp") == grid.size("tp") == 1:
        return None
    return Divided(grid, zero or LEVELS[0])

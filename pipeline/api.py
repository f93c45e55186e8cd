"""`Pipeline`: an `nn.Module` that trains a sequence of layers as a pipeline.

    pipeline = Pipeline(model, num_stages=4, num_microbatches=16)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for inputs, target in data:
        loss = pipeline.step(inputs, target, torch.nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()

The layers keep the names they have in the plain model, so parameters and checkpoints are interchangeable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .arguments import Assignment, Device, check_arguments, compilation_of
from .errors import check_equal
from .mesh.gradients import GradScaler, Tie, TiedWeights, clip, refuse_optimizers
from .mesh.grid import Grid, Replicas, join, watch_over
from .mesh.reduce import data_parallel_of, divided_over
from .model.parts import OwnLayers, Part, follow
from .plan.schedule import Remat, Schedule
from .plan.timeline import Timeline
from .ranks.connect import Network
from .ranks.distributed import PointToPoint, gather_timeline
from .ranks.failure import FailureDetector
from .stage.layers import LossFn
from .stage.stage import Stage
from .stage.trees import Tree, merge
from .step import Observer, Steps, refuse_elsewhere
from .transport import EdgeTransport, InProcess
from .verify import verify

_FORWARD_ONLY = 1 << 62  # step numbers of evaluation: its random streams are not those of training
T = TypeVar("T")


class Pipeline(nn.Module):
    """A sequence of layers, cut into stages and trained with a pipeline schedule.

    Args:
        layers: the model, an `nn.Sequential` or any sequence of modules. Each layer takes and returns a
            tensor or a pytree: tuples, lists, dicts, dataclasses and other containers that
            torch.utils._pytree knows, of tensors, None, bools, numbers, strings, enums and dtypes, with at
            least one tensor. `layers_of` and `split` make such a sequence of other models.
        num_stages: K, the number of stages. Default: the length of `partition`; over processes the number of
            stages that the schedule gives them.
        num_microbatches: M, the number of micro-batches of a mini-batch; their sizes differ by one example at
            most. A mini-batch with fewer examples than M runs in one micro-batch per example.

    The schedule:
        schedule: "gpipe", "1f1b", "naive" or another name of `NAMED`; or a `Schedule` of your own, such as
            `generate` makes for given times. `planner.plan` finds the best one for a model and machines.
        remat: which micro-batches are recomputed: "always", "except_last" or "never"; or one of these
            names for each stage, in the model's order. A `Schedule` has its own `remat` instead.
        num_workers: number of workers, for schedules that give a worker several stages; `num_stages` counts
            the stages of all workers. Default: the number of ranks, or half of `num_stages`.

    The cut:
        partition: the layers of each stage: how many, as in `[3, 5]`, or which, as a sequence of ranges.
            Default: the most even cut by `cost`.
        cost: what the stages are balanced by: "parameters" (the default), "auto" (estimated from `example`),
            or a number per layer.
        example: for `cost="auto"`: a micro-batch, also on the meta device.
        devices: one device for all stages, or one per stage. Default: the devices that the layers are on.

    The processes:
        group: the process group of a pipeline that is not in a grid; its rank k runs the stages of worker k.
            Without `group` and `mesh` all stages are in this process.
        mesh: the grid of the job, a `DeviceMesh` with a dimension "pp" for the workers of this pipeline and,
            if wanted, "dp", "fsdp" and "tp". All replicas begin with the parameters and buffers of the first.
        zero: what the processes along "fsdp" divide among themselves. 2 (the default): gradients and the
            optimizer's state; parameters are gathered once a step. 3: parameters too, gathered for each
            layer.
        bucket_bytes: size of the buckets in which gradients are summed over replicas. Default: 25 MiB, or if
            that is less a quarter of a stage's gradients, but at least 1 MiB.
        timeout_s: seconds that a rank waits for another one before the pipeline fails on all ranks.
        share_memory: whether ranks on one host exchange CPU tensors through shared memory; where a mesh
            divides parameters they never do.
        transport: another in-process transport, such as `InProcess(copy=True)`; not with `group` or `mesh`.

    How the layers run:
        seed: of the random streams of layers such as dropout.
        compile: whether `torch.compile` compiles each layer; or a backend's name, or a dict of its arguments
            backend, mode, fullgraph and dynamic. A layer that cannot be compiled whole runs as it is, with a
            warning; with fullgraph=True it is an error.

    Raises `ValueError` for an argument that does not fit, and says what would. A pipeline can be neither
    copied nor pickled; its `state_dict` can.
    """

    def __init__(
        self,
        layers: nn.Module | Iterable[nn.Module],
        *,
        num_stages: int | None = None,
        num_microbatches: int,
        schedule: str | Schedule = "gpipe",
        remat: Remat = "always",
        num_workers: int | None = None,
        partition: Sequence[int | range] | None = None,
        cost: str | Sequence[float] | None = None,
        example: Tree | None = None,
        devices: Device | Sequence[Device] | None = None,
        group: dist.ProcessGroup | Network | None = None,
        mesh: DeviceMesh | None = None,
        zero: int | None = None,
        bucket_bytes: int | None = None,
        timeout_s: float = 600.0,
        share_memory: bool = True,
        transport: EdgeTransport | None = None,
        seed: int = 0,
        compile: bool | str | Mapping[str, Any] = False,
    ) -> None:
        """The arguments are described with the class: `help(Pipeline)`."""
        super().__init__()
        check_arguments(
            transport=transport, num_stages=num_stages, num_microbatches=num_microbatches,
            num_workers=num_workers, timeout_s=timeout_s, group=group, mesh=mesh,
        )  # fmt: skip
        self.seed = seed
        self.num_steps = 0  # training steps taken; the random streams of a step depend on it
        self._num_forwards = 0
        # The other processes, and what is known of their failures.
        self.grid: Grid | None = None
        detector: FailureDetector | None = None
        if mesh is not None:
            self.grid, detector = join(mesh, timeout_s)
            group = self.grid.group("pp")
        self.group = group
        network = group if group is None or isinstance(group, Network) else Network(group)
        if network is not None and detector is None:
            detector = network.detector(timeout_s)
        # If a rank fails while it builds its pipeline, the others must not wait for it.
        with nullcontext() if detector is None else detector.building():
            self._divided, self._compilation = divided_over(self.grid, zero), compilation_of(compile)
            # The layers of each stage, and the stages of this process.
            assigned = Assignment(
                layers, network, num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule,
                num_workers=num_workers, remat=remat, partition=partition, cost=cost, example=example,
                devices=devices,
            )  # fmt: skip
            self._know(assigned)
            if self._divided is not None:
                compiles = self._compilation is not None
                self._divided.check(dict(assigned.named), assigned.ties, self._schedule, compiles=compiles)
                share_memory = False  # a rank that waits in a collective passes no messages on
            # Data parallelism: replicas begin with the same values and sum their gradients.
            device = self._devices[assigned.local[0]]
            self._data_parallel = data_parallel_of(
                self.grid, detector, device, bucket_bytes, self._divided, self._schedule
            )
            self._hold(layers, assigned, move=devices is not None)
            if self._data_parallel is not None:
                self._data_parallel.start_alike((assigned.same_on_all(), seed), self)
            if self._divided is not None:
                self._divided.divide(self._layers)
            # The stages, what moves messages between them, and the loop that takes their actions.
            shared = [tie for tie in assigned.ties if len(tie.stages) > 1]
            self._stages = self._make_stages(assigned.local, [tie.parameter for tie in shared])
            apart = len(set(self._devices)) > 1
            self._transport: EdgeTransport = transport or InProcess(devices=self._devices if apart else ())
            self._ranks: PointToPoint | None = None
            self._tied: TiedWeights | None = None
            if network is not None and detector is not None:
                self._transport = self._ranks = PointToPoint(
                    network, self._schedule, device, detector, share_memory=share_memory
                )  # fmt: skip
                check_equal(self.gather((assigned.same_on_all(), seed)))
                self._tied = self._tie(shared, self._ranks)
                if network.size > 1:
                    refuse_optimizers(self)
            for stage in self._stages.values():
                stage.follow(self._schedule)
            self._steps = Steps(
                self._schedule, self._stages, self._devices, self._transport, self._tied,
                self._data_parallel, self._elsewhere,
            )  # fmt: skip
            if self.grid is not None and detector is not None:
                watch_over(self.grid, detector)

    def _know(self, assigned: Assignment) -> None:
        """Stores the facts about the whole model, which are the same on every rank."""
        modules = assigned.modules
        self._schedule, self._partition = assigned.schedule, assigned.partition
        self._devices, self._layer_names = assigned.devices, tuple(name for name, _ in assigned.named)
        self._portals = assigned.portals
        self.tied_names = {name: tie.names[0] for tie in assigned.ties for name in tie.names[1:]}
        self._whole = [ref(layer) for layer in modules]  # weak: other processes' layers may be freed

    def _hold(self, layers: object, assigned: Assignment, *, move: bool) -> None:
        """Takes the layers of this process as submodules, and notes the parameters that others train."""
        self._layers = assigned.layers(move=move)
        own = {parameter for layer in self._layers.values() for parameter in layer.parameters()}
        self._elsewhere = {
            id(parameter): (ref(parameter), f"{name}.{path}")
            for name, layer in assigned.named
            for path, parameter in layer.named_parameters()
            if parameter not in own
        }
        if isinstance(layers, OwnLayers):
            layers.give_to(self, self._parts)
        else:
            self._modules.update(self._layers)

    def _tie(self, shared: Sequence[Tie], ranks: PointToPoint) -> TiedWeights | None:
        """The weights that this process shares with others; all get the values of the first process."""
        joint = self._data_parallel if self._replicas is not None else None
        several = (tie for tie in shared if len(tie.ranks) > 1 or joint is not None)
        here = [tie for tie in several if ranks.rank in tie.ranks]
        if not here:
            return None
        found = TiedWeights(here, ranks, self, over_replicas=None if joint is None else joint.sum_of)
        found.share_values()
        return found

    @property
    def _replicas(self) -> Replicas | None:
        """The processes that have the same stages as this one."""
        return None if self._data_parallel is None else self._data_parallel.replicas

    @property
    def schedule(self) -> Schedule:
        """The schedule of the steps."""
        return self._schedule

    @property
    def partition(self) -> tuple[range, ...]:
        """The layer indices of each stage."""
        return self._partition

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of this process."""
        return tuple(self._stages.values())

    @property
    def timeline(self) -> Timeline:
        """The timeline of the latest training step in this process. On GPUs, reading waits for the device."""
        return self._steps.clock.timeline(self._schedule.num_stages, self._schedule.placement)

    def gather_timeline(self) -> Timeline:
        """The timeline of all processes; all must call. Clocks of different hosts are used as they are."""
        if self._ranks is None:
            return self.timeline
        device = next(iter(self._stages.values())).device
        with self._ranks.collectives() as collectives:
            return gather_timeline(collectives, self._steps.clock, device, self._schedule)

    @property
    def place(self) -> str:
        """The name of this process in messages: "rank 2", on a grid "rank 2 (dp=1 pp=0)"."""
        rank = 0 if self._ranks is None else self._ranks.rank
        if self.grid is None:
            return f"rank {rank}"
        return f"rank {dist.get_rank()} ({self.grid.coordinates(dist.get_rank())})"

    def step(
        self,
        batch: Tree | None,
        target: Tree | None,
        loss_fn: LossFn,
        *,
        scaler: torch.amp.GradScaler | None = None,
        observe: Observer | None = None,
    ) -> Tensor:
        """Takes a training step without the optimizer: adds the gradients of the mean loss over the
        mini-batch to `.grad`.

        Args:
            batch: the mini-batch, a tensor or a pytree. Its tensors are split along dimension 0; everything
                else goes to each micro-batch as it is. Over processes the first rank's batch is used. On a
                grid it is this replica's share of the mini-batch; shares may be uneven.
            target: likewise, or None; over processes the last rank's is used.
            loss_fn: `loss_fn(output, target)` returns the mean over the examples of a micro-batch. If it is a
                module, its parameters get gradients on the rank of the last stage, on a grid summed over
                replicas; they are not the pipeline's, so give them to an optimizer on that rank.
            scaler: multiplies the gradients by its scale, but not the loss that is returned. Over processes
                it must come from `Pipeline.scaler`, and every rank must pass it.
            observe: `observe(action)` returns a context manager that is entered around the action.

        Returns the mean loss over the mini-batch, of all replicas, without a graph, on every rank. An
        exception inside an action becomes an `ActionError` that names the action; gradients of actions that
        were complete stay in `.grad`.
        """
        wrong: Exception | None = None
        if not callable(loss_fn):
            wrong = ValueError(
                f"loss_fn is {loss_fn!r}; give a function of output and target that returns the examples' "
                "mean loss, such as torch.nn.functional.cross_entropy; to evaluate, call pipeline(inputs)"
            )
        elif not torch.is_grad_enabled():
            wrong = RuntimeError(
                "gradients are disabled; to evaluate, call pipeline.eval() and pipeline(inputs)"
            )
        elif scaler is not None and self.group is not None and getattr(scaler, "pipeline", None) is not self:
            wrong = ValueError(
                "this scaler would decide on every rank by that rank's gradients alone; make it with "
                "pipeline.scaler() on every rank"
            )
        if wrong is not None:
            raise self._steps.refused(wrong)
        loss = self._steps.take(self, self.num_steps, batch, target, loss_fn, observe, scaler)
        assert loss is not None
        self.num_steps += 1
        return loss

    def verify(
        self,
        batch: Tree | None,
        target: Tree | None,
        loss_fn: LossFn,
        *,
        tolerance: float | None = None,
    ) -> float:
        """Takes one step as this pipeline does and one of the plain model, and compares the outputs of
        stages, the loss, every gradient, every buffer and the random streams.

        Restores everything except what a loss or a hook changes outside of modules. All ranks must call.
        Every rank needs memory for the values and gradients of the whole model, twice; the rank of the last
        stage takes the plain step on its device, with the layers that the pipeline was built from.

        Args:
            batch, target, loss_fn: as in `step`; call it with one or two mini-batches of real data.
            tolerance: the largest difference that is taken for rounding, relative to the largest number of a
                tensor. Default: 1e-9 in float64, 1e-3 in float32, more in shorter formats.

        Returns the largest difference, if it is within the tolerance. Raises `VerifyError` on every rank,
        which says what differs first, in which stage, by how much, and the likely cause; and `ValueError` for
        a mesh with `fsdp` or `tp`, where no process has whole parameters.
        """
        return verify(self, batch, target, loss_fn, tolerance=tolerance)

    def scaler(self, **options: Any) -> GradScaler:
        """A `torch.amp.GradScaler` for `step(..., scaler=...)` that decides for all ranks together. `options`
        are torch's. Every rank calls `scaler.step(optimizer)` for each optimizer, in the same order, then
        `scaler.update()`; a rank that has nothing to train passes None as its optimizer.
        """
        return GradScaler(self, next(iter(self._stages.values())).device.type, **options)

    def forward(self, batch: Tree | None) -> Tree | None:
        """The model's output for a mini-batch, computed micro-batch by micro-batch without a graph. To
        evaluate, call `eval()` before and `train()` after, as with the plain model.

        `batch` is as in `step`. Tensors in the outputs of the micro-batches are joined along dimension 0;
        everything else in them must be equal. Over processes the rank of the last stage returns the output,
        the others None.
        """
        # Buffers that are made here serve training steps, too, so they must not be inference tensors.
        with torch.inference_mode(False):
            self._steps.take(self, _FORWARD_ONLY + self._num_forwards, batch)
        self._num_forwards += 1
        stage = self._stages.get(self._schedule.num_stages - 1)
        if stage is None:
            return None
        outputs, stage.outputs = [output for output in stage.outputs if output is not None], []
        return merge(outputs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm over all stages is at most `max_norm`. Returns the norm
        before, in float64, the same bits for every K. A weight that stages share counts once. All ranks must
        call.
        """
        copies = self._tied.copies if self._tied is not None else frozenset()
        gather = None if self.group is None else self.gather
        return clip(self._stages, copies, gather, max_norm, norm_type)

    def close(self) -> None:
        """Closes a pipeline over several processes: waits until all messages to other ranks have left, and
        shuts the connections down. Every rank calls it after its last step; none waits for the others. `with
        Pipeline(...) as pipeline:` closes it at the end of the block, and so does deleting the pipeline or
        ending the process. Parameters and gradients stay.
        """
        if self._ranks is not None:
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def shared_message_bytes(self) -> int:
        """Bytes of receive buffers in shared memory: at most twice what was in use at one time, in whole
        pages. 0 where messages do not go through shared memory.
        """
        return 0 if self._ranks is None else self._ranks.shared_bytes

    def refresh(self) -> None:
        """Forgets what stages know of each other's outputs; all ranks call it after freezing parameters."""
        for stage in self._stages.values():
            stage.refresh()
        if self._ranks is not None:
            self._ranks.refresh()

    def _make_stages(self, local: Sequence[int], tied: Collection[nn.Parameter] = ()) -> dict[int, Stage]:
        """Makes the stages of this process from its submodules; stages share the parameters `tied`."""
        layers = {i: self._layers[self._layer_names[i]] for index in local for i in self._partition[index]}
        make: Callable[..., Stage] = Stage
        first_microbatch = 0
        if self._data_parallel is not None:
            made = Stage if self._divided is None else self._divided.makes
            make = partial(made, reduction=self._data_parallel.reduction)
            if self.grid is not None:
                first_microbatch = self.grid.replica * self._schedule.num_microbatches
        return {
            index: make(
                index,
                [layers[i] for i in self._partition[index]],
                self._partition[index].start,
                device=self._devices[index],
                is_last=index == self._schedule.num_stages - 1,
                seed=self.seed,
                gather=None if self._replicas is None else self._replicas.gather,
                compilation=self._compilation,
                portals=[self._portals[i] for i in self._partition[index]],
                tied=tied,
                elsewhere=partial(refuse_elsewhere, self._elsewhere) if self._elsewhere else None,
                first_microbatch=first_microbatch,
            )
            for index in local
        }

    @property
    def _parts(self) -> list[Part]:
        """Layers made by `split` or `layers_of`: the modules in them are submodules here, they are not."""
        return [layer for layer in self._layers.values() if isinstance(layer, Part)]

    def __reduce__(self) -> Any:
        raise TypeError(
            "a pipeline cannot be copied or pickled; keep its state_dict, or build another of a copied model"
        )

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for part in self._parts:
            part.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        follow(self._parts, self)
        return self

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        found = super().load_state_dict(*arguments, **options)
        # assign=True has replaced the parameters.
        follow(self._parts, self)
        return found

    def gather(self, mine: T) -> list[T]:
        """Returns the picklable object `mine` of every rank, in rank order; every rank must call it. If one
        does not call within `timeout_s`, the pipeline fails with an `ActionError` that names that rank.
        """
        if self._ranks is None:
            return [mine]
        with self._ranks.collectives() as collectives:
            return collectives.gather(mine)

    def gather_all(self, mine: T) -> list[T]:
        """Like `gather`, over all processes of the grid, in the order of the mesh's ranks."""
        if self._ranks is None or self.grid is None:
            return self.gather(mine)
        with self._ranks.collectives_of_all() as collectives:
            return collectives.gather(mine)

"""What a pipeline is made of: layers, cut into stages, the grid and the ranks it is part of, and its state.

`Pipeline` says what the arguments mean and what can be done with it; here it is put together, once, in an
order that lets no process wait for one that has refused its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar
from weakref import ref

from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gpipe_bench.pipeline.arguments import Automatic, Device, backend_of
from gpipe_bench.pipeline.layout import layout_of
from gpipe_bench.pipeline.mesh.division import divided_over
from gpipe_bench.pipeline.mesh.grid import Grid, building, join
from gpipe_bench.pipeline.mesh.reduce import joint_of
from gpipe_bench.pipeline.model.parts import OwnLayers, Part, follow
from gpipe_bench.pipeline.plan.portals import edges_of
from gpipe_bench.pipeline.plan.remat import Remat
from gpipe_bench.pipeline.plan.replay import ActionTimes
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.ranks.connecting.network import Network, network_of
from gpipe_bench.pipeline.ranks.distributed import PointToPoint
from gpipe_bench.pipeline.ranks.failures.job import Job
from gpipe_bench.pipeline.ranks.gather import check_equal
from gpipe_bench.pipeline.ranks.tied import TiedWeights
from gpipe_bench.pipeline.stage.batchnorm import refuse_unsupported
from gpipe_bench.pipeline.stage.keywords import Keywords
from gpipe_bench.pipeline.stage.portals import declarations, runner_of
from gpipe_bench.pipeline.stage.reduced import ReducedStage
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.pipeline.stage.tied import Leaves
from gpipe_bench.pipeline.stage.trees import Tree
from gpipe_bench.pipeline.steps import Steps
from gpipe_bench.pipeline.transport import InProcess, Transport, with_portals

T = TypeVar("T")


class Assembled(nn.Module):
    """A model in stages, with its grid, its ranks and its state; arguments and errors as of `Pipeline`."""

    def __init__(
        self,
        layers: nn.Module | Iterable[nn.Module],
        *,
        num_stages: int | None = None,
        num_microbatches: int,
        mesh: DeviceMesh | None = None,
        zero: int | None = None,
        reduction: str = "buckets",
        bucket_bytes: int | None = None,
        schedule: str | Schedule = "gpipe",
        num_workers: int | None = None,
        action_s: ActionTimes | None = None,
        link_s: float | None = None,
        most_alive: int | None = None,
        remat: Remat = "always",
        cost: str | Sequence[float] | None = None,
        example: Tree | None = None,
        devices: Device | Sequence[Device] | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | Network | None = None,
        timeout_s: float = 600.0,
        share_memory: bool = True,
        transport: Transport | None = None,
        compile: bool | str = False,
    ) -> None:
        super().__init__()
        if transport is not None and (group is not None or mesh is not None):
            raise ValueError(
                "transport= is how stages of one process reach each other, and with group= or mesh= they are "
                "in several; leave it out, or say share_memory=False for gloo's messages on one host"
            )
        self.grid: Grid | None = None
        job: Job | None = None
        if mesh is not None:
            if group is not None:
                raise ValueError("mesh and group are both given; the mesh says which group the pipeline has")
            self.grid, job = join(mesh, timeout_s)
            group = self.grid.group("pp")
        self._divided = divided_over(self.grid, zero)
        network = None if group is None else network_of(group)
        layout = layout_of(
            layers,
            network,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            automatic=Automatic(action_s, link_s, most_alive),
            num_workers=num_workers,
            remat=remat,
            cost=cost,
            example=example,
            devices=devices,
        )
        self._schedule, self._calibration = layout.schedule, layout.calibration
        self._is_own = isinstance(schedule, Schedule)
        self._partition, self._devices = layout.partition, layout.devices
        modules, local, ties = layout.modules, layout.local, layout.ties
        # On every rank, whosever layer it is: one that refuses alone would be waited for.
        refuse_unsupported(part for layer in modules for part in layer.modules())
        self._portals = declarations(modules)
        self._lines = edges_of(self._portals, self._partition)
        self.tied_names = {name: tie.names[0] for tie in ties for name in tie.names[1:]}
        if self._divided is not None:
            known = None if self._calibration is not None else self._schedule
            self._divided.check(dict(layout.named), ties, known, compiles=bool(compile), reduction=reduction)
            share_memory = False  # nobody moves messages along while an action waits for other processes
        self._reduction = (timeout_s, reduction, bucket_bytes, self._divided)
        with building(job):
            self._joint = joint_of(self.grid, job, self._devices[local[0]], *self._reduction)
        self._replicas = None if self._joint is None else self._joint.replicas
        self._layers = layout.layers(move=devices is not None)  # those of this process, by name
        own = {parameter for layer in self._layers.values() for parameter in layer.parameters()}
        self._elsewhere = {
            id(parameter): (ref(parameter), f"{name}.{path}")
            for name, layer in layout.named
            for path, parameter in layer.named_parameters()
            if parameter not in own
        }
        self.seed = seed
        self.group = group
        self._backend = backend_of(compile)
        self._layer_names = tuple(name for name, _ in layout.named)
        self._keywords = Keywords.of_all(modules)
        if isinstance(layers, OwnLayers):
            layers.give_to(self, [part for part in self._layers.values() if isinstance(part, Part)])
        else:
            self._modules.update(self._layers)
        self._tied: TiedWeights | Leaves | None = None
        of_ties = [(tie.names, tie.uses, tie.parameter.shape, tie.parameter.dtype) for tie in ties]
        mine = (self._layer_names, self._partition, self._schedule, seed, of_ties, self._portals)
        if self._joint is not None:
            with building(job):
                self._joint.start_alike(mine, self)
        if self._divided is not None:
            self._divided.check_own(self._layers)
            with building(job):  # a rank that fails here is not to be awaited in what follows
                self._divided.divide(self._layers)
        with building(job):
            self._stages = self._make_stages(local, [tie.parameter for tie in ties if len(tie.ranks) > 1])
        self._ranks: PointToPoint | None = None
        apart = len(set(self._devices)) > 1
        self._transport: Transport = transport or InProcess(devices=self._devices if apart else ())
        if network is not None:
            self._ranks = PointToPoint(
                network,
                self._schedule,
                self._devices[local[0]],
                timeout_s=timeout_s,
                share_memory=share_memory,
                portals=self._lines,
                job=job,
                is_own=self._is_own,
            )
            self._transport = self._ranks
            check_equal(self.gather(mine))
            if self._tied is not None:
                replicas = self._replicas
                self._tied = TiedWeights(
                    ties, self._ranks, self, self._tied,
                    replicated=replicas is not None, bears=replicas is None or replicas.rank == 0,
                )  # fmt: skip
                self._tied.share_values()
        if self._lines:
            self._transport = with_portals(self._transport, self._lines)
        self._prepare()
        self.num_steps = 0  # training steps taken, which number the random streams
        self._num_forwards = 0
        self._has_warned = False  # of an evaluation in training mode

    def _make_stages(
        self, local: Sequence[int], elsewhere: Collection[nn.Parameter] = ()
    ) -> dict[int, Stage]:
        """The stages of this process, of the layers that are its submodules; other processes have the
        parameters `elsewhere`, too.
        """
        layers = {i: self._layers[self._layer_names[i]] for index in local for i in self._partition[index]}
        leaves = Leaves(layers, elsewhere) or None
        self._tied = leaves
        make: Callable[..., Stage] = Stage
        first_microbatch = 0
        if self._joint is not None:
            made = ReducedStage if self._divided is None else self._divided.makes
            make = partial(made, reduction=self._joint.reduction)
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
                backend=self._backend,
                runner=runner_of(self._portals, self._partition, self._lines, index),
                leaves=leaves,
                first_microbatch=first_microbatch,
            )
            for index in local
        }

    def _prepare(self) -> None:
        for stage in self._stages.values():
            if isinstance(stage, ReducedStage):
                stage.follow(self._schedule)
        self._steps = Steps(
            self._schedule, self._stages, self._devices, self._transport, self._tied, self._joint,
            self._elsewhere,
            is_own=self._is_own,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """For `copy` and `pickle`: everything but what is made of the rest again."""
        if self.group is not None:
            raise TypeError(
                "a pipeline over several processes cannot be copied or pickled, because its connections "
                "belong to this process; keep its state with checkpoint.save, or build a new pipeline on "
                "every rank and load its state_dict"
            )
        made = ("_stages", "_steps", "_joint", "_tied")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))
        self._joint = joint_of(None, None, self._devices[0], *self._reduction)
        self._stages = self._make_stages(range(self._schedule.num_stages))
        self._prepare()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for layer in self._layers.values():
            if isinstance(layer, Part):  # is not among our modules, only what it holds is
                layer.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        follow([layer for layer in self._layers.values() if isinstance(layer, Part)], self)
        return self

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        found = super().load_state_dict(*arguments, **options)
        # With assign=True there are other parameters now.
        follow([layer for layer in self._layers.values() if isinstance(layer, Part)], self)
        return found

    def gather(self, mine: T) -> list[T]:
        """What every rank brings, a picklable object, in the order of the ranks; all must call.

        A rank that does not come within `timeout_s` ends the pipeline with the `ActionError` that names it.
        """
        if self._ranks is None:
            return [mine]
        with self._ranks.together() as together:
            return together.gather(mine)

    def gather_all(self, mine: T) -> list[T]:
        """The same of all processes of the grid, in the order of the mesh's ranks."""
        if self._ranks is None:
            return [mine]
        if self.grid is None:
            return self.gather(mine)
        with self._ranks.all_together() as together:
            return together.gather(mine)

"""Places a process in a job's grid: its pipeline, the replicas of its stage, and the ranks that fail with it.
This is the only module that reads torch's `DeviceMesh`, which places ranks along named dimensions:

    pp    the workers of a pipeline, in order
    dp    pipelines beside each other, each with all parameters, which take shares of a batch
    fsdp  the same, but the holders of a stage keep a part of its parameters each
    tp    the processes that compute a layer together

    init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "pp"))     two pipelines of four ranks: 0-3 and 4-7

A *replica* is a pipeline with its own share of the batch: there are dp x fsdp of them.

Gradients travel in buckets, because a collective has the same latency whatever its size. All replicas begin
the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import devices
from ..errors import PeerError
from ..plan.links import BUCKET_BYTES, bucket_bytes_of
from ..ranks.failure import FailureDetector, Store, backend, bounded, missing, watch_in_thread
from ..ranks.wire import Connection, ObjectCollectives, TensorSpec, Transit

NAMES = ("dp", "fsdp", "pp", "tp")
_BATCH = ("dp", "fsdp")  # along these, ranks have shares of the batch


class Grid:
    """One process's view of the grid of a job.

    Args:
        mesh: torch's, with dimensions of `NAMES`

    Attributes:
        ranks: all ranks of the mesh, row by row
        batch_group: the processes that hold the same part of the same stage in all replicas; None before
            `join`, and where this process is the only one

    Raises:
        ValueError: an unknown dimension, a mesh without `pp` or without this process, ranks that do not
            ascend along a dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        names = tuple(mesh.mesh_dim_names or ())
        known = (
            f"name them as in init_device_mesh(..., mesh_dim_names={('dp', 'pp')!r}), of {', '.join(NAMES)}"
        )
        if not names:
            raise ValueError(f"the dimensions of the mesh have no names; {known}")
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            raise ValueError(f"the mesh has a dimension {unknown[0]!r}, which no pipeline has; {known}")
        if "pp" not in names:
            raise ValueError(
                f"the mesh has the dimensions {', '.join(names)}, but no 'pp' for the workers of the "
                "pipeline; give it one, which may have the size 1"
            )
        place = cast("list[int] | None", mesh.get_coordinate())
        if place is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the mesh; build the pipeline on the mesh's ranks only"
            )
        for name, index in zip(names, place, strict=True):
            if dist.get_rank(mesh.get_group(name)) != index:
                raise ValueError(
                    f"the ranks of the mesh do not ascend along {name!r}: {mesh.mesh.tolist()}; make it with "
                    "init_device_mesh, or give the ranks in order"
                )
        self.mesh = mesh
        self.ranks: tuple[int, ...] = tuple(mesh.mesh.flatten().tolist())
        self.batch_group: dist.ProcessGroup | None = None
        self._sizes = dict(zip(names, mesh.mesh.shape, strict=True))
        self._place = dict(zip(names, place, strict=True))

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        """Processes along a dimension; 1 where the mesh does not have it."""
        return self._sizes.get(name, 1)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The processes along a dimension, with this one; None where the mesh does not have it."""
        return self.mesh.get_group(name) if name in self else None

    @property
    def replicas(self) -> int:
        """Number of pipelines that take shares of the batch."""
        return self.size("dp") * self.size("fsdp")

    @property
    def replica(self) -> int:
        """Index of the replica of this process; processes along `tp` belong to the same replica."""
        found = 0
        for name, size in self._sizes.items():
            if name in _BATCH:
                found = found * size + self._place[name]
        return found

    def coordinates(self, rank: int) -> str:
        """The coordinates of a rank, such as "dp=1 pp=0"."""
        place = dict(zip(self._sizes, (self.mesh.mesh == rank).nonzero()[0].tolist(), strict=True))
        return " ".join(f"{name}={place[name]}" for name in NAMES if name in place)


def join(mesh: DeviceMesh, timeout_s: float) -> tuple[Grid, FailureDetector]:
    """The grid of a mesh with named dimensions, and its failure detector: all ranks of the mesh fail
    together. Every rank of the mesh must call; `ActionError` names one that does not come within the timeout.
    """
    grid = Grid(mesh)
    everybody, pipeline = dist.group.WORLD, grid.group("pp")
    assert everybody is not None
    assert pipeline is not None
    store = Store(everybody, timeout_s, sorted(grid.ranks))
    detector = FailureDetector(store, store.part(pipeline), coordinates=grid.coordinates)
    shared = tuple(name for name in mesh.mesh_dim_names or () if name in _BATCH and grid.size(name) > 1)

    def batch_group() -> dist.ProcessGroup | None:
        if len(shared) < 2:
            return mesh.get_group(shared[0]) if shared else None
        return mesh[shared]._flatten().get_group()

    with detector.building():
        store.exchange("here", "")
        detector.watch(watch_in_thread)
        try:  # torch connects the processes, with the user's timeout
            grid.batch_group = bounded(batch_group, timeout_s, store.failure)
        except TimeoutError as error:
            what = f"not all ranks connected within {timeout_s:g} s"
            raise PeerError(None, None, what) from error
    return grid, detector


def watch_over(grid: Grid, detector: FailureDetector) -> None:
    """Bounds collectives in the groups of the mesh by the timeout; a failure closes the groups."""
    groups = [grid.group(name) for name in NAMES if name != "pp" and grid.size(name) > 1]
    known = [group for group in dict.fromkeys((*groups, grid.batch_group)) if group is not None]
    detector.watch_over(known, grid.mesh.device_type)


T = TypeVar("T")


class Replicas:
    """The processes of `group`, which run the same stage, one in each pipeline, here on `device`. All of them
    construct it and call the same methods in the same order. It has connections of its own, which the
    `detector` closes at a failure.

    Methods wait for other replicas no longer than the timeout; they raise `PeerError` if one is missing and
    `StoreError` like the store.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, detector: FailureDetector) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._store, self._detector = detector.store.part(group), detector
        self._of_objects: ObjectCollectives | None = None
        accelerated = devices.is_accelerator(device)
        if accelerated:
            detector.device_waits.begin(partial(devices.mark, device))
        self._sums = self._of_hosts = self._connect("sums", accelerated=accelerated)
        if accelerated:
            self._of_hosts = self._connect("sums of hosts", accelerated=False)

    def _connect(self, name: str, *, accelerated: bool) -> Connection:
        made = backend(self._store, name, accelerated=accelerated, sums=True)
        connection = Connection(made, self._store.ranks)
        self._detector.cuts(connection)
        return connection

    def _reached(self, call: Callable[[], T]) -> T:
        """The result of a collective, with torch's error as a `PeerError`."""
        try:
            return call()
        except RuntimeError as error:
            raise missing(error) from error

    def gather(self, mine: Tensor) -> list[Tensor]:
        """The tensor of every replica, in the order of their ranks."""
        return [found.to(mine.device) for found in self.share(mine.cpu())]

    def share(self, mine: T) -> list[T]:
        """The picklable objects `mine` of all replicas, in the order of their ranks."""
        if self._of_objects is None:
            self._of_objects = ObjectCollectives(self._connect("objects", accelerated=False), self.rank)
        return self._of_objects.gather(mine)

    def numbers(self, mine: int) -> list[int]:
        """Each replica's number, of at most 63 bits, in a single message."""
        found = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        gather = self._of_hosts.backend.allgather
        self.wait(self._reached(lambda: gather([found], [torch.tensor([mine])])))
        return [int(each) for each in found]

    def sum(self, numbers: Tensor) -> Transit:
        """Begins to replace `numbers`, a contiguous tensor, by its sum over replicas, equal in every bit."""
        by = self._sums if devices.is_accelerator(numbers.device) else self._of_hosts
        return self._reached(lambda: by.backend.allreduce([numbers]))  # type: ignore[no-any-return]

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Copies the values of the first replica's tensors to all replicas, in place, and waits."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        there = [tensor for tensor in tensors if tensor.numel() and not tensor.is_meta]
        for bucket in buckets_of(there, bucket_bytes=BUCKET_BYTES):
            memory = bucket.fill([there[i] for i in bucket.positions]).view(torch.uint8)
            self.wait(self._reached(partial(self._sums.backend.broadcast, [memory], options)))
            for position, view in zip(bucket.positions, bucket.views, strict=True):
                there[position].copy_(view)

    def wait(self, work: Transit) -> None:
        """Waits until the result of `work` may be used; on an accelerator, by work enqueued later."""
        with self._detector.device_waits.waiting(None, None):
            self._reached(work.wait)


class GlobalShares(Sequence[float]):
    """The weight of each of this replica's micro-batches: its share of all replicas' examples. The sum over
    replicas begins at once and is waited for at the first use, behind the first forward.
    """

    def __init__(self, lengths: Sequence[int], replicas: Replicas) -> None:
        self._lengths, self._replicas = lengths, replicas
        self._examples = torch.tensor([sum(lengths)], dtype=torch.float64)
        self._work: Transit | None = replicas.sum(self._examples)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: Any) -> Any:
        if self._work is not None:
            self._replicas.wait(self._work)
            self._work = None  # frees the connection
        return self._lengths[index] / int(self._examples)


class FlatBucket:
    """Tensors of one dtype and device, sent together: end to end, each in its own layout, followed by a mark
    for each.

    Attributes:
        positions: indices of the tensors in a list
        views: each tensor in the filled bucket
        marks: a number for each, 0 for a missing one
    """

    def __init__(self, positions: Sequence[int], like: Sequence[Tensor]) -> None:
        self.positions = tuple(positions)
        self._specs = [TensorSpec.of(tensor) for tensor in like]
        self._dtype, self._device = like[0].dtype, like[0].device
        self._num_elements = sum(tensor.numel() for tensor in like)
        self.empty()

    def empty(self) -> None:
        """Releases the bucket's memory."""
        self.views: list[Tensor] = []
        self.marks = torch.empty(0)

    def fill(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Copies the tensors into new memory, zeros for a missing one. Returns all of it as real numbers,
        which collectives can add.
        """
        memory = torch.empty(self._num_elements + len(tensors), dtype=self._dtype, device=self._device)
        self.views, start = [], 0
        for tensor_spec in self._specs:
            self.views.append(memory.as_strided(tensor_spec.shape, tensor_spec.stride, start))
            start += tensor_spec.num_bytes // tensor_spec.dtype.itemsize
        self.marks = memory[start:].fill_(1)
        for place, (tensor, view) in enumerate(zip(tensors, self.views, strict=True)):
            if tensor is None:
                self.marks[place].zero_()
                view.zero_()
            else:
                view.copy_(tensor)
        return torch.view_as_real(memory) if memory.is_complex() else memory


def buckets_of(
    tensors: Sequence[Tensor], order: Iterable[int] = (), bucket_bytes: float | None = None
) -> list[FlatBucket]:
    """Divides gradients, or other tensors, into buckets, in the order in which they are sent.

    The order must be the same on all replicas, because collectives are matched by their order alone.

    Args:
        tensors: tensors of the same shapes, in the order of the parameters.
        order: positions in the order in which gradients are computed; others come last, the latest parameters
            first, as in a backward.
        bucket_bytes: size at which a bucket is closed; default: `bucket_bytes_of` all tensors.
    """
    if bucket_bytes is None:
        bucket_bytes = bucket_bytes_of(sum(tensor.nbytes for tensor in tensors))
    found: list[list[int]] = []
    open_ones: dict[torch.dtype, list[int]] = {}
    for position in dict.fromkeys([*order, *reversed(range(len(tensors)))]):
        dtype = tensors[position].dtype
        bucket = open_ones.setdefault(dtype, [])
        bucket.append(position)
        if sum(tensors[i].nbytes for i in bucket) >= bucket_bytes:
            found.append(open_ones.pop(dtype))
    return [FlatBucket(bucket, [tensors[i] for i in bucket]) for bucket in (*found, *open_ones.values())]

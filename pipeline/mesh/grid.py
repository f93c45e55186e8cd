"""Where a process is in the grid of a job: which pipeline it belongs to, who else holds the same stage, and
who ends with it.

torch's `DeviceMesh` gives the ranks of a job places along named dimensions. Here the four names that mean
something to a pipeline get their meaning, once, so that nobody else asks a mesh:

    pp    the workers of a pipeline, in order
    dp    pipelines beside each other, each with all parameters, which take shares of a batch
    fsdp  the same, but the holders of a stage keep a part of its parameters each
    tp    the processes that compute a layer together

    init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "pp"))     two pipelines of four ranks: 0-3 and 4-7

A *replica* is a pipeline that takes a share of the batch of its own: there are dp x fsdp of them.
"""

from __future__ import annotations

from typing import cast

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..ranks.failure import FailureDetector
from ..ranks.store import Store

NAMES = ("dp", "fsdp", "pp", "tp")
_BATCH = ("dp", "fsdp")  # along these every rank has a share of the batch of its own


class Grid:
    """The grid of a job, seen from this process.

    Args:
        mesh: torch's, with dimensions of `NAMES`; nobody else is asked

    Attributes:
        ranks: of the job, row by row
        batch_group: the processes that hold the same part of the same stage in all replicas; None where this
            is the only one, and until `join`

    Raises:
        ValueError: a name that means nothing here, a mesh without `pp`, a process outside of it, ranks that
            do not ascend along a dimension.
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

    def index(self, name: str) -> int:
        """This process's place along a dimension, from 0; 0 where the mesh does not have it."""
        return self._place.get(name, 0)

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
        """Where a rank of the job is, as in "dp=1 pp=0"."""
        found = (self.mesh.mesh == rank).nonzero().tolist()
        if not found:
            raise ValueError(f"rank {rank} is not in the mesh, which has the ranks {self.ranks}")
        place = dict(zip(self._sizes, found[0], strict=True))
        return " ".join(f"{name}={place[name]}" for name in NAMES if name in place)


def join(mesh: DeviceMesh, timeout_s: float) -> tuple[Grid, FailureDetector]:
    """The grid of a mesh whose dimensions are named, and what is known of failures in it: all ranks of the
    mesh end together (`ranks.failure`). Every rank of the mesh must call.

    `ValueError` as `Grid` raises it; `ActionError` names a rank that does not come within the timeout.
    """
    grid = Grid(mesh)
    everybody, pipeline = dist.group.WORLD, grid.group("pp")
    assert everybody is not None
    assert pipeline is not None
    # Grids beside each other in one job, each of some of its ranks, have keys of their own.
    store = Store(everybody, f"grid of {' '.join(map(str, grid.ranks))}, ")
    store.connect(timeout_s)
    detector = FailureDetector(
        store,
        dist.get_rank(),
        sorted(grid.ranks),
        members=dist.get_process_group_ranks(pipeline),
        coordinates=grid.coordinates,
    )
    shared = tuple(name for name in mesh.mesh_dim_names or () if name in _BATCH and grid.size(name) > 1)

    def batch_group() -> dist.ProcessGroup | None:
        if len(shared) < 2:
            return mesh.get_group(shared[0]) if shared else None
        return mesh[shared]._flatten().get_group()

    with detector.building():
        detector.meet(timeout_s)
        detector.watch(timeout_s)
        grid.batch_group = detector.bounded(batch_group, timeout_s)
    return grid, detector


def watch_over(grid: Grid, detector: FailureDetector, timeout_s: float) -> None:
    """From now on the timeout bounds every collective in the groups of the mesh, and the groups are closed
    when the pipeline fails. The pipeline's own messages do not use the groups, nor does its construction, so
    a mesh outlives a pipeline that cannot be built.
    """
    groups = [grid.group(name) for name in NAMES if name != "pp" and grid.size(name) > 1]
    groups += [grid.batch_group] if grid.batch_group not in groups else []
    present = [group for group in groups if group is not None]
    detector.watch_over(present, grid.mesh.device_type, timeout_s)

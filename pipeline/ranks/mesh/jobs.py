"""The job of a grid: all ranks of the mesh, who end together (`ranks.failures.job`)."""

from __future__ import annotations

from torch import distributed as dist

from gpipe_bench.pipeline.ranks.failures.job import Job
from gpipe_bench.pipeline.ranks.mesh.grid import NAMES, Grid
from gpipe_bench.pipeline.ranks.store import Store


def job_of(place: Grid, timeout_s: float) -> Job:
    """The processes of a grid; returns when all have come. `ActionError` names one that does not come within
    the timeout.
    """
    everybody = dist.group.WORLD
    assert everybody is not None
    pipeline = place.group("pp")
    assert pipeline is not None
    # Grids beside each other in one job, each of some of its ranks, have keys of their own.
    store = Store(everybody, f"grid of {' '.join(map(str, place.ranks))}, ")
    job = Job(
        store,
        dist.get_rank(),
        sorted(place.ranks),
        members=dist.get_process_group_ranks(pipeline),
        coordinates=place.coordinates,
    )
    job.meet(timeout_s)
    return job


def watch_over(job: Job, grid: Grid, timeout_s: float) -> None:
    """Bounds what is done in the groups of the mesh by the pipeline's timeout and closes them when it fails:
    the pipeline's own messages go other ways.
    """
    groups = [grid.group(name) for name in NAMES if name != "pp" and grid.size(name) > 1]
    groups += [grid.batch_group] if grid.batch_group not in groups else []
    job.watch_over([group for group in groups if group is not None], grid.mesh.device_type, timeout_s)

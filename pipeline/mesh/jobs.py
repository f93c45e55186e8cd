"""The job of a grid: all ranks of the mesh, who end together (`ranks.failures.job`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import distributed as dist

from gpipe_bench.pipeline.mesh.grid import NAMES, Grid
from gpipe_bench.pipeline.ranks.failures.job import SILENCE_S, Job
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
    silence_s = timeout_s if place.mesh.device_type == "cpu" else min(timeout_s, SILENCE_S)
    job.look_out(timeout_s, silence_s)
    return job


def watch_over(job: Job, grid: Grid, timeout_s: float) -> None:
    """Bounds what is done in the groups of the mesh by the pipeline's timeout and closes them when it fails:
    the pipeline's own messages go other ways.
    """
    groups = [grid.group(name) for name in NAMES if name != "pp" and grid.size(name) > 1]
    groups += [grid.batch_group] if grid.batch_group not in groups else []
    job.watch_over([group for group in groups if group is not None], grid.mesh.device_type, timeout_s)


def building(job: Job | None) -> AbstractContextManager[None]:
    """For what is done together while a pipeline is built (`Job.building`), where there is a grid."""
    return nullcontext() if job is None else job.building()

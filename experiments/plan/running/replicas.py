"""How a candidate is laid over the processes of a case: a pipeline, or a replica or a share in each."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.planner.candidate import Candidate
from gpipe_bench.planner.probes import sharded_over


def processes_of(candidate: Candidate, device_type: str = "cpu") -> dict[str, Any]:
    """What a `Pipeline` is given of the processes; all must call."""
    if candidate.fsdp > 1:
        return sharded_over(candidate.fsdp, candidate.fsdp_level, device_type)
    if candidate.dp == 1:
        return {"group": dist.group.WORLD}
    sizes = (candidate.dp, candidate.num_workers)
    return {"mesh": init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "pp"))}

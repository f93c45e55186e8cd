"""What stages, processes and grids ask of torch without its promise: it is there, and one file each asks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

PIPELINE = Path(__file__).parents[2] / "pipeline"
ASKED = {
    "_get_backend": (dist.ProcessGroup, "ranks/failure.py"),
    "_functional_collectives": (torch.distributed, "ranks/failure.py"),
    "distributed_c10d": (torch.distributed, "ranks/failure.py"),
    "PrefixStore": (dist, "ranks/store.py"),
    "get_group_store": (dist.ProcessGroup, "ranks/store.py"),
    "_flatten": (DeviceMesh, "mesh/grid.py"),
    "_fsdp_api": (torch.distributed.fsdp._fully_shard, "mesh/sharding.py"),
    "_get_fsdp_state": (FSDPModule, "mesh/sharding.py"),
    "_root_post_backward_final_callback": (FSDPState, "mesh/sharding.py"),
    "_unscale_grads_": (torch.amp.GradScaler, "mesh/gradients.py"),
    "_set_grad_enabled": (torch._C, "stage/stage.py"),
    "_execution_engine": (torch.autograd.Variable, "stage/split_backward.py"),
    "_FunctionBase": (torch._C, "stage/tensors.py"),
}


@pytest.mark.parametrize("name", ASKED)
def test_it_is_there_and_one_file_asks(name: str) -> None:
    owner, file = ASKED[name]
    assert hasattr(owner, name)
    asking = [path for folder in ("stage", "ranks", "mesh") for path in (PIPELINE / folder).rglob("*.py")]
    asking = [path for path in asking if re.search(rf"\b{name}\b", path.read_text())]
    assert [str(path.relative_to(PIPELINE)) for path in asking] == [file]


def test_where_collectives_raise() -> None:
    """`failure` knows an error of a collective by the module that it comes through."""
    assert dist.all_reduce.__wrapped__.__module__ == distributed_c10d.__name__
    assert _functional_collectives.all_reduce.__module__ == _functional_collectives.__name__
    assert {"AllGather", "Comm", "ReduceScatter"} <= vars(_fsdp_api).keys()

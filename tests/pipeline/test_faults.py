"""A rank that is killed or stopped, each way over one transport: it ends all others, which say who it was."""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forked import HANGING_S, fork_server, free_port
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.pipeline import Action, Kind, Pipeline, checkpoint, named, start_process
from gpipe_bench.pipeline.mesh.reduce import DataParallel
from gpipe_bench.pipeline.ranks.failure import Store

pytestmark = pytest.mark.processes  # four at a time
NUM_MICROBATCHES, WIDTH = 3, 6
# Longer than any fault may take, so that only the pipeline's own timeout can be what ends a rank.
GROUP_TIMEOUT_S = 600.0
REDUCING = "before reducing"  # the step is over but for what the replicas of a grid do together
END = "before closing"  # nobody needs the rank any more


@dataclass(frozen=True)
class Fault:
    """Rank `rank` is killed, or stopped, which closes no connection. `place` is an action such as `1R2`, met
    in training step `step`, or one around the steps. With `dp` it is one of a grid.
    """

    kind: str
    rank: int
    num_ranks: int
    transport: str
    place: str
    step: int = 0
    schedule: str = "gpipe"
    dp: int = 1

    @property
    def timeout_s(self) -> float:
        """The pipeline's. Only a rank that is stopped, or has yet to connect, is missed by it."""
        return 300.0 if self.kind == "kill" and "construction" not in self.place else 10.0

    @property
    def coordinates(self) -> str:
        pp = self.num_ranks // self.dp
        return f"dp={self.rank // pp} pp={self.rank % pp}" if self.dp > 1 else ""

    def __str__(self) -> str:
        grid = f", grid of {self.dp} x {self.num_ranks // self.dp}" if self.dp > 1 else ""
        return f"{self.kind} {self.rank} of {self.num_ranks}, {self.transport}, {self.place}{grid}"


FAULTS = (
    # In a step; rank 0 holds the store.
    Fault("kill", 1, 3, "gloo", "1B1"),
    Fault("kill", 0, 2, "shared memory", "0R2", schedule="1f1b"),
    Fault("kill", 1, 2, "gloo", "2W1", schedule="zb-v"),
    Fault("stop", 0, 2, "gloo", "0F1", step=1),
    Fault("stop", 2, 3, "shared memory", "2B0"),
    # Around it.
    Fault("kill", 1, 3, "gloo", "before construction"),
    Fault("stop", 0, 3, "shared memory", "while meeting"),
    Fault("kill", 2, 3, "shared memory", "in saving"),
    Fault("stop", 0, 3, "shared memory", END),
    # Of a grid.
    Fault("kill", 0, 4, "gloo", "0B1", step=1, dp=4),
    Fault("stop", 3, 4, "shared memory", REDUCING, dp=2),
)
INSIDE = {
    "while meeting": (Store, "await_all"),
    "in saving": (FileSystemWriter, "write_data"),
    REDUCING: (DataParallel, "finish"),
}
"""Places that are calls."""


class Bomb:
    """The fault of this world in its rank; harmless in the others."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self._folder = fault, folder
        self.is_mine = dist.get_rank() == fault.rank
        self.action: Action | None = None  # that is being taken
        self.step = 0

    def at(self, place: str) -> None:
        if self.is_mine and self.fault.place == place:
            (self._folder / "fault").touch()
            os.kill(os.getpid(), signal.SIGKILL if self.fault.kind == "kill" else signal.SIGSTOP)

    @contextmanager
    def observe(self, action: Action) -> Iterator[None]:
        self.action = action
        if action.kind is Kind.W:  # in which no layer runs
            self.in_layer()
        yield
        self.action = None

    def in_layer(self) -> None:
        if self.step == self.fault.step:
            self.at(str(self.action))

    def inside(self) -> AbstractContextManager[object]:
        """Meanwhile the first call of the fault's place is its end."""
        if self.fault.place not in INSIDE:
            return nullcontext()
        owner, name = INSIDE[self.fault.place]
        real = getattr(owner, name)

        def broken(*arguments: Any, **options: Any) -> Any:
            self.at(self.fault.place)
            return real(*arguments, **options)

        return mock.patch.object(owner, name, broken)


class Layer(nn.Module):
    def __init__(self, bomb: Bomb) -> None:
        super().__init__()
        self.linear, self._bomb = nn.Linear(WIDTH, WIDTH), bomb

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self._bomb.action is not None and self._bomb.action.kind in (Kind.F, Kind.R):
            self._bomb.in_layer()
        if y.requires_grad:
            y.register_hook(lambda gradient: self._bomb.in_layer())
        return y


def take_part(fault: Fault, folder: Path, rank: int, port: int) -> None:
    """One rank, in a process of its own; what it raises is in the folder when it ends."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ["WORLD_SIZE"] = str(fault.num_ranks)
    try:
        train(fault, folder)
    except Exception as error:
        traceback.print_exc()
        (folder / f"error {rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def train(fault: Fault, folder: Path) -> None:
    """Runs this process's rank under plain `env://` rendezvous, so that rank 0 holds the store."""
    with start_process(pin=False, timeout_s=GROUP_TIMEOUT_S, device="cpu"):
        bomb, pp = Bomb(fault, folder), fault.num_ranks // fault.dp
        torch.manual_seed(0)
        schedule = named(fault.schedule, pp, NUM_MICROBATCHES, remat="always")
        layers = [Layer(bomb) for _ in range(schedule.num_stages)]
        where: dict[str, Any] = {"group": dist.group.WORLD}
        if fault.dp > 1:
            where = {"mesh": init_device_mesh("cpu", (fault.dp, pp), mesh_dim_names=("dp", "pp"))}
        dist.barrier()  # who is still joining the process group, or making a mesh, waits as long as these do
        bomb.at("before construction")
        with bomb.inside():
            pipeline = Pipeline(
                layers, num_stages=schedule.num_stages, num_microbatches=NUM_MICROBATCHES, schedule=schedule,
                cost=[1] * len(layers), timeout_s=fault.timeout_s,
                share_memory=fault.transport == "shared memory", **where,
            )  # fmt: skip
            optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
            x, target = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
            for bomb.step in range(3):  # a late rank learns of a failure only in the next step
                pipeline.step(x, target, nn.functional.mse_loss, observe=bomb.observe)
                pipeline.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                pipeline.gather_timeline()
            checkpoint.save(folder / "checkpoint", pipeline, optimizer)
            checkpoint.load(folder / "checkpoint", pipeline, optimizer)
        bomb.at(END)
        pipeline.close()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_broken_rank_ends_all_others_which_say_who_it_was(tmp_path: Path, fault: Fault) -> None:
    context, port = fork_server(), free_port()
    ranks = [
        context.Process(target=take_part, args=(fault, tmp_path, rank, port))  # type: ignore[attr-defined]
        for rank in range(fault.num_ranks)
    ]
    for process in ranks:
        process.start()
    others = [rank for rank in range(fault.num_ranks) if rank != fault.rank]
    for rank in others:
        ranks[rank].join(HANGING_S)
    statuses = {rank: ranks[rank].exitcode for rank in others}
    for process in ranks:
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert (tmp_path / "fault").exists(), "the fault did not happen"
    if fault.place == END:
        assert statuses == dict.fromkeys(others, 0)
        return
    assert all(status not in (0, None) for status in statuses.values()), statuses
    for rank in others:
        said = (tmp_path / f"error {rank}").read_text()
        assert said.startswith("ActionError: ")
        if fault.kind == "kill":  # who was stopped nobody knows: who waits in vain names whom it waited for
            assert fault.coordinates in said
            assert re.search(rf"\brank {fault.rank}\b", said), said

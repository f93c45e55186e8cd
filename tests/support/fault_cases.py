"""Ranks that are killed or stopped, each way once for each transport, and what one rank does in a world in
which that happens: it trains, saves and loads. (Ranks that raise are in `failure_cases`.)
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.pipeline import Action, Kind, Pipeline, checkpoint, named, start_process
from gpipe_bench.pipeline.mesh.reduce import DataParallel
from gpipe_bench.pipeline.ranks import connect
from gpipe_bench.pipeline.ranks.store import Store

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
    def pp(self) -> int:
        return self.num_ranks // self.dp

    @property
    def coordinates(self) -> str:
        return f"dp={self.rank // self.pp} pp={self.rank % self.pp}" if self.dp > 1 else ""

    def __str__(self) -> str:
        grid = f", grid of {self.dp} x {self.pp}" if self.dp > 1 else ""
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
    Fault("stop", 0, 3, "gloo", "before saving"),
    Fault("kill", 0, 3, "shared memory", "in loading"),
    Fault("stop", 0, 3, "shared memory", END),
    # Of a grid.
    Fault("kill", 3, 4, "shared memory", "in construction", dp=2),
    Fault("kill", 0, 4, "gloo", "0B1", step=1, dp=4),
    Fault("stop", 3, 4, "shared memory", REDUCING, dp=2),
    Fault("stop", 0, 4, "gloo", "0B1", dp=2),
)


class Bomb:
    """The fault of this world in its rank; harmless in the others."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self._folder = fault, folder
        self.is_mine = dist.get_rank() == fault.rank
        self.action: Action | None = None  # that is being taken
        self.step = 0

    def blow(self) -> None:
        (self._folder / "fault").touch()
        os.kill(os.getpid(), signal.SIGKILL if self.fault.kind == "kill" else signal.SIGSTOP)

    def at(self, place: str) -> None:
        if self.is_mine and self.fault.place == place:
            self.blow()

    @contextmanager
    def observe(self, action: Action) -> Any:
        self.action = action
        # No layer runs in W, which works out weight gradients from what I has caught.
        if action.kind is Kind.W:
            self.in_layer()
        yield
        self.action = None

    def in_layer(self) -> None:
        if self.step == self.fault.step:
            self.at(str(self.action))

    def inside(self, owner: Any, name: str, place: str, condition: Callable[..., bool] | None = None) -> Any:
        """Blows in the first call of `owner.name` for which the condition holds."""
        real = getattr(owner, name)

        def broken(*arguments: Any, **options: Any) -> Any:
            if condition is None or condition(*arguments, **options):
                self.at(place)
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
            y.register_hook(self._backward)
        return y

    def _backward(self, gradient: Tensor) -> None:
        self._bomb.in_layer()


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
        bomb = Bomb(fault, folder)
        torch.manual_seed(0)
        schedule = named(fault.schedule, fault.pp, NUM_MICROBATCHES, remat="always")
        layers = [Layer(bomb) for _ in range(schedule.num_stages)]
        where: dict[str, Any] = {"group": dist.group.WORLD}
        if fault.dp > 1:
            where = {"mesh": init_device_mesh("cpu", (fault.dp, fault.pp), mesh_dim_names=("dp", "pp"))}
        dist.barrier()  # who is still joining the process group, or making a mesh, waits as long as these do
        bomb.at("before construction")
        inside = {
            "while meeting": bomb.inside(Store, "await_all", "while meeting"),
            "in construction": bomb.inside(
                connect, "backend", "in construction", lambda *_, name, **__: name == "gradients"
            ),
        }
        with inside.get(fault.place, nullcontext()):
            pipeline = Pipeline(
                layers,
                num_stages=schedule.num_stages,
                num_microbatches=NUM_MICROBATCHES,
                schedule=schedule,
                cost=[1] * len(layers),
                timeout_s=fault.timeout_s,
                share_memory=fault.transport == "shared memory",
                **where,
            )
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        x, target = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
        for bomb.step in range(3):  # a late rank learns of a failure only in the next step
            with _patched(fault, REDUCING, bomb.inside(DataParallel, "finish", REDUCING)):
                pipeline.step(x, target, nn.functional.mse_loss, observe=bomb.observe)
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            pipeline.gather_timeline()
        path = folder / "checkpoint"
        bomb.at("before saving")
        with _patched(fault, "in saving", bomb.inside(FileSystemWriter, "write_data", "in saving")):
            checkpoint.save(path, pipeline, optimizer)
        with _patched(fault, "in loading", bomb.inside(FileSystemReader, "read_data", "in loading")):
            checkpoint.load(path, pipeline, optimizer)
        bomb.at(END)
        pipeline.close()


def _patched(fault: Fault, place: str, patch: Any) -> AbstractContextManager[object]:
    return patch if fault.place == place else nullcontext()

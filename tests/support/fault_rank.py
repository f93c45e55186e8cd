"""What one rank does in a world in which a fault of `fault_table` happens: it trains, saves and loads."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fault_table import NUM_MICROBATCHES, REDUCING, Fault, GridFault
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.pipeline import Action, Kind, Pipeline, Schedule, checkpoint, named, start_process
from gpipe_bench.pipeline.mesh.reduce import DataParallel
from gpipe_bench.pipeline.ranks import connect
from gpipe_bench.pipeline.ranks.store import Store

WIDTH = 6
RAISED = "the fuse has blown"
# Longer than any fault may take, so that only the pipeline's own timeout can be what ends a rank.
GROUP_TIMEOUT_S = 600.0


class Bomb:
    """The fault of this world in its rank; harmless in the others."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self._folder = fault, folder
        self.is_mine = dist.get_rank() == fault.rank
        self.action: Action | None = None  # that is being taken
        self.step = 0

    def blow(self) -> None:
        (self._folder / "fault").write_text(str(time.monotonic()))
        if self.fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault.kind == "memory":
            raise torch.OutOfMemoryError(RAISED)
        raise ArithmeticError(RAISED)

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


def schedule_of(fault: Fault) -> Schedule:
    """With recomputation; the backward in halves where the fault is in one."""
    num_workers = fault.pp if isinstance(fault, GridFault) else fault.num_ranks
    schedule = named(fault.schedule, num_workers, NUM_MICROBATCHES, remat="always")
    if fault.place[1] not in "IW" or any(action.kind is Kind.W for action in schedule):
        return schedule
    rows = [
        [half for action in row for half in (_halves(action) if action.kind is Kind.B else (action,))]
        for row in schedule.actions
    ]
    return replace(schedule, name="split", actions=tuple(map(tuple, rows)))


def _halves(action: Action) -> tuple[Action, Action]:
    return action._replace(kind=Kind.I), action._replace(kind=Kind.W)


def take_part(fault: Fault, folder: Path, timeout_s: float) -> None:
    """Runs this process's rank under plain `env://` rendezvous, so that rank 0 holds the store."""
    with start_process(pin=False, timeout_s=GROUP_TIMEOUT_S, device="cpu"):
        bomb = Bomb(fault, folder)
        torch.manual_seed(0)
        schedule = schedule_of(fault)
        layers = [Layer(bomb) for _ in range(schedule.num_stages)]
        where: dict[str, Any] = {"group": dist.group.WORLD}
        if isinstance(fault, GridFault):
            where = {"mesh": init_device_mesh("cpu", (fault.dp, fault.pp), mesh_dim_names=("dp", "pp"))}
        dist.barrier()  # who is still joining the process group, or making a mesh, waits as long as these do
        bomb.at("before construction")
        inside = {
            "before the store": bomb.inside(Store, "connect", "before the store"),
            "while meeting": bomb.inside(Store, "await_all", "while meeting"),
            "in construction": bomb.inside(
                connect, "backend", "in construction", lambda *_, name, **__: name == "gradients"
            ),
            "before agreeing": bomb.inside(Pipeline, "gather", "before agreeing"),
        }
        with inside.get(fault.place, nullcontext()):
            pipeline = Pipeline(
                layers,
                num_stages=schedule.num_stages,
                num_microbatches=NUM_MICROBATCHES,
                schedule=schedule,
                cost=[1] * len(layers),
                timeout_s=timeout_s,
                share_memory=fault.transport == "shared memory",
                **where,
            )
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        x, target = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
        for bomb.step in range(3):  # a late rank learns of a failure only in the next step
            with _patched(fault, REDUCING, bomb.inside(DataParallel, "finish", REDUCING)):
                pipeline.step(x, target, nn.functional.mse_loss, observe=bomb.observe)
            bomb.at("between steps")
            bomb.at("before clipping")
            pipeline.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            bomb.at("before timeline")
            pipeline.gather_timeline()
        path = folder / "checkpoint"
        bomb.at("before saving")
        with _patched(fault, "in saving", bomb.inside(FileSystemWriter, "write_data", "in saving")):
            checkpoint.save(path, pipeline, optimizer)
        bomb.at("before loading")
        with _patched(fault, "in loading", bomb.inside(FileSystemReader, "read_data", "in loading")):
            checkpoint.load(path, pipeline, optimizer)
        bomb.at("before closing")
        pipeline.close()


def _patched(fault: Fault, place: str, patch: Any) -> AbstractContextManager[object]:
    return patch if fault.place == place else nullcontext()

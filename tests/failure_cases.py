"""Ranks that fail: the same error on every rank, within seconds although the time-out is longer."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from ranks import TIMEOUT_S, Ranks, raises, shared_folder
from tiny_models import mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader, Dataset

from gpipe_bench.pipeline import ActionError, checkpoint, gpipe
from gpipe_bench.pipeline.ranks import launch
from gpipe_bench.pipeline.ranks.wire import Connection

mse_loss = nn.functional.mse_loss
PATIENCE_S = 900.0
"""A time-out that nothing here reaches, however slow the machine: who waits for it has not been told."""


class Fuse(nn.Module):
    """Breaks in the forward, recomputation or backward of one micro-batch on one rank."""

    def __init__(self, action: str, error: Exception) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.stage, self.kind, self.microbatch = int(action[0]), action[1], int(action[2])
        self.error, self.forwards = error, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        y = self.linear(x)
        if dist.get_rank() != self.stage:
            return y
        if self.kind == "F" and self.forwards == self.microbatch + 1:
            raise self.error
        if self.kind == "R" and self.forwards == 2 * 4 - self.microbatch:
            raise self.error
        if self.kind == "B" and self.forwards == 2 * 4 - self.microbatch:
            y.register_hook(self._break)
        return y

    def _break(self, gradient: Tensor) -> None:
        raise self.error


def fails_everywhere(action: str, error: Exception, cause: str, ranks: Ranks | None = None) -> None:
    ranks = ranks or Ranks()
    layers = [Fuse(action, error) for _ in range(4)]
    pipeline = ranks.pipeline(layers, 4, remat="always", timeout_s=PATIENCE_S)
    start = time.monotonic()
    try:
        for _ in range(2):  # a late stage may have finished its part of the step in which an early one fails
            pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
    except ActionError as caught:
        found = caught
    assert str(found) == f"action {action} on rank {action[0]} failed: {cause}", found
    assert (found.__cause__ is error) == (ranks.rank == int(action[0]))
    assert time.monotonic() - start < PATIENCE_S
    with raises(RuntimeError, "has failed before"):
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)


def failures_of_every_kind_on_every_rank() -> None:
    for action, error, cause in (
        ("2F1", ZeroDivisionError("broken"), "ZeroDivisionError: broken"),
        ("1R2", KeyError("broken"), "KeyError: 'broken'"),
        ("3B0", ArithmeticError("broken"), "ArithmeticError: broken"),
        ("0B3", torch.OutOfMemoryError("2 GiB"), "OutOfMemoryError: 2 GiB"),
    ):
        fails_everywhere(action, error, cause)


def mapped() -> int:
    """How many memories of messages this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:pipeline")


class Held(Dataset):
    """What the worker that is asked has of its rank's: its sockets, messages' memory, and all cores."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[set[int], int, set[int]]:
        return set(launch._open_sockets().values()), mapped(), os.sched_getaffinity(0)


def failure_beside_workers_of_a_loader() -> None:
    """They were forked while the pipeline ran, and hold nothing open that its ranks close."""
    broken = ZeroDivisionError("broken")
    for share_memory in (True, False):
        ranks = Ranks(share_memory=share_memory)
        gc.collect()  # what steps that failed hold would go in between
        before, earlier = set(launch._open_sockets().values()), mapped()
        layers = [Fuse("2B0", broken) for _ in range(4)]
        pipeline = ranks.pipeline(layers, 4, timeout_s=PATIENCE_S)
        sockets = set(launch._open_sockets().values()) - before
        pipeline.eval()(mlp_batch(8)[0] if ranks.is_first else None)
        layers[ranks.rank].forwards = 0
        workers = iter(
            DataLoader(Held(), None, num_workers=1, prefetch_factor=1, multiprocessing_context="fork")
        )
        held, still, cores = next(workers)
        assert sockets
        assert not held & sockets
        assert not share_memory or still <= earlier < mapped()
        assert cores == os.sched_getaffinity(os.getppid())
        with raises(ActionError, "action 2B0 on rank 2 failed: ZeroDivisionError: broken"):
            for _ in range(2):
                pipeline.train().step(*ranks.own(*mlp_batch(8)), mse_loss)
        next(workers)


def failure_before_the_first_action() -> None:
    """A batch that cannot be split is the first rank's error, and everybody's end."""
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(mlp))
    batch, target = mlp_batch(0)
    kind = ValueError if ranks.is_first else ActionError
    with raises(kind, "the mini-batch is empty"):
        pipeline.step(*ranks.own(batch, target), mse_loss)
    pipeline = ranks.pipeline(seeded(mlp))
    batch, target = mlp_batch(8)
    kind = ValueError if ranks.is_last else ActionError
    with raises(kind, "the mini-batch has 8 examples but the target 7"):
        pipeline.step(*ranks.own(batch, target[:7]), mse_loss)


def a_rank_that_does_not_answer() -> None:
    ranks = Ranks()

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            threading.Event().wait(1.5)
            return super().forward(x)

    layers = [(Slow if index == 2 else nn.Linear)(6, 6) for index in range(4)]
    pipeline = ranks.pipeline([layer.double() for layer in layers], 1, timeout_s=0.5)
    with raises(ActionError, "on rank 2 failed: rank 2 did not answer: "):
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)


def a_failure_that_only_the_board_tells() -> None:
    """What a GPU's host relies on, because its waits are the device's: here no connection is closed."""
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(mlp))
    pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
    job = pipeline._transport._ties.job
    job.watch(TIMEOUT_S, TIMEOUT_S)
    dist.barrier()
    assert not job.noticed
    if ranks.rank == 2:
        job.board.report(ActionError(None, "told", 2))
    while not job.noticed:
        time.sleep(0.01)
    with raises(ActionError, "a step on rank 2 failed: told"):
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)


def a_failure_that_is_noticed_after_the_last_receive() -> None:
    """On a GPU a connection that is cut ends the waits with garbage and raises nothing: the step must, and
    nothing may be saved. Here the connections stay open, so that nothing else raises.
    """
    ranks = Ranks()
    folder = shared_folder()
    for when in ("in the step", "after the step"):
        pipeline = ranks.pipeline(seeded(mlp))
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        transport, last = pipeline._transport, pipeline.schedule.actions[ranks.rank][-1]

        def notice(transport=transport) -> None:
            transport._ties.job.board.report(ActionError(None, "told", 2))
            with mock.patch.object(Connection, "cut"):
                transport._ties.job.notice()

        @contextmanager
        def observe(action, when=when, last=last, notice=notice):
            yield
            if when == "in the step" and action == last:
                notice()

        told, failed_before = (ActionError, "a step on rank 2 failed: told"), (RuntimeError, "failed before")
        if when == "in the step":
            with raises(*told):
                pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss, observe=observe)
        else:
            pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
            dist.barrier()
            notice()
        with raises(*(told if when == "after the step" else failed_before)):
            checkpoint.save(folder, pipeline, optimizer)
        with raises(*failed_before):
            pipeline.clip_grad_norm_(1.0)
        with raises(*failed_before):
            pipeline.gather_timeline()
        assert not list(folder.iterdir())


def a_rank_that_cannot_write() -> None:
    """Every rank says which one and why, and goes on: the next folder may be a better one."""
    ranks = Ranks()
    pipeline, folder = ranks.pipeline(seeded(mlp)), shared_folder()
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    full = OSError(28, "No space left on device")
    with (
        mock.patch.object(FileSystemWriter, "write_data", side_effect=full)
        if ranks.rank == 2
        else nullcontext(),
        raises(RuntimeError, f"{folder} can't be written, says rank 2: OSError: [Errno 28] No space left"),
    ):
        checkpoint.save(folder, pipeline, optimizer)
    assert not (folder / ".metadata").exists()
    checkpoint.save(folder, pipeline, optimizer)
    checkpoint.load(folder, pipeline, optimizer)


def kill_one(folder: str, rank: int, world_size: int, port: int, victim: int) -> None:
    """A step in which one process is killed; the others write what they raised, none waits for a time-out."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    class Victim(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if rank == victim and torch.is_grad_enabled() and calls[0] > 4:
                os.kill(os.getpid(), signal.SIGKILL)
            calls[0] += 1
            return super().forward(x)

    calls = [0]
    layers = [Victim(6, 6).double() for _ in range(world_size)]
    ranks = Ranks()
    pipeline = ranks.pipeline(layers, remat="always", timeout_s=PATIENCE_S)
    try:
        for _ in range(2):
            pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
    except ActionError as error:
        Path(folder, str(rank)).write_text(str(error))
        raise


def raise_one(schedule_name: str) -> None:
    """For the launcher: rank 1 raises; the launcher must end with its error."""
    ranks = Ranks()
    assert schedule_name == gpipe(1, 1).name
    layers = [Fuse("1B0", ZeroDivisionError("broken")) for _ in range(2)]
    ranks.pipeline(layers, 4, remat="always").step(*ranks.own(*mlp_batch(8)), mse_loss)


CASES = (
    failures_of_every_kind_on_every_rank,
    failure_beside_workers_of_a_loader,
    failure_before_the_first_action,
    a_rank_that_does_not_answer,
    a_failure_that_only_the_board_tells,
    a_failure_that_is_noticed_after_the_last_receive,
    a_rank_that_cannot_write,
)

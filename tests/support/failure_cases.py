"""Ranks that fail: the same error on every rank, within seconds although the time-out is longer."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from ranks import TIMEOUT_S, Ranks, raises, shared_folder
from tiny_models import mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from gpipe_bench.pipeline import ActionError, Pipeline, checkpoint, gpipe
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


def a_loss_on_one_rank_alone() -> None:
    """The ranks that have none say so at once, and the one that has does not wait for them."""
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(mlp), timeout_s=PATIENCE_S)
    with raises((ValueError, ActionError), "loss_fn is None; give a function"):
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss if ranks.is_last else None)


def an_optimizer_that_decides_by_all_gradients() -> None:
    """As each rank would by its own; on a grid of replicas alone all have all of them."""
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(mlp))
    with raises(ValueError, "LBFGS decides by the gradients of all parameters, and each rank has only"):
        torch.optim.LBFGS(pipeline.parameters()).step(lambda: torch.zeros(()))
    alone = Pipeline(seeded(mlp), num_stages=2, num_microbatches=4)
    torch.optim.LBFGS(alone.parameters()).step(lambda: alone.step(*mlp_batch(8), mse_loss))


def an_interrupt_of_a_save() -> None:
    """Whoever has written its part does not take the checkpoint for saved."""
    ranks, folder = Ranks(), shared_folder()
    pipeline = ranks.pipeline(seeded(mlp), timeout_s=PATIENCE_S)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    kind = KeyboardInterrupt if ranks.is_first else ActionError
    with (
        mock.patch.object(FileSystemWriter, "finish", side_effect=KeyboardInterrupt),
        raises(kind, "" if ranks.is_first else "on rank 0 failed: KeyboardInterrupt"),
    ):
        checkpoint.save(folder, pipeline, optimizer)
    assert not (folder / ".metadata").exists()


class TooLarge(nn.Linear):
    """Does not fit where one rank moves it."""

    def _apply(self, *arguments, **options):
        if dist.get_rank() == 2:
            raise torch.OutOfMemoryError("2 GiB")
        return super()._apply(*arguments, **options)


def a_build_that_fails_on_one_rank() -> None:
    """The others don't wait for it, and the next build succeeds. Where it never began, it hears how that
    ended when it begins at last.
    """
    ranks = Ranks()
    too_large = [TooLarge(6, 6, dtype=torch.float64) for _ in range(4)]
    for _ in range(2):
        kind = torch.OutOfMemoryError if ranks.rank == 2 else ActionError
        with raises(kind, "2 GiB" if ranks.rank == 2 else "on rank 2 failed: OutOfMemoryError: 2 GiB"):
            ranks.pipeline(too_large, devices="cpu", timeout_s=PATIENCE_S)
    if ranks.rank == 2:
        dist.barrier()
    with raises(ActionError, " did not answer: timed out after"):
        ranks.pipeline(seeded(mlp), timeout_s=PATIENCE_S if ranks.rank == 2 else 2.0)
    if ranks.rank != 2:
        dist.barrier()
    pipeline = ranks.pipeline(seeded(mlp), timeout_s=PATIENCE_S)
    pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)


def ranks_on_devices_of_different_types() -> None:
    ranks = Ranks()
    layers = [nn.Linear(6, 6, device="meta" if ranks.rank == 1 else "cpu") for _ in range(4)]
    with raises(ValueError, "the stages of rank 0 are on cpu and those of rank 1 on meta"):
        ranks.pipeline(layers, timeout_s=PATIENCE_S)


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


class ToDense(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_dense()


def a_sparse_tensor_between_processes() -> None:
    ranks = Ranks()
    pipeline = ranks.pipeline([Sparse(), ToDense(), *seeded(mlp)[:2]], timeout_s=PATIENCE_S)
    with raises((ValueError, ActionError), "is a tensor of the layout torch.sparse_coo, and processes send"):
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)


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
    with raises(ActionError, " did not answer: timed out"):
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)


def a_failure_that_only_the_store_tells() -> None:
    """What a GPU's host relies on, because its waits are the device's: here no connection is closed."""
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(mlp))
    pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
    detector = pipeline._transport._session.detector
    detector.watch(TIMEOUT_S)
    dist.barrier()
    assert not detector.noticed
    if ranks.rank == 2:
        detector.report(ActionError(None, "told", 2))
    while not detector.noticed:
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
            transport._session.detector.report(ActionError(None, "told", 2))
            with mock.patch.object(Connection, "cut"):
                transport._session.detector.notice()

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


def raise_one(schedule_name: str) -> None:
    """For the launcher: rank 1 raises; the launcher must end with its error."""
    ranks = Ranks()
    assert schedule_name == gpipe(1, 1).name
    layers = [Fuse("1B0", ZeroDivisionError("broken")) for _ in range(2)]
    ranks.pipeline(layers, 4, remat="always").step(*ranks.own(*mlp_batch(8)), mse_loss)


CASES = (
    failures_of_every_kind_on_every_rank,
    failure_before_the_first_action,
    a_rank_that_does_not_answer,
    a_failure_that_only_the_store_tells,
    a_failure_that_is_noticed_after_the_last_receive,
    a_rank_that_cannot_write,
    a_loss_on_one_rank_alone,
    an_optimizer_that_decides_by_all_gradients,
    an_interrupt_of_a_save,
    a_build_that_fails_on_one_rank,
    ranks_on_devices_of_different_types,
    a_sparse_tensor_between_processes,
)

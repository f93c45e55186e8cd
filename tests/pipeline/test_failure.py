"""Tests failing ranks: all raise the same error within seconds, though the time-out is longer; and what is
said if the cause is unknown. A killed or stopped rank ends all others, which name it; each way is tested over
one transport.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from case_runner import Outcomes, assert_passed, named
from forked import HANGING_S, fork_server, free_port
from ranks import PATIENCE_S, Ranks, raises, shared_folder
from tiny_models import mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.pipeline import Action, ActionError, Kind, Pipeline, checkpoint, start_process
from gpipe_bench.pipeline import named as named_schedule
from gpipe_bench.pipeline.errors import PeerError, StoreError
from gpipe_bench.pipeline.mesh.reduce import DataParallel
from gpipe_bench.pipeline.ranks import failure
from gpipe_bench.pipeline.ranks.failure import FailureDetector, Store, peer_error_of

pytestmark = pytest.mark.processes  # four at a time
mse_loss = nn.functional.mse_loss


class Fuse(nn.Module):
    """Breaks in the forward, recomputation or backward of one of four micro-batches on one rank."""

    def __init__(self, action: str, error: Exception) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.stage, self.kind, self.microbatch = int(action[0]), action[1], int(action[2])
        self.error, self.forwards = error, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        y = self.linear(x)
        is_due = self.forwards == (self.microbatch + 1 if self.kind == "F" else 8 - self.microbatch)
        if dist.get_rank() == self.stage and is_due:
            if self.kind == "B":
                y.register_hook(self._break)
            else:
                raise self.error
        return y

    def _break(self, gradient: Tensor) -> None:
        raise self.error


def an_action_fails_and_every_rank_says_which() -> None:
    """Forwards, recomputations and backwards, on every rank, over both transports."""
    for share_memory, action, error, cause in (
        (True, "2F1", ZeroDivisionError("broken"), "ZeroDivisionError: broken"),
        (True, "0B3", torch.OutOfMemoryError("2 GiB"), "OutOfMemoryError: 2 GiB"),
        (False, "1R2", KeyError("broken"), "KeyError: 'broken'"),
        (False, "3B0", ArithmeticError("broken"), "ArithmeticError: broken"),
    ):
        ranks = Ranks(share_memory=share_memory)
        layers = [Fuse(action, error) for _ in range(4)]
        pipeline = ranks.pipeline(layers, 4, remat="always", timeout_s=PATIENCE_S)
        start_s = time.monotonic()
        try:
            for _ in range(2):  # a late stage may have finished its part of the step in which an early fails
                pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
        except ActionError as caught:
            found = caught
        assert str(found) == f"action {action} on rank {action[0]} failed: {cause}", found
        assert (found.__cause__ is error) == (ranks.rank == int(action[0]))
        assert time.monotonic() - start_s < PATIENCE_S
        with raises(RuntimeError, "has failed before"):
            pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)


def what_one_rank_is_given_wrongly_is_told_to_all() -> None:
    """Before any action: the rank that is given it raises its own error, and the others do not wait."""
    ranks, (batch, target) = Ranks(), mlp_batch(8)
    first, last = ranks.is_first, ranks.is_last

    def step(own: Any, *arguments: Any, **options: Any) -> Callable[[Pipeline], object]:
        return lambda pipeline: pipeline.step(*ranks.own(*own), *arguments, **options)

    cases = (
        (first, "the mini-batch is empty", step(mlp_batch(0), mse_loss)),
        (last, "the mini-batch has 8 examples but the target 7", step((batch, target[:7]), mse_loss)),
        (not last, "loss_fn is None; give a function", step((batch, target), mse_loss if last else None)),
    )
    for is_mine, text, call in cases:
        pipeline = ranks.pipeline(seeded(mlp), timeout_s=PATIENCE_S)
        with raises(ValueError if is_mine else (ValueError, ActionError), text):
            call(pipeline)


class ToSparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


class ToDense(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_dense()


def a_sparse_tensor_between_processes() -> None:
    ranks = Ranks()
    pipeline = ranks.pipeline([ToSparse(), ToDense(), *seeded(mlp)[:2]], timeout_s=PATIENCE_S)
    with raises((ValueError, ActionError), "is a tensor of the layout torch.sparse_coo, and processes send"):
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)


class TooLarge(nn.Linear):
    """Does not fit where one rank moves it."""

    def _apply(self, *arguments: Any, **options: Any) -> nn.Module:
        if dist.get_rank() == 2:
            raise torch.OutOfMemoryError("2 GiB")
        return super()._apply(*arguments, **options)


def a_build_that_fails_on_one_rank() -> None:
    """The others don't wait for it, and the next build succeeds. A rank that begins too late gets the error
    of the build it missed.
    """
    ranks = Ranks()
    is_mine = ranks.rank == 2
    too_large = [TooLarge(6, 6, dtype=torch.float64) for _ in range(4)]
    for _ in range(2):
        text = "2 GiB" if is_mine else "on rank 2 failed: OutOfMemoryError: 2 GiB"
        with raises(torch.OutOfMemoryError if is_mine else ActionError, text):
            ranks.pipeline(too_large, devices="cpu", timeout_s=PATIENCE_S)
    if is_mine:
        dist.barrier()
    with raises(ActionError, " did not answer: timed out after"):
        ranks.pipeline(seeded(mlp), timeout_s=PATIENCE_S if is_mine else 2.0)
    if not is_mine:
        dist.barrier()
    layers = [nn.Linear(6, 6, device="meta" if ranks.rank == 1 else "cpu") for _ in range(4)]
    with raises(ValueError, "the stages of rank 0 are on cpu and those of rank 1 on meta"):
        ranks.pipeline(layers, timeout_s=PATIENCE_S)
    ranks.pipeline(seeded(mlp), timeout_s=PATIENCE_S).step(*ranks.own(*mlp_batch(8)), mse_loss)


def a_rank_that_does_not_answer() -> None:
    ranks = Ranks()

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            threading.Event().wait(1.5)
            return super().forward(x)

    layers = [(Slow if index == 2 else nn.Linear)(6, 6).double() for index in range(4)]
    pipeline = ranks.pipeline(layers, 1, timeout_s=0.5)
    with raises(ActionError, " did not answer: timed out"):
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)


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


CASES = named(
    an_action_fails_and_every_rank_says_which, what_one_rank_is_given_wrongly_is_told_to_all,
    a_sparse_tensor_between_processes, a_build_that_fails_on_one_rank, a_rank_that_does_not_answer,
    an_interrupt_of_a_save,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, case)


# Errors of collectives, and of the store


def test_an_error_of_a_collective_is_no_failure_of_the_action() -> None:
    keys, limit = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda rank: dist.ProcessGroupGloo(keys, rank, 2, limit), range(2)))
    dist.Backend.register_backend("one end", lambda *_: ends[0], devices="cpu")
    dist.init_process_group("one end", store=dist.HashStore(), rank=0, world_size=1)
    del ends[1]  # the process at the other end
    mine = torch.ones(1)
    of_collectives: list[Callable[[], object]] = [
        lambda: dist.all_reduce(mine),
        lambda: functional.all_reduce(mine, "sum", dist.group.WORLD) + 1,
    ]
    try:
        for collective in of_collectives:
            with pytest.raises(RuntimeError) as caught:
                collective()
            found = peer_error_of(caught.value)
            assert found is not None
            assert "failed: Connection closed by peer" in found.cause  # without the place in gloo's source
    finally:
        dist.destroy_process_group()
    assert peer_error_of(RuntimeError("the layer's own")) is None


@pytest.mark.parametrize(
    ("host", "silent", "wanted"),
    [
        (0, True, (0, "0F1")),
        (0, False, (0, "0F1")),
        (None, True, (1, "1F1")),  # the launcher's: what is known here stays
    ],
)
def test_a_store_that_cannot_be_asked(host: int | None, silent: bool, wanted: tuple[int, str]) -> None:
    """Blames the rank that hosts it, if any; the peer's error gives the action."""
    broken = mock.Mock(side_effect=StoreError("is not there", silent=silent))
    keys: Any = SimpleNamespace(
        host=host, is_in_rank=host is not None, ranks=range(3), rank=2, failure=broken, set_failure=broken
    )
    rank, action = wanted
    waits = PeerError(Action.parse(action), rank, "did not answer: timed out", timed_out=True)
    found = FailureDetector(keys).explain(waits)
    assert (found.rank, str(found.action)) == (rank, action)


def test_a_store_that_does_not_answer_while_a_pipeline_connects() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    silent = mock.patch.object(failure, "bounded", side_effect=TimeoutError("no answer within 1 s"))
    try:
        with silent, pytest.raises(ActionError, match="the process group did not answer: no answer within"):
            Store(dist.group.WORLD, 1.0)
    finally:
        dist.destroy_process_group()


# Ranks that are killed or stopped


NUM_MICROBATCHES, WIDTH = 3, 6
# Longer than any fault may take, so that only the pipeline's own timeout can be what ends a rank.
GROUP_TIMEOUT_S = 600.0
REDUCING = "before reducing"  # the step is over but for what the replicas of a grid do together
END = "before closing"  # nobody needs the rank any more


@dataclass(frozen=True)
class Fault:
    """Rank `rank` is killed, or stopped (connections stay open). `place` is an action of training step
    `step`, such as `1R2`, or a moment outside the steps. `dp` is the number of replicas.
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
        """The pipeline's time-out: only it detects a rank that is stopped or yet to connect."""
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
    "while meeting": (Store, "exchange"),
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
        """Makes the call that `INSIDE` names cause the fault."""
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
        schedule = named_schedule(fault.schedule, pp, NUM_MICROBATCHES, remat="always")
        layers = [Layer(bomb) for _ in range(schedule.num_stages)]
        where: dict[str, Any] = {"group": dist.group.WORLD}
        if fault.dp > 1:
            where = {"mesh": init_device_mesh("cpu", (fault.dp, pp), mesh_dim_names=("dp", "pp"))}
        dist.barrier()  # a rank still joining the group or mesh would wait for GROUP_TIMEOUT_S
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
        if fault.kind == "kill":  # no rank knows which one stopped: each names the rank it waited for
            assert fault.coordinates in said
            assert re.search(rf"\brank {fault.rank}\b", said), said

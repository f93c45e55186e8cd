"""What four processes do together, case by case; `test_distributed` starts them once and reports each case as
a test.

Every rank gets other data than it should use: only the first rank's batch and the last rank's target may
count.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import alias_cases
import own_model_cases
import portal_cases
import tied_cases
import torch
import tree_cases
from random_schedules import BOTH_LOOK_AWAY, HELD_UP, LATE_WEIGHTS
from ranks import EXACT, TIMEOUT_S, Ranks, assert_own_gradients, raises
from tiny_models import everything, everything_batch, mlp, mlp_batch, plain_step, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from gpipe_bench import models
from gpipe_bench.experiments.engines.torch_runtime import CLASSES, TorchRuntime
from gpipe_bench.models.amoebanet.modules import set_drop_path
from gpipe_bench.pipeline import Pipeline, checkpoint
from gpipe_bench.pipeline.errors import ActionError
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES, SCHEDULES, Action, Kind, gpipe
from gpipe_bench.pipeline.plan.schedules.known import NAMED, named
from gpipe_bench.pipeline.plan.validate import validate
from gpipe_bench.pipeline.ranks import distributed
from gpipe_bench.pipeline.ranks.connecting import introduction
from gpipe_bench.pipeline.ranks.failures.failure import Lookout
from gpipe_bench.pipeline.ranks.messages import receiving, sending
from gpipe_bench.pipeline.ranks.messages.connection import Connection

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss
PATIENCE_S = 900.0
"""A time-out that nothing here reaches, however slow the machine: who waits for it has not been told."""
AMOEBANET = {
    "num_layers": 3, "num_filters": 8, "num_classes": 10, "image_size": 67, "aux_head": True, "dropout": 0.2,
}  # fmt: skip
TRANSFORMER = {
    "num_layers": 6, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "vocab_size": 50, "seq_len": 6,
    "dropout": 0.2,
}  # fmt: skip


def halves() -> Ranks:
    """Ranks 0, 1 and ranks 2, 3 as pipelines of their own."""
    first = dist.get_rank() // 2 * 2
    return Ranks(dist.new_group([first, first + 1], use_local_synchronization=True))


def shared_folder() -> Path:
    """An empty folder that all ranks know."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def transparency(ranks: Ranks | None = None, numbers: tuple[int, ...] = (1, 3, 8)) -> None:
    ranks = ranks or Ranks()
    for num_microbatches in numbers:
        batch, target = everything_batch(num_microbatches + 3)
        plain = plain_step(seeded(everything), batch, target, cross_entropy, num_microbatches)
        for schedule, remat in itertools.product(SCHEDULES, REMAT_MODES):
            pipeline = ranks.pipeline(seeded(everything), num_microbatches, schedule=schedule, remat=remat)
            loss = pipeline.step(*ranks.own(batch, target), cross_entropy)
            torch.testing.assert_close(loss, plain.loss, **EXACT)
            assert_own_gradients(pipeline, plain.gradients, **EXACT)


def mini_batches_of_changing_shapes(ranks: Ranks | None = None) -> None:
    """Every size is a new kind of step; sizes seen before need no new agreement."""
    ranks = ranks or Ranks()
    pipeline, alone = (
        ranks.pipeline(seeded(everything)),
        Pipeline(seeded(everything), num_stages=1, num_microbatches=4),
    )
    for step, size in enumerate((9, 4, 9, 6, 4, 12, 9)):
        batch, target = everything_batch(size, seed=step)
        loss = pipeline.step(*ranks.own(batch, target), cross_entropy)
        assert torch.equal(loss, alone.step(batch, target, cross_entropy))
        gradients = {name: p.grad for name, p in alone.named_parameters()}
        assert_own_gradients(pipeline, gradients)  # never zeroed: the steps accumulate
        if step % 2:
            output = pipeline(batch if ranks.is_first else None)
            wanted = alone(batch)
            assert (output is None) != ranks.is_last
            assert output is None or torch.equal(output, wanted)


def evaluation() -> None:
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(everything)).eval()
    plain = seeded(everything).eval()
    for size in (9, 4, 9):
        batch, _ = everything_batch(size)
        with torch.inference_mode():
            output = pipeline(batch if ranks.is_first else None)
            if ranks.is_last:
                torch.testing.assert_close(output, plain(batch), **EXACT)
        assert all(p.grad is None for p in pipeline.parameters())


def train(
    name: str, options: dict, make: Callable[[nn.Sequential], Pipeline], ranks: Ranks | None
) -> Pipeline:
    """Three RMSProp steps with dropout, drop path and batch normalization."""
    torch.manual_seed(0)
    model = models.MODELS[name](**options)
    set_drop_path(model, 0.7)
    pipeline = make(model)
    optimizer = torch.optim.RMSprop(pipeline.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch, target = models.example_batch(name, 7, generator=generator, **options)
        if ranks is not None:
            batch, target = ranks.own(batch, target)
        pipeline.step(batch, target, models.loss_fn(name, **options))
        optimizer.step()
        optimizer.zero_grad()
    return pipeline


def bitwise(name: str, options: dict, schedule: str) -> None:
    alone = train(
        name,
        options,
        lambda model: Pipeline(model, num_stages=1, num_microbatches=3, schedule=schedule),
        None,
    )
    wanted = alone.state_dict()
    for ranks in (halves(), Ranks()):
        pipeline = train(
            name, options, lambda m, r=ranks: r.pipeline(m, 3, schedule=schedule, remat="except_last"), ranks
        )
        for key, value in pipeline.state_dict().items():
            assert torch.equal(value, wanted[key]), f"K = {ranks.size}: {key}"


def bitwise_amoebanet() -> None:
    bitwise("amoebanet-d", AMOEBANET, "gpipe")


def bitwise_transformer() -> None:
    bitwise("transformer-lm", TRANSFORMER, "1f1b")


def clipping() -> None:
    ranks = Ranks()
    batch, target = everything_batch(9, torch.float32)
    pipeline = ranks.pipeline(seeded(everything, torch.float32))
    alone = Pipeline(seeded(everything, torch.float32), num_stages=1, num_microbatches=4)
    pipeline.step(*ranks.own(batch, target), cross_entropy)
    alone.step(batch, target, cross_entropy)
    assert torch.equal(pipeline.clip_grad_norm_(0.01), alone.clip_grad_norm_(0.01))
    assert_own_gradients(pipeline, {name: p.grad for name, p in alone.named_parameters()})


def checkpoint_from_two_stages_to_four() -> None:
    """Saved with K = 2, continued with K = 4 by other processes, equal to a run with K = 1 that never
    stopped.
    """

    def advance(
        pipeline: Pipeline, optimizer: torch.optim.Optimizer, steps: range, ranks: Ranks | None
    ) -> None:
        for step in steps:
            batch, target = everything_batch(7, torch.float32, seed=step)
            if ranks is not None:
                batch, target = ranks.own(batch, target)
            pipeline.step(batch, target, cross_entropy)
            optimizer.step()
            optimizer.zero_grad()

    def rmsprop(pipeline: Pipeline) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(pipeline.parameters(), lr=1e-3, momentum=0.9)

    folder = shared_folder()
    pair = halves()
    if dist.get_rank() < 2:
        pipeline = pair.pipeline(seeded(everything, torch.float32))
        optimizer = rmsprop(pipeline)
        advance(pipeline, optimizer, range(3), pair)
        checkpoint.save(folder, pipeline, optimizer)
    dist.barrier()
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(everything, torch.float32, seed=9))
    optimizer = rmsprop(pipeline)
    checkpoint.load(folder, pipeline, optimizer)
    advance(pipeline, optimizer, range(3, 5), ranks)

    alone = Pipeline(seeded(everything, torch.float32), num_stages=1, num_microbatches=4)
    advance(alone, rmsprop(alone), range(5), None)
    for key, value in pipeline.state_dict().items():
        assert torch.equal(value, alone.state_dict()[key]), key
    other = ranks.pipeline(seeded(everything, torch.float32), seed=1)
    with raises(ValueError, "written with seed 0, the pipeline has 1"):
        checkpoint.load(folder, other, rmsprop(other))


def timeline_of_all_ranks() -> None:
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(mlp))
    for _ in range(2):
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
    timeline = pipeline.gather_timeline()
    assert sorted(event.action for event in timeline.events) == sorted(pipeline.schedule)
    for stage, row in enumerate(pipeline.schedule.actions):
        assert [event.action for event in timeline.of_stage(stage)] == list(row)
    # On one clock, what a stage needs has ended elsewhere before it starts.
    end_s = {event.action: event.end_s for event in timeline.events}
    for event in timeline.events:
        action = event.action
        if action.kind == "F" and action.stage > 0:
            assert end_s[type(action)(action.stage - 1, action.kind, action.microbatch)] <= event.start_s
    assert set(timeline.conditions) == {"threads", "pinned_cores"}
    assert timeline.conditions["threads"] == "1"


def stages_without_anything_to_train() -> None:
    ranks = Ranks()
    model, other = seeded(mlp), seeded(mlp)
    pipeline = ranks.pipeline(other, 3)
    for step, frozen in enumerate(((0, 1, 2), (0, 1, 2, 4, 5), ())):
        for net in (model, other):
            for index, layer in enumerate(net):
                layer.requires_grad_(index not in frozen)
        pipeline.refresh()
        plain_step(model, *mlp_batch(8), mse_loss, 3, step=step)
        pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
        assert_own_gradients(pipeline, {name: p.grad for name, p in model.named_parameters()}, **EXACT)


class Layout(nn.Module):
    """A convolution that records the memory layout in which its input arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1).to(memory_format=torch.channels_last)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return self.conv(x)


def memory_layout_survives() -> None:
    ranks = Ranks()
    layers = [Layout() for _ in range(4)]
    pipeline = ranks.pipeline(layers, 2, remat="never")
    image = torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last)
    for _ in range(2):
        pipeline.step(image if ranks.is_first else None, None, lambda output, target: output.square().mean())
    assert layers[ranks.rank].seen == [True] * 4


def buffers_are_no_more_than_micro_batches_in_flight() -> None:
    ranks = Ranks()
    for schedule, most in (("gpipe", 6), ("1f1b", 4), ("naive", 1)):
        pipeline = ranks.pipeline(seeded(mlp), 6, schedule=schedule, remat="never")
        stage = pipeline.stages[0]
        addresses: set[int] = set()
        forward = stage.forward

        def spy(m, received, graph, forward=forward, addresses=addresses):
            if received is not None:
                addresses.update(tensor.data_ptr() for tensor in received.tensors)
            return forward(m, received, graph)

        stage.forward = spy
        for _ in range(3):
            pipeline.step(*ranks.own(*mlp_batch(12)), mse_loss)
        assert len(addresses) == (min(most, 6) if schedule != "1f1b" else 5 - ranks.rank) * (
            not ranks.is_first
        )


def arguments_that_do_not_fit() -> None:
    ranks = Ranks()
    with raises(ValueError, "4 ranks for 3 stages"):
        Pipeline(seeded(mlp), num_stages=3, num_microbatches=2, group=dist.group.WORLD)
    with raises(ValueError, "rank 2 builds another pipeline than rank 0"):
        ranks.pipeline(seeded(mlp), seed=int(ranks.rank == 2))


# Failures: the same error on every rank, within seconds although the timeout is longer.


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


def failure_in_forward() -> None:
    fails_everywhere("2F1", ZeroDivisionError("broken"), "ZeroDivisionError: broken")


def failure_in_recomputation() -> None:
    fails_everywhere("1R2", KeyError("broken"), "KeyError: 'broken'")


def failure_in_backward() -> None:
    fails_everywhere("3B0", ArithmeticError("broken"), "ArithmeticError: broken")


def failure_of_the_first_rank() -> None:
    fails_everywhere("0B3", ZeroDivisionError("broken"), "ZeroDivisionError: broken")


def out_of_memory() -> None:
    for action in ("0F3", "1R1", "2B2"):
        fails_everywhere(action, torch.OutOfMemoryError("2 GiB"), "OutOfMemoryError: 2 GiB")


def failure_before_the_first_action() -> None:
    """A batch that cannot be split is the first rank's error, and everybody's end."""
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(mlp))
    batch, target = mlp_batch(3)
    kind = ValueError if ranks.is_first else ActionError
    with raises(kind, "num_microbatches is 4 but the mini-batch has only 3 examples"):
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


def shapes_that_change_unannounced() -> None:
    """Outputs may depend on the shapes that go in, but on nothing else."""
    ranks = Ranks()
    calls = itertools.count()

    class Growing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, : 6 - next(calls) // 3]

    layers = [(Growing if index == 1 else nn.Linear)(6, 6) for index in range(4)]
    layers[2].forward = lambda x: x
    layers[3].forward = lambda x: x
    pipeline = ranks.pipeline([layer.double() for layer in layers], 2, remat="never")
    with raises(ActionError, "the shape or dtype of the output of stage 1"):
        for _ in range(3):
            pipeline.step(*ranks.own(*mlp_batch(4)), lambda output, target: output.square().mean())


def through_the_network() -> None:
    """gloo between all ranks, as between hosts."""
    ranks = Ranks(share_memory=False)
    transparency(ranks)
    mini_batches_of_changing_shapes(ranks)
    for action in ("0F3", "1R1", "2B2"):
        fails_everywhere(action, ZeroDivisionError("broken"), "ZeroDivisionError: broken", ranks)


def messages_that_take_memory() -> None:
    """Few buffers and few sends on the way: for all messages, and for the larger of several mini-batches."""
    gradients = gradient_bytes_of(mini_batches_of_changing_shapes)
    assert min(gradients) < max(gradients)
    for small_bytes in (0, (min(gradients) + max(gradients)) // 2 * 4):
        with (
            mock.patch.object(receiving, "SMALL_BYTES", small_bytes),
            mock.patch.object(sending, "SMALL_BYTES", small_bytes),
        ):
            for share_memory in (True, False):
                mini_batches_of_changing_shapes(Ranks(share_memory=share_memory))
            transparency(numbers=(8,))  # more micro-batches than buffers


def gradient_bytes_of(case: Callable[[], None]) -> set[int]:
    """The sizes of the messages that carry gradients to this rank or from it."""
    found: set[int] = set()
    send, take = distributed.PointToPoint.send_gradient, receiving.Receiver.take

    def spy_on_send(self, stage, microbatch, gradients):
        found.add(sum(g.nbytes for g in gradients if g is not None))
        send(self, stage, microbatch, gradients)

    def spy_on_take(self, microbatch):
        tensors = take(self, microbatch)
        if self._source > dist.get_rank():
            found.add(sum(t.nbytes for t in tensors if t is not None))
        return tensors

    with (
        mock.patch.object(distributed.PointToPoint, "send_gradient", spy_on_send),
        mock.patch.object(receiving.Receiver, "take", spy_on_take),
    ):
        case()
    return found


def through_memory_and_the_network() -> None:
    """Ranks 0 and 1 share memory and so do 2 and 3; between 1 and 2 is a network, as with two hosts."""
    ranks = Ranks(share_memory=True)
    elsewhere = f"machine {ranks.rank // 2}"
    with mock.patch.object(introduction, "machine_id", return_value=elsewhere):
        transparency(ranks)
        mini_batches_of_changing_shapes(ranks)
        for action in ("0F3", "1R1", "2B2"):
            fails_everywhere(action, ZeroDivisionError("broken"), "ZeroDivisionError: broken", ranks)


def schedules_that_need_more_buffers() -> None:
    """Valid schedules in which a stage keeps what it receives longer than usual."""
    batch, target = mlp_batch(11)
    for schedule, share_memory in itertools.product((LATE_WEIGHTS, HELD_UP), (True, False)):
        pair = halves()
        pair.options["share_memory"] = share_memory
        plain = plain_step(seeded(mlp), batch, target, mse_loss, schedule.num_microbatches)
        with (
            mock.patch.object(receiving, "SMALL_BYTES", 0),
            mock.patch.object(sending, "SMALL_BYTES", 0),
        ):
            pipeline = pair.pipeline(seeded(mlp), schedule.num_microbatches, schedule=schedule)
            for _ in range(3):
                pipeline.num_steps = 0
                pipeline.zero_grad()
                pipeline.step(*pair.own(batch, target), mse_loss)
        assert_own_gradients(pipeline, plain.gradients, **EXACT)


def several_stages_per_worker() -> None:
    """Both ways between two ranks, with rings as small as they get, and the bits of one process."""
    batch, target = everything_batch(11)
    plain = plain_step(seeded(everything), batch, target, cross_entropy, 7)
    for (name, remat), share_memory in itertools.product(
        (("interleaved", "never"), ("zb-v", "always"), ("v-min", "except_last")), (True, False)
    ):
        schedule, group = named(name, 2, 7, remat=remat), halves().group
        with (
            mock.patch.object(receiving, "SMALL_BYTES", 0),
            mock.patch.object(sending, "SMALL_BYTES", 0),
        ):
            pipelines = [
                Pipeline(
                    seeded(everything),
                    num_stages=4,
                    num_microbatches=7,
                    schedule=schedule,
                    cost=[1] * 12,
                    group=place,
                    timeout_s=TIMEOUT_S,
                    share_memory=share_memory,
                )
                for place in (group, None)
            ]
            has = {stage.index for stage in pipelines[0].stages}
            own = (batch if 0 in has else None, target if 3 in has else None)
            for step in range(3):
                losses = [
                    pipeline.step(*data, cross_entropy)
                    for pipeline, data in zip(pipelines, (own, (batch, target)), strict=True)
                ]
                if step == 0:
                    assert_own_gradients(pipelines[0], plain.gradients, **EXACT)
            assert torch.equal(*losses)
            assert torch.equal(*[pipeline.clip_grad_norm_(1e-3) for pipeline in pipelines])
            alone = {name: parameter.grad for name, parameter in pipelines[1].named_parameters()}
            assert_own_gradients(pipelines[0], alone)  # three steps added up, to the bit
            timeline = pipelines[0].gather_timeline()
            assert timeline.placement == schedule.placement
            assert {e.action for e in timeline.events} == set(schedule)
            for pipeline in pipelines:
                pipeline.eval()
            output, wanted = pipelines[0](own[0]), pipelines[1](batch)
            assert (output is None) == (3 not in has)
            assert output is None or torch.equal(output, wanted)


def a_schedule_that_is_measured() -> None:
    """Every rank runs the same rows in every step, and the weights have the bits of one process: through
    memory and the network, with rings as small as they get.
    """
    for share_memory, num_stages, remat in ((True, 4, "never"), (False, 4, "always"), (True, 2, "never")):
        group, taken = halves().group, []
        with (
            mock.patch.object(receiving, "SMALL_BYTES", 0),
            mock.patch.object(sending, "SMALL_BYTES", 0),
        ):
            pipelines = []
            for place in (group, None):
                torch.manual_seed(0)
                auto = {"schedule": "auto", "num_stages": num_stages, "group": place}
                auto.update({"timeout_s": TIMEOUT_S, "share_memory": share_memory})
                alone = {"schedule": "1f1b", "num_stages": 1}
                options = alone if place is None else auto
                pipelines.append(
                    Pipeline(everything(), num_microbatches=5, remat=remat, cost=[1] * 12, **options)
                )
            optimizers = [torch.optim.SGD(p.parameters(), lr=0.05, momentum=0.9) for p in pipelines]
            has = {stage.index for stage in pipelines[0].stages}
            for step in range(8):
                (image, ids), target = everything_batch(11, seed=step)
                batch = (image.float(), ids)
                own = (batch if 0 in has else None, target if num_stages - 1 in has else None)
                losses = [
                    pipeline.step(*data, cross_entropy)
                    for pipeline, data in zip(pipelines, (own, (batch, target)), strict=True)
                ]
                assert torch.equal(*losses), step
                taken.append(pipelines[0].schedule)
                of_all = pipelines[0].gather(taken[-1])
                assert of_all == [of_all[0]] * 2
                wanted = pipelines[1].state_dict()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                for key, value in pipelines[0].state_dict().items():
                    assert torch.equal(value, wanted[key]), (step, key)
        kinds = [{action.kind for action in schedule} for schedule in taken]
        assert all(Kind.B not in found for found in kinds[:3])
        assert all(found & {Kind.I, Kind.W} == set() for found in kinds[3:5])
        assert taken[5] == taken[6] == taken[7]
        assert pipelines[0].gather_timeline().makespan_s > 0
        pipelines[0].eval()
        pipelines[0](own[0])


def no_message_of_a_host_takes_the_network() -> None:
    """Also from the last rank to the first, where stages go round, and the loss to everybody."""
    ranks = Ranks(share_memory=True)
    batch, target = everything_batch(8)
    plain = plain_step(seeded(everything), batch, target, cross_entropy, 4)
    pipeline = Pipeline(
        seeded(everything),
        num_stages=8,
        num_microbatches=4,
        schedule="interleaved",
        remat="never",
        cost=[1] * 12,
        group=ranks.group,
        timeout_s=TIMEOUT_S,
    )
    own = (batch if ranks.is_first else None, target if ranks.is_last else None)
    elsewhere: list[int] = []
    send = Connection.send

    def spy(self, tensor, target, tag, action=None):
        if target not in self._neighbours:
            elsewhere.append(target)
        return send(self, tensor, target, tag, action)

    with mock.patch.object(Connection, "send", spy):
        for _ in range(2):
            pipeline.num_steps = 0
            pipeline.zero_grad()
            pipeline.step(*own, cross_entropy)
    assert elsewhere == []
    assert_own_gradients(pipeline, plain.gradients, **EXACT)


def layers_for_torch(num_stages: int) -> list[list[nn.Module]]:
    torch.manual_seed(3)
    return [[nn.Linear(6, 6).double(), nn.Tanh()] for _ in range(num_stages)]


def weights_after_three_steps(
    stages: list[list[nn.Module]], step: Callable[[Tensor, Tensor], object]
) -> list[Tensor]:
    parameters = [p for layers in stages for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for seed in range(3):
        step(*mlp_batch(8, seed=seed))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in parameters]


def our_rows_in_torchs_runtime() -> None:
    """torch trains what we write to the weights to which we train it: all but recomputations."""
    group = halves().group
    for name in NAMED:
        schedule = named(name, 2, 4)
        theirs, ours = layers_for_torch(schedule.num_stages), layers_for_torch(schedule.num_stages)
        runtime = TorchRuntime(schedule, theirs, 4, mse_loss, group, torch.device("cpu"))
        pipeline = Pipeline(
            list(itertools.chain(*ours)),
            num_stages=schedule.num_stages,
            num_microbatches=4,
            schedule=schedule,
            cost=[1] * (2 * schedule.num_stages),
            group=group,
            timeout_s=TIMEOUT_S,
        )
        wanted = weights_after_three_steps(theirs, runtime.step)
        found = weights_after_three_steps(ours, lambda x, y, p=pipeline: p.step(x, y, mse_loss))
        trained = 0
        for a, b, first in zip(found, wanted, layers_after_none(schedule.num_stages), strict=True):
            torch.testing.assert_close(a, b, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
            trained += not torch.equal(a, first)
        assert trained == schedule.num_stages, name  # weight and bias of this rank's half of the stages


def layers_after_none(num_stages: int) -> list[Tensor]:
    return [p.detach() for s in layers_for_torch(num_stages) for layer in s for p in layer.parameters()]


def torchs_rows_in_our_engine() -> None:
    """Whatever torch dumps is valid and runs here, with the gradients of the plain model."""
    pair = halves()
    for name in CLASSES:
        stages = layers_for_torch(2 if name in ("gpipe", "1f1b") else 4)
        model = nn.Sequential(*itertools.chain(*stages))
        runtime = TorchRuntime(name, stages, 4, mse_loss, pair.group, torch.device("cpu"))
        schedule = runtime.rows(name)
        if name == "1f1b" and Action(1, Kind.F, 0) not in set(schedule):
            with raises(ValueError, "the row of stage 1 holds 1F4"):
                validate(replace(schedule, num_microbatches=4))  # torch counts these forwards from 1
            continue
        validate(schedule)
        assert tuple(map(schedule.worker, range(len(stages)))) == runtime.placement
        plain = plain_step(copy.deepcopy(model), *mlp_batch(8), mse_loss, 4)
        pipeline = Pipeline(
            model,
            num_stages=len(stages),
            num_microbatches=4,
            schedule=schedule,
            cost=[1] * len(model),
            group=pair.group,
            timeout_s=TIMEOUT_S,
        )
        for _ in range(2):
            pipeline.zero_grad()
            loss = pipeline.step(*mlp_batch(8), mse_loss)
            torch.testing.assert_close(loss, plain.loss, **EXACT)
            assert_own_gradients(pipeline, plain.gradients, **EXACT)


def the_loss_is_told_before_the_last_weights() -> None:
    """In a V the rank of the loss has the longest row; here it takes its last action only after the other
    one's step has returned.
    """
    batch, target = everything_batch(6)
    for share_memory in (True, False):
        pair = halves()
        pipeline = Pipeline(
            seeded(everything),
            num_stages=4,
            num_microbatches=2,
            schedule="zb-v",
            remat="never",
            cost=[1] * 12,
            group=pair.group,
            timeout_s=TIMEOUT_S,
            share_memory=share_memory,
        )
        last_action = pipeline.schedule.actions[0][-1]
        other, word = dist.get_global_rank(pair.group, 1 - pair.rank), torch.zeros(1)
        has_returned = dist.irecv(word, other) if pair.is_first else None

        @contextmanager
        def observe(action, last_action=last_action, has_returned=has_returned):
            if action == last_action:
                has_returned.wait(timedelta(seconds=TIMEOUT_S))
            yield

        own = (batch, target) if pair.is_first else (None, None)
        pipeline.step(*own, cross_entropy)  # the ranks agree on what travels
        if pair.is_first:
            pipeline.step(*own, cross_entropy, observe=observe)
        else:
            pipeline.step(*own, cross_entropy)
            dist.send(word, other)


def memory_between_networks() -> None:
    """Ranks 1 and 2 share memory; each waits for the network while it has something for the other."""
    ranks = Ranks(share_memory=True)
    batch, target = mlp_batch(6)  # micro-batches 2 and 3 are smaller, of a size that is new
    plain = plain_step(seeded(mlp), batch, target, mse_loss, 4)
    with mock.patch.object(introduction, "machine_id", return_value=f"machine {(ranks.rank + 1) // 2}"):
        pipeline = ranks.pipeline(seeded(mlp), 4, schedule=BOTH_LOOK_AWAY)
        for _ in range(3):
            pipeline.num_steps = 0
            pipeline.zero_grad()
            pipeline.step(*ranks.own(batch, target), mse_loss)
    assert_own_gradients(pipeline, plain.gradients, **EXACT)


def a_failure_that_only_the_blackboard_tells() -> None:
    """What a GPU's host relies on, because its waits are the device's: here with the CPU's connections left
    open.
    """
    ranks = Ranks()
    pipeline = ranks.pipeline(seeded(mlp))
    pipeline.step(*ranks.own(*mlp_batch(8)), mse_loss)
    transport = pipeline._transport
    noticed = threading.Event()
    Lookout(transport._ties._blackboard, noticed.set, limit_s=TIMEOUT_S, interval_s=0.01)
    dist.barrier()
    assert not noticed.is_set()
    if ranks.rank == 2:
        transport._ties._blackboard.report(ActionError(None, "told", 2))
    assert noticed.wait(TIMEOUT_S)
    transport._ties.notice()
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
            transport._ties._blackboard.report(ActionError(None, "told", 2))
            with mock.patch.object(Connection, "cut"):
                transport._ties.notice()

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


def on_gpus() -> list[float]:
    """A step over NCCL; differences to the plain model, and the timeline's makespan."""
    ranks = Ranks()
    device = torch.device("cuda", ranks.rank)
    batch, target = everything_batch(9)
    model = seeded(everything)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a GPU's generator draws other numbers
    other = copy.deepcopy(model)
    plain = plain_step(model, batch, target, cross_entropy, 4)
    pipeline = ranks.pipeline(other, devices=device, remat="except_last")
    for _ in range(2):
        pipeline.zero_grad()
        loss = pipeline.step(
            tuple(t.to(device) for t in batch) if ranks.is_first else None,
            target.to(device) if ranks.is_last else None,
            cross_entropy,
        )
    found = [abs(float(loss) - float(plain.loss))]
    for name, parameter in pipeline.named_parameters():
        found.append(float((parameter.grad.cpu() - plain.gradients[name]).abs().max()))
    assert pipeline.gather_timeline().makespan_s > 0
    pipeline.clip_grad_norm_(1.0)
    return found


def a_loss_of_another_dtype_is_refused() -> None:
    """The others would take its bytes for a number of the dtype that was agreed on."""
    pair, (batch, target) = halves(), mlp_batch(6)

    def halved(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target).float()

    for schedule in ("gpipe", "1f1b"):
        pipeline = pair.pipeline(seeded(mlp), schedule=schedule)
        pipeline.step(*pair.own(batch, target), nn.functional.mse_loss)
        with raises(RuntimeError, "the shape or dtype of the loss, () torch.float64 before"):
            pipeline.step(*pair.own(batch, target), halved)


def what_is_closed_stays_closed() -> None:
    """Whatever is asked of it, it says so, and no rank is blamed."""
    pair, (batch, target) = halves(), mlp_batch(6)
    pipeline = pair.pipeline(seeded(mlp), schedule="1f1b")
    pipeline.step(*pair.own(batch, target), nn.functional.mse_loss)
    pipeline.close()
    for ask in (
        lambda: pipeline.step(*pair.own(batch, target), nn.functional.mse_loss),
        lambda: pipeline(batch if pair.is_first else None),
        lambda: pipeline.clip_grad_norm_(1.0),
        pipeline.gather_timeline,
    ):
        try:
            ask()
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        assert said == "this pipeline is closed; build a new one on every rank", said
        pipeline.close()


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        transparency,
        mini_batches_of_changing_shapes,
        evaluation,
        bitwise_amoebanet,
        bitwise_transformer,
        clipping,
        a_loss_of_another_dtype_is_refused,
        what_is_closed_stays_closed,
        checkpoint_from_two_stages_to_four,
        timeline_of_all_ranks,
        stages_without_anything_to_train,
        memory_layout_survives,
        buffers_are_no_more_than_micro_batches_in_flight,
        arguments_that_do_not_fit,
        failure_in_forward,
        failure_in_recomputation,
        failure_in_backward,
        failure_of_the_first_rank,
        out_of_memory,
        failure_before_the_first_action,
        a_rank_that_does_not_answer,
        shapes_that_change_unannounced,
        through_the_network,
        messages_that_take_memory,
        through_memory_and_the_network,
        a_failure_that_only_the_blackboard_tells,
        a_failure_that_is_noticed_after_the_last_receive,
        a_rank_that_cannot_write,
        schedules_that_need_more_buffers,
        several_stages_per_worker,
        no_message_of_a_host_takes_the_network,
        a_schedule_that_is_measured,
        our_rows_in_torchs_runtime,
        torchs_rows_in_our_engine,
        the_loss_is_told_before_the_last_weights,
        memory_between_networks,
        *alias_cases.CASES,
        *tied_cases.CASES,
        *tree_cases.CASES,
        *own_model_cases.CASES,
        *portal_cases.CASES,
    )
}


def kill_one(folder: str, rank: int, world_size: int, port: int, victim: int) -> None:
    """A step in which one process is killed; the others write what they raised, none waits for a time-out."""
    import os
    import signal

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

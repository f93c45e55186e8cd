"""Messages between ranks: through memory and through the network, and how many buffers they take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest import mock

from distributed_cases import mini_batches_of_changing_shapes, transparency
from failure_cases import fails_everywhere
from random_schedules import HELD_UP, LATE_WEIGHTS
from ranks import TIMEOUT_S, Ranks, halves, raises
from tiny_models import (
    EXACT,
    assert_own_gradients,
    everything,
    everything_batch,
    mlp,
    mlp_batch,
    plain_step,
    seeded,
)
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.pipeline import ActionError, Pipeline
from gpipe_bench.pipeline.ranks import distributed, ends
from gpipe_bench.pipeline.ranks.wire import Connection

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss


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


def everything_through(ranks: Ranks) -> None:
    transparency(ranks)
    mini_batches_of_changing_shapes(ranks)
    for action in ("0F3", "1R1", "2B2"):
        fails_everywhere(action, ZeroDivisionError("broken"), "ZeroDivisionError: broken", ranks)


def through_the_network() -> None:
    """gloo between all ranks, as between hosts."""
    everything_through(Ranks(share_memory=False))


def messages_that_take_memory() -> None:
    """Few buffers and few sends on the way: for all messages, and for the larger of several mini-batches."""
    gradients = gradient_bytes_of(mini_batches_of_changing_shapes)
    assert min(gradients) < max(gradients)
    for small_bytes in (0, (min(gradients) + max(gradients)) // 2 * 4):
        with mock.patch.object(ends, "SMALL_BYTES", small_bytes):
            for share_memory in (True, False):
                mini_batches_of_changing_shapes(Ranks(share_memory=share_memory))
            transparency(numbers=(8,))  # more micro-batches than buffers


def gradient_bytes_of(case: Callable[[], None]) -> set[int]:
    """The sizes of the messages that carry gradients to this rank or from it."""
    found: set[int] = set()
    send, take = distributed.PointToPoint.send_back, ends.Receiver.take

    def spy_on_send(self, edge, microbatch, gradients):
        found.add(sum(g.nbytes for g in gradients if g is not None))
        send(self, edge, microbatch, gradients)

    def spy_on_take(self, microbatch, action):
        tensors = take(self, microbatch, action)
        if self.queue.source > dist.get_rank():
            found.add(sum(t.nbytes for t in tensors if t is not None))
        return tensors

    with (
        mock.patch.object(distributed.PointToPoint, "send_back", spy_on_send),
        mock.patch.object(ends.Receiver, "take", spy_on_take),
    ):
        case()
    return found


def schedules_that_need_more_buffers() -> None:
    """Valid schedules in which a stage keeps what it receives longer than usual."""
    batch, target = mlp_batch(11)
    for schedule, share_memory in itertools.product((LATE_WEIGHTS, HELD_UP), (True, False)):
        pair = halves()
        pair.options["share_memory"] = share_memory
        plain = plain_step(seeded(mlp), batch, target, mse_loss, schedule.num_microbatches)
        with mock.patch.object(ends, "SMALL_BYTES", 0):
            pipeline = pair.pipeline(seeded(mlp), schedule.num_microbatches, schedule=schedule)
            for _ in range(3):
                pipeline.num_steps = 0
                pipeline.zero_grad()
                pipeline.step(*pair.own(batch, target), mse_loss)
        assert_own_gradients(pipeline, plain.gradients, **EXACT)


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


CASES = (
    buffers_are_no_more_than_micro_batches_in_flight,
    shapes_that_change_unannounced,
    through_the_network,
    messages_that_take_memory,
    schedules_that_need_more_buffers,
    no_message_of_a_host_takes_the_network,
)

"""Mistakes of a transport that only NCCL's rules punish, planted one by one: each is found under the fake,
which shows that it keeps these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from fakes.nccl import FakeNetwork, run
from fakes.nccl_world import Deadlock, RuleBroken
from nccl_cases import (
    Scale,
    Through,
    Turn,
    assert_as_plain,
    batch,
    large_messages,
    layers,
    mse_loss,
    pipeline_on,
    steps_of,
)
from torch import Tensor, nn

from gpipe_bench.pipeline import Action, ActionError, Schedule, gpipe, named, one_f_one_b
from gpipe_bench.pipeline.ranks import connect
from gpipe_bench.pipeline.ranks.control import Control
from gpipe_bench.pipeline.ranks.ends import MessageSpec, Progress, Receiver, Sender
from gpipe_bench.pipeline.ranks.failure import FailureDetector
from gpipe_bench.pipeline.ranks.shared_memory import Holders

Case = Callable[[], None]
Fault = Callable[[], AbstractContextManager[Any]]


def trains(schedule: Schedule, made: Callable[[], list[nn.Module]], width: int = 3, **options: Any) -> Case:
    """Some steps on every rank are exact, with rings as tight as for large messages."""

    def case() -> None:
        data = batch(schedule.num_microbatches, width)
        with large_messages():
            found = run(schedule.num_workers, steps_of(schedule, made, data, **options))
        assert_as_plain(found, made, data)

    return case


def waits_for_device(where: str) -> Callable[..., Any]:
    """The rank of the action waits for its whole device before it."""

    def of_rank(network: FakeNetwork, pipeline: nn.Module) -> Any:
        @contextmanager
        def observe(action: Action) -> Iterator[None]:
            if str(action) == where:
                network.synchronize()
            yield

        return observe

    return of_rank


def a_rank_fails_before_the_first_message() -> None:
    """The last rank has no target: it raises in its first step, and rank 1 has yet to send it anything."""

    def take(network: FakeNetwork) -> str:
        pipeline = pipeline_on(network, gpipe(3, 2), layers(3))
        inputs, target = batch(2)
        with pytest.raises((ActionError, ValueError)) as caught:
            pipeline.step(inputs, target[:1], mse_loss)
        return str(caught.value)

    found = run(3, take)
    assert all("the target 1" in text for text in found), found


def closes_with_messages_on_the_way() -> None:
    def take(network: FakeNetwork) -> None:
        pipeline = pipeline_on(network, gpipe(2, 4), layers(2))

        @contextmanager
        def observe(action: Action) -> Iterator[None]:
            if str(action) == "0B3":
                network.sleep(50.0)
            yield

        pipeline.step(*batch(4), mse_loss, observe=observe)
        pipeline.close()

    run(2, take)


def patched(*patches: tuple[object, str, object]) -> Fault:
    def plant() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value))
        return stack

    return plant


def at_once() -> AbstractContextManager[Any]:
    """Receives are posted as soon as they have a slot."""
    calls = property(lambda self: 1 << 30, lambda self, value: None)
    return mock.patch.object(Progress, "calls", calls, create=True)


def early_repost() -> AbstractContextManager[Any]:
    """A slot is posted again when its message is taken, not when the stage is done with it, and nobody asks
    what still lives in it.
    """
    take, release = Receiver.take, Receiver.release

    def taken(self: Receiver, microbatch: int, action: Action) -> Any:
        found = take(self, microbatch, action)
        release(self, microbatch)
        return found

    return patched(
        (Receiver, "take", taken),
        (Receiver, "release", lambda self, microbatch: None),
        (Holders, "others", False),
    )()


def swapped_order() -> AbstractContextManager[Any]:
    """The second message of a way overtakes the first."""
    send, kept = Sender.send, {}

    def swap(self: Sender, *arguments: Any, **options: Any) -> None:
        number = kept.setdefault((self, "number"), 0)
        kept[self, "number"] += 1
        if len(arguments) < 3 or self._connection._channel == 0 or number > 1:  # the loss; hosts' frames
            send(self, *arguments, **options)
        elif number == 0:
            kept[self, "first"] = arguments, options
        else:
            send(self, *arguments, **options)
            first, with_options = kept[self, "first"]
            send(self, *first, **with_options)

    return patched((Sender, "send", swap))()


def freed_message() -> AbstractContextManager[Any]:
    """Nobody keeps a message that is on its way."""
    send = Sender.send

    def sent(self: Sender, *arguments: Any, **options: Any) -> None:
        send(self, *arguments, **options)
        self._queue.append(self._queue.pop()._replace(tensors=[]))

    return patched((Sender, "send", sent))()


def larger_spec() -> AbstractContextManager[Any]:
    """A receiver believes that messages are larger than they are."""
    receive = Control.receive

    def received(self: Control, *arguments: Any) -> Any:
        spec = receive(self, *arguments)
        if not isinstance(spec, MessageSpec):
            return spec
        tensors = tuple(
            tensor_spec and tensor_spec._replace(shape=(tensor_spec.shape[0] + 1, *tensor_spec.shape[1:]))
            for tensor_spec in spec.tensors
        )
        return spec._replace(tensors=tensors)

    return patched((Control, "receive", received))()


# Who waits for ever, of whom a rank notices after its timeout that its device does not move.
STUCK = (Deadlock, ActionError)


@dataclass(frozen=True)
class Planted:
    """`fault` makes `case`, which passes without it, end with one of `signs`."""

    case: Case
    fault: Fault
    signs: tuple[type[BaseException], ...]


PLANTED = {
    "early repost of a slot": Planted(
        trains(named("interleaved", 2, 4, remat="always"), lambda: layers(4)), early_repost, (AssertionError,)
    ),
    "a slot in which something lives is posted again": Planted(
        trains(gpipe(3, 4), lambda: [Scale(9), Through(), Scale(9)], 9),
        patched((Holders, "others", False)),
        (AssertionError,),
    ),
    "swapped order on one pair": Planted(
        trains(gpipe(2, 4), lambda: layers(2), num_steps=1), swapped_order, (AssertionError,)
    ),
    "activations and gradients in one queue": Planted(
        trains(one_f_one_b(3, 5), lambda: layers(3)),
        patched((connect, "connection_names", lambda s: {(False, True): "all", (True, False): "all"})),
        (*STUCK, AssertionError),
    ),
    "a receive of gpipe is posted before its producer's needs": Planted(
        trains(gpipe(4, 8), lambda: layers(4), observe=waits_for_device("0F5")),
        at_once,
        STUCK,
    ),
    "a receive of 1f1b is posted before its producer's needs": Planted(
        trains(one_f_one_b(4, 8), lambda: layers(4), observe=waits_for_device("1F2")),
        at_once,
        STUCK,
    ),
    "unequal sizes": Planted(trains(gpipe(2, 4), lambda: layers(2)), larger_spec, (RuleBroken,)),
    "no warm-up": Planted(
        a_rank_fails_before_the_first_message,
        patched((connect, "warm_up", lambda *arguments: None)),
        STUCK,
    ),
    "a message is freed before it has left": Planted(
        trains(gpipe(3, 4), lambda: layers(3)), freed_message, (RuleBroken,)
    ),
    "shut down with messages on the way": Planted(
        closes_with_messages_on_the_way,
        patched((connect.Session, "synchronize", lambda self: None)),
        (RuleBroken,),
    ),
    "types that NCCL has no name for": Planted(
        trains(gpipe(2, 4), lambda: [Turn(False), Turn(True)]),
        patched((connect, "NCCL_TYPES", None)),
        (ActionError, TypeError),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    planted = PLANTED[name]
    planted.case()
    with planted.fault(), pytest.raises(planted.signs):
        planted.case()


def test_a_step_that_ignores_the_notice_returns_garbage() -> None:
    """What the check at the end of a step keeps from the optimizer."""

    def take(network: FakeNetwork) -> Tensor | None:
        pipeline = pipeline_on(network, gpipe(2, 2), layers(2))
        pipeline.step(*batch(2), mse_loss)
        if network.rank == 1:
            network.world.kill(1)
        pipeline.step(*batch(2), mse_loss)
        (gradient, *_) = [parameter.grad for parameter in pipeline.parameters()]
        return gradient

    assert isinstance(run(2, take)[0], ActionError)
    with mock.patch.object(FailureDetector, "refuse_after_notice"):
        found = run(2, take)[0]
    assert isinstance(found, ActionError) or not torch.isfinite(found).all()

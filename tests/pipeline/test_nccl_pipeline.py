"""Pipelines over a network with NCCL's rules, with portals and without: exact, and without a wait that never
ends.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from covering import pairwise
from fakes.nccl import FakeNetwork, run
from fakes.nccl_world import Killed
from nccl_cases import (
    Scale,
    Through,
    Turn,
    assert_as_plain,
    batch,
    crossing,
    large_messages,
    layers,
    mse_loss,
    pipeline_on,
    skipping,
    steps_of,
    trains_exactly,
)
from torch import Tensor, nn

from gpipe_bench.pipeline import (
    NAMED,
    Action,
    ActionError,
    Pipeline,
    PortalSequential,
    Schedule,
    gpipe,
    named,
    one_f_one_b,
)
from gpipe_bench.pipeline.plan.remat import REMAT_MODES

MAKES = {"chain": layers, "skipping": skipping, "crossing": crossing}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", NAMED)
def test_gradients_are_exact(name: str, make: str) -> None:
    sizes = (1, 2, 4) if make == "chain" else (2, 4)  # a skip needs somewhere to go
    for num_workers, num_microbatches, remat in pairwise(sizes, (1, 5, 8), REMAT_MODES):
        trains_exactly(named(name, num_workers, num_microbatches, remat=remat), MAKES[make])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"])
def test_gradients_are_exact_where_memory_counts(name: str) -> None:
    """Messages in tight rings, and senders that wait for them."""
    with large_messages():
        for remat in ("never", "always"):
            for make in MAKES.values():
                trains_exactly(named(name, 3, 7, remat=remat), make)


@pytest.mark.parametrize("choose", [lambda number: number - 1, lambda number: number // 2])
@pytest.mark.parametrize("make", ["chain", "crossing"])
def test_gradients_are_exact_whoever_is_first(make: str, choose: Callable[[int], int]) -> None:
    trains_exactly(one_f_one_b(4, 6), MAKES[make], choose=choose)


# Waits for the whole device


def waiting(schedule: Schedule, make: str) -> Callable[[FakeNetwork], list[Tensor]]:
    """Steps in each of which one rank waits for its whole device before one of its actions: everywhere once.

    The outlines are learned in the first step, in which nobody waits.
    """
    rows = schedule.actions
    places = [(rank, i) for rank, row in enumerate(rows) for i in range(len(row))]

    def take(network: FakeNetwork) -> list[Tensor]:
        data, losses = batch(schedule.num_microbatches), []
        with pipeline_on(network, schedule, MAKES[make](schedule.num_stages)) as pipeline:
            for rank, i in [(-1, 0), *places]:

                @contextmanager
                def observe(action: Action, rank: int = rank, i: int = i) -> Iterator[None]:
                    if rank == network.rank and action == rows[rank][i]:
                        network.synchronize()
                    yield

                losses.append(pipeline.step(*data, mse_loss, observe=observe))
        return losses

    return take


@pytest.mark.parametrize(
    ("schedule", "tight", "make"),
    [
        (named("gpipe", 4, 8, remat="always"), True, "chain"),
        (named("gpipe", 4, 8, remat="always"), False, "crossing"),
        (named("1f1b", 4, 8, remat="always"), False, "chain"),
        (named("1f1b", 4, 8, remat="always"), True, "crossing"),
        (named("zb-v", 2, 4), False, "chain"),
        (named("interleaved", 2, 4), False, "crossing"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_wait_for_the_device_ends_at_every_action(schedule: Schedule, tight: bool, make: str) -> None:
    with large_messages() if tight else nullcontext():
        found = run(schedule.num_workers, waiting(schedule, make))
    assert {len(losses) for losses in found} == {len(list(schedule)) + 1}
    assert all(torch.equal(loss, found[0][0]) for losses in found for loss in losses)


def test_evaluation_and_training_take_turns() -> None:
    schedule, data = one_f_one_b(4, 6), batch(6)

    def take(network: FakeNetwork) -> list[Tensor]:
        found = []
        with pipeline_on(network, schedule, crossing(4)) as pipeline:
            for _ in range(2):
                output = pipeline(data[0] if network.rank == 0 else None)
                found += [] if output is None else [output]
                pipeline.step(*data, mse_loss)
        return found

    wanted = PortalSequential(*crossing(4))(data[0])
    outputs = run(4, take)
    assert outputs[:3] == [[]] * 3
    for output in outputs[3]:
        torch.testing.assert_close(output, wanted.detach(), rtol=1e-12, atol=1e-14)


# Messages that live on in the memory they came into


@pytest.mark.parametrize("between", [Through, nn.Flatten])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_stages_that_pass_on_what_they_received(
    make: Callable[..., Schedule], between: Callable[[], nn.Module]
) -> None:
    """Messages of more than 256 KiB, so that every stage has one buffer for gradients."""
    width = 2**14 + 1  # twice, in float64
    made = lambda: [Scale(width), between(), Scale(width)]  # noqa: E731
    data = batch(4, width)
    for remat in ("never", "always"):
        assert_as_plain(run(3, steps_of(make(3, 4, remat=remat), made, data)), made, data)


def test_types_that_nccl_has_no_name_for() -> None:
    made, data = (lambda: [Turn(False), Turn(True)]), batch(4)
    assert_as_plain(run(2, steps_of(gpipe(2, 4), made, data)), made, data)


# Ranks that do not come, or go


def test_a_rank_that_never_meets_the_others_ends_them_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has connected to the hosts, and stops before it says a word on the device."""

    def build(network: FakeNetwork) -> float:
        if network.rank == 2:
            monkeypatch.setattr(network, "bounded", lambda *arguments: network.sleep(1e4))
        began_s = network.now()
        with pytest.raises(ActionError, match=r"rank [12] did not answer: "):
            pipeline_on(network, gpipe(3, 2), layers(3), timeout_s=30.0)
        return network.now() - began_s

    found = run(3, build)
    assert all(taken_s < 35.0 for taken_s in found[:2])


def test_a_rank_that_fails_before_it_meets_the_others_is_the_one_to_blame() -> None:
    def build(network: FakeNetwork) -> float:
        if network.rank == 1:
            network.bounded = lambda *arguments: (_ for _ in ()).throw(MemoryError("no memory for NCCL"))
        began_s = network.now()
        with pytest.raises((ActionError, MemoryError), match="no memory for NCCL"):
            pipeline_on(network, gpipe(3, 2), layers(3), timeout_s=600.0)
        return network.now() - began_s

    assert max(run(3, build)) < 10.0


@pytest.mark.parametrize(
    ("schedule", "make", "pairs"),
    [
        # Two neighbours, in each of two directions activations and gradients, and the loss.
        (named("zb-v", 3, 4), "chain", 2 * 5),
        # Three neighbours with activations and gradients, and two lines there and back.
        (gpipe(4, 4), "crossing", 3 * 2 + 2 * 2),
    ],
)
def test_the_first_message_of_a_step_waits_for_no_host(schedule: Schedule, make: str, pairs: int) -> None:
    """All communicators are made when the pipeline is."""

    def take(network: FakeNetwork) -> int:
        def made() -> list[Any]:
            shared = network.world.shared
            return [pair for key, found in shared.items() if key[0] == "pairs" for pair in found.values()]

        with pipeline_on(network, schedule, MAKES[make](schedule.num_stages)) as pipeline:
            before = made()
            assert all(len(pair.joined) == 2 for pair in before)
            pipeline.step(*batch(4), mse_loss)
            pipeline(batch(4)[0])
            assert len(made()) == len(before)
        return len(before)

    assert run(schedule.num_workers, take) == [pairs] * schedule.num_workers


def test_a_killed_rank_is_missed() -> None:
    schedule = gpipe(3, 4)

    def take(network: FakeNetwork) -> tuple[str, float]:
        with pipeline_on(network, schedule, layers(3), timeout_s=60.0) as pipeline:
            pipeline.step(*batch(4), mse_loss)
            began_s = network.now()

            @contextmanager
            def observe(action: Action) -> Iterator[None]:
                if str(action) == "1B2":
                    network.world.kill(network.rank)
                yield

            with pytest.raises(ActionError) as caught:
                pipeline.step(*batch(4), mse_loss, observe=observe)
            return str(caught.value), network.now() - began_s

    found = run(3, take)
    assert isinstance(found[1], Killed)
    for text, taken_s in (found[0], found[2]):
        assert "rank 1 did not answer: a device has waited for 60 s" in text
        assert taken_s < 65.0


@pytest.mark.parametrize("where", ["1F2", "1B1"])
def test_a_rank_that_stops_is_named_in_time(where: str) -> None:
    """It lives, and gives its signs of life; the others' devices wait for it, behind their hosts."""

    def take(network: FakeNetwork) -> tuple[str, float]:
        pipeline = pipeline_on(network, gpipe(3, 4), layers(3), timeout_s=30.0)
        pipeline.step(*batch(4), mse_loss)
        network.sleep(100.0)  # nothing is awaited between two steps
        pipeline.step(*batch(4), mse_loss)
        began_s = network.now()

        @contextmanager
        def observe(action: Action) -> Iterator[None]:
            if str(action) == where:
                network.sleep(150.0)
            yield

        def take_steps() -> None:
            for _ in range(2):
                pipeline.step(*batch(4), mse_loss, observe=observe)

        with pytest.raises(ActionError) as caught:
            take_steps()
        return str(caught.value), network.now() - began_s

    found = run(3, take)
    for text, _ in found:
        assert "on rank 1 failed: rank 1 did not answer: a device has waited for 30 s" in text
    assert all(found[rank][1] < 35.0 for rank in (0, 2))


def test_a_rank_that_leaves_in_good_order_is_not_missed() -> None:
    """The others go on for longer than a rank may be silent, and one of them still fails loudly."""

    def take(network: FakeNetwork) -> bool:
        pipeline = pipeline_on(network, gpipe(3, 2), layers(3))
        pipeline.step(*batch(2), mse_loss)
        if network.rank == 1:
            pipeline.close()
        network.sleep(150.0)
        pipeline.close()
        return "failure" in network.world.shared["store", 1]

    assert run(3, take) == [False] * 3


def failing(schedule: Schedule, where: str, when: str) -> Callable[[FakeNetwork], str]:
    """A step in which a layer fails, or of which a rank learns that another has failed."""

    def take(network: FakeNetwork) -> str:
        pipeline = pipeline_on(network, schedule, layers(schedule.num_stages))
        pipeline.step(*batch(schedule.num_microbatches), mse_loss)

        @contextmanager
        def observe(action: Action) -> Iterator[None]:
            if when == "before" and str(action) == where:
                raise OSError("out of order")
            yield
            if when == "after" and str(action) == where:
                network.world.shared["store", 1]["failure"] = b'{"action": "0F0", "rank": 0, "cause": "told"}'
                network.sleep(1.0)

        def take_steps() -> None:
            # A rank whose step was over before it could know learns of it in the next one.
            late = when == "after" and str(network.rank) != where[0]
            for _ in range(1 + late):
                pipeline.step(*batch(schedule.num_microbatches), mse_loss, observe=observe)

        with pytest.raises((ActionError, OSError)) as caught:
            take_steps()
        with pytest.raises(RuntimeError, match="has failed before"):
            pipeline.step(*batch(schedule.num_microbatches), mse_loss)
        return str(caught.value)

    return take


@pytest.mark.parametrize("where", ["0F3", "1B2", "2F0", "2B0"])
def test_a_failure_ends_the_step_on_every_rank(where: str) -> None:
    found = run(3, failing(gpipe(3, 4), where, "before"))
    assert all(
        text == f"action {where} on rank {where[0]} failed: OSError: out of order" for text in found
    ), found


@pytest.mark.parametrize("where", ["0B0", "1B0", "2B0"])
def test_what_is_noticed_between_the_last_receive_and_the_end_raises(where: str) -> None:
    for text in run(3, failing(gpipe(3, 4), where, "after")):
        assert text == "action 0F0 on rank 0 failed: told"


# The end


def test_closing_waits_until_everything_has_left() -> None:
    """Rank 1 closes at once; rank 0 takes the last gradients and the loss much later."""

    def take(network: FakeNetwork) -> Tensor:
        pipeline = pipeline_on(network, gpipe(2, 4), layers(2))
        data = batch(4)

        @contextmanager
        def observe(action: Action) -> Iterator[None]:
            if network.rank == 0 and str(action) == "0B1":
                network.sleep(50.0)
            yield

        loss = pipeline.step(*data, mse_loss, observe=observe)
        pipeline.close()
        pipeline.close()
        with pytest.raises(RuntimeError, match="this pipeline is closed"):
            pipeline.step(*data, mse_loss)
        return loss

    first, second = run(2, take)
    assert torch.equal(first, second)


def test_a_pipeline_that_is_dropped_closes_by_itself() -> None:
    def take(network: FakeNetwork) -> bool:
        pipeline = pipeline_on(network, gpipe(2, 2), layers(2))
        pipeline.step(*batch(2), mse_loss)
        gone = weakref.ref(pipeline)
        del pipeline
        gc.collect()
        return gone() is None

    assert run(2, take) == [True, True]


def test_a_pipeline_in_one_process_can_be_closed_too() -> None:
    with Pipeline(layers(2), num_stages=2, num_microbatches=2, cost=[1, 1]) as pipeline:
        pipeline.step(*batch(2), mse_loss)

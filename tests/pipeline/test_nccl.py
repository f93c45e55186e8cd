"""Pipelines over NCCL, without a GPU: under its rules (`fakes.nccl`) training is exact, every wait ends, and
ranks that do not come, stop or go are named; and what a rank asks of the real one.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fakes.nccl import FakeNetwork, Killed, run
from random_schedules import HELD_UP, LATE_WEIGHTS, random_placement, random_schedule
from torch import Tensor, nn

from gpipe_bench.pipeline import (
    NAMED,
    Action,
    ActionError,
    Pipeline,
    Pop,
    PortalSequential,
    Schedule,
    Stash,
    gpipe,
    named,
)
from gpipe_bench.pipeline.errors import PeerError
from gpipe_bench.pipeline.ranks import ends
from gpipe_bench.pipeline.ranks.failure import nccl_options
from gpipe_bench.pipeline.ranks.wire import DeviceWaits, unreachable

WIDTH = 3
mse_loss = nn.functional.mse_loss
Make = Callable[[int], list[nn.Module]]


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(pair[0]).tanh() + pair[1] * pair[0]


class Turn(nn.Module):
    """To complex numbers and back, and numbers of a type that NCCL has no name for."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.back = back
        self.weight = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, inputs: Any) -> Any:
        if self.back:
            turned, small = inputs
            return turned.real * self.weight + turned.imag * small
        return torch.complex(inputs, inputs * self.weight).conj(), torch.ones(len(inputs), 1).to(torch.int16)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


def tanh() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def chain(num_stages: int) -> list[nn.Module]:
    """A layer for each stage."""
    torch.manual_seed(0)
    return [tanh().double() for _ in range(num_stages)]


def skipping(num_stages: int) -> list[nn.Module]:
    """The first one's output goes to all others, and each skips one, too."""
    torch.manual_seed(0)
    return [Stash("first", tanh()).double(), *(Pop("first", Add()).double() for _ in range(num_stages - 1))]


def crossing(num_stages: int) -> list[nn.Module]:
    """Skips one within the other, as in a U-Net: from stage k to the one as far from the end."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for stage in range(num_stages):
        mirrored = num_stages - 1 - stage
        layer = tanh() if stage <= mirrored else Pop(f"skip {mirrored}", Add())
        made.append((Stash(f"skip {stage}", layer) if stage < mirrored else layer).double())
    return made


def passing(num_stages: int) -> list[nn.Module]:
    """Stages between the first and the last pass on what they received, as it is or as a view."""
    return [Scale(), *(nn.Identity() if k % 2 else nn.Flatten() for k in range(num_stages - 2)), Scale()]


def turning(num_stages: int) -> list[nn.Module]:
    return [Turn(back=False), Turn(back=True)]


def batch(num_microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(2, 2 * num_microbatches, WIDTH, generator=generator, dtype=torch.float64)
    return made[0], made[1]


def tight() -> Any:
    """Every message is one whose memory counts, so that rings are small and senders wait."""
    return mock.patch.object(ends, "SMALL_BYTES", 0)


def pipeline_on(network: FakeNetwork, schedule: Schedule, make: Make = chain, **options: Any) -> Pipeline:
    made = make(schedule.num_stages)
    return Pipeline(
        made, num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches, schedule=schedule,
        group=network, **{"cost": [1] * len(made), "timeout_s": 100.0, **options},
    )  # fmt: skip


def take_step(pipeline: Pipeline, observe: Any = None) -> Tensor:
    return pipeline.step(*batch(pipeline.schedule.num_microbatches), mse_loss, observe=observe)


def before(where: str, do: Callable[[], object]) -> Callable[[Action], Any]:
    """An observer that does something before an action."""

    @contextmanager
    def observe(action: Action) -> Iterator[None]:
        if str(action) == where:
            do()
        yield

    return observe


def trains_exactly(schedule: Schedule, make: Make = chain) -> None:
    """The loss on every rank, every parameter's gradient and the output equal the plain model's."""
    inputs, target = batch(schedule.num_microbatches)

    def take(network: FakeNetwork) -> tuple[Any, ...]:
        with pipeline_on(network, schedule, make) as pipeline:
            for _ in range(2):
                pipeline.zero_grad()
                loss = take_step(pipeline)
                output = pipeline(inputs)
        return loss, output, {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    plain = PortalSequential(*make(schedule.num_stages))
    expected = plain(inputs)
    mse_loss(expected, target).backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    seen, outputs = set(), 0
    found = run(schedule.num_workers, take)
    raise_any(found)
    for loss, output, gradients in found:
        torch.testing.assert_close(loss, mse_loss(expected, target).detach(), rtol=1e-12, atol=1e-14)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-14)
            seen.add(name)
        if output is not None:
            outputs += 1
            torch.testing.assert_close(output, expected.detach(), rtol=1e-12, atol=1e-14)
    assert (seen, outputs) == (set(wanted), 1)


@pytest.mark.parametrize(
    ("name", "workers", "number", "remat", "make", "small"),
    [
        ("gpipe", 4, 8, "always", chain, False),
        ("gpipe", 3, 4, "never", passing, True),
        ("1f1b", 4, 5, "never", crossing, True),
        ("1f1b", 4, 6, "always", passing, True),
        ("zb-h1", 3, 7, "except_last", skipping, True),
        ("interleaved", 2, 4, "always", crossing, False),
        ("interleaved", 2, 4, "always", chain, True),
        ("zb-v", 3, 7, "never", chain, True),
        ("v-min", 2, 5, "always", skipping, False),
        ("breadth-first", 2, 8, "never", skipping, True),
        ("dualpipe-v", 2, 8, "except_last", crossing, False),
        ("gpipe", 2, 4, "never", turning, False),  # bytes of types that it has no name for
        ("naive", 1, 1, "never", chain, False),
    ],
)
def test_training_is_exact(name: str, workers: int, number: int, remat: str, make: Make, small: bool) -> None:
    with tight() if small else nullcontext():
        trains_exactly(named(name, workers, number, remat=remat), make)


def waited_for() -> dict[str, tuple[Schedule, Make, bool]]:
    """Named schedules, those in which a stage keeps longer what it receives, some that nobody would write."""
    generator = random.Random(2)
    found: list[tuple[Schedule, Make, bool]] = [
        *((named(name, 2, 4, remat="always"), chain, True) for name in NAMED),
        (named("gpipe", 3, 6, remat="always"), chain, True), (named("zb-v", 2, 4), chain, False),
        (named("1f1b", 4, 6, remat="always"), crossing, True), (named("interleaved", 2, 4), crossing, False),
        (LATE_WEIGHTS, chain, True), (HELD_UP, chain, True),
    ]  # fmt: skip
    while len(found) < 40:
        num_stages = generator.randint(2, 5)
        placement = random_placement(generator, num_stages)
        found.append((random_schedule(generator, num_stages, 3, placement=placement), chain, True))
    return {f"{number} {each[0].name}": each for number, each in enumerate(found)}


WAITED_FOR = waited_for()


@pytest.mark.parametrize("name", WAITED_FOR)
def test_a_wait_for_the_device_ends_at_every_action(name: str) -> None:
    """One rank waits for its whole device before one of its actions: everywhere once."""
    schedule, make, small = WAITED_FOR[name]

    def take(network: FakeNetwork) -> list[Tensor]:
        with pipeline_on(network, schedule, make) as pipeline:
            losses = [take_step(pipeline)]  # in which forms are learned, and nobody waits
            for rank, row in enumerate(schedule.actions):
                wait = network.synchronize if rank == network.rank else lambda: None
                losses += [take_step(pipeline, before(str(action), wait)) for action in row]
        return losses

    with tight() if small else nullcontext():
        found = run(schedule.num_workers, take)
    assert {len(losses) for losses in found} == {len(list(schedule)) + 1}
    assert all(torch.equal(loss, found[0][0]) for losses in found for loss in losses)


def raise_any(found: Sequence[Any]) -> None:
    for each in found:
        if isinstance(each, BaseException):
            raise each


# Ranks that do not come, or go


def test_a_rank_that_never_meets_the_others_ends_them_in_time() -> None:
    """It has connected to the hosts, and stops before it says a word on the device; or it fails there."""

    def build(network: FakeNetwork, how: Callable[[FakeNetwork], Any]) -> tuple[str, float]:
        if network.rank == 2:
            network.bounded = lambda *arguments: how(network)  # type: ignore[method-assign]
        began_s = network.now()
        with pytest.raises((ActionError, MemoryError)) as caught:
            pipeline_on(network, gpipe(3, 2), timeout_s=30.0)
        return str(caught.value), network.now() - began_s

    def fail(network: FakeNetwork) -> None:
        raise MemoryError("no memory for NCCL")

    for text, taken_s in run(3, lambda network: build(network, lambda network: network.sleep(1e4)))[:2]:
        assert " did not answer: " in text
        assert taken_s < 35.0
    for text, taken_s in run(3, lambda network: build(network, fail)):
        assert "no memory for NCCL" in text
        assert taken_s < 10.0


def test_the_first_message_of_a_step_waits_for_no_host() -> None:
    """All communicators are made when the pipeline is: three neighbours with activations and gradients."""
    schedule = gpipe(4, 4)

    def take(network: FakeNetwork) -> int:
        def made() -> list[Any]:
            shared = network.world.shared
            return [pair for key, found in shared.items() if key[0] == "pairs" for pair in found.values()]

        with pipeline_on(network, schedule) as pipeline:
            there = made()
            assert all(len(pair.joined) == 2 for pair in there)
            take_step(pipeline)
            assert len(made()) == len(there)
        return len(there)

    assert run(4, take) == [3 * 2] * 4


def ended(end: Callable[[FakeNetwork], object], where: str, timeout_s: float) -> list[Any]:
    """What each of three ranks says, and when, of a rank that ends so before an action of its third step."""

    def take(network: FakeNetwork) -> tuple[str, float]:
        pipeline = pipeline_on(network, gpipe(3, 4), timeout_s=timeout_s)
        take_step(pipeline)
        network.sleep(100.0)  # nothing is awaited between two steps
        take_step(pipeline)
        began_s = network.now()

        def take_two() -> None:  # whose step was over before it could know learns of it in the next one
            for _ in range(2):
                take_step(pipeline, before(where, lambda: end(network)))

        with pytest.raises((ActionError, OSError)) as caught:
            take_two()
        with pytest.raises(RuntimeError, match="has failed before"):
            take_step(pipeline)
        return str(caught.value), network.now() - began_s

    return run(3, take)


def test_a_killed_rank_is_missed() -> None:
    found = ended(lambda network: network.world.kill(network.rank), "1B2", 60.0)
    assert isinstance(found[1], Killed)
    for text, taken_s in (found[0], found[2]):
        assert "on rank 1 failed: rank 1 " in text
        assert taken_s < 65.0


@pytest.mark.parametrize("where", ["1F2", "1B1"])
def test_a_rank_that_stops_is_named_in_time(where: str) -> None:
    """It lives; the others' devices wait for it, behind their hosts."""
    found = ended(lambda network: network.sleep(150.0), where, 30.0)
    for text, _ in found:
        assert "on rank 1 failed: rank 1 did not answer: a device has waited for 30 s" in text
    assert all(found[rank][1] < 35.0 for rank in (0, 2))


@pytest.mark.parametrize("where", ["0F3", "1B2", "2F0"])
def test_a_failure_ends_the_step_on_every_rank(where: str) -> None:
    def fail(network: FakeNetwork) -> None:
        raise OSError("out of order")

    wanted = f"action {where} on rank {where[0]} failed: OSError: out of order"
    assert {text for text, _ in ended(fail, where, 100.0)} == {wanted}


def test_what_is_noticed_between_the_last_receive_and_the_end_raises() -> None:
    """A connection that is cut ends the waits with garbage, which no optimizer may take."""

    def tell(network: FakeNetwork) -> None:
        told = b'{"action": "0F0", "rank": 0, "cause": "told"}'
        network.world.shared["store", 1]["failure"] = told
        network.sleep(1.0)

    assert {text for text, _ in ended(tell, "0B0", 100.0)} == {"action 0F0 on rank 0 failed: told"}


def test_a_pipeline_that_is_dropped_goes() -> None:
    """Though it was not closed."""

    def take(network: FakeNetwork) -> bool:
        pipeline = pipeline_on(network, gpipe(2, 2))
        take_step(pipeline)
        gone = weakref.ref(pipeline)
        del pipeline
        gc.collect()
        return gone() is None

    assert run(2, take) == [True, True]


# What is asked of the real one, and how ranks meet

DUPLICATE = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000
"""


@pytest.mark.parametrize(
    ("text", "cause", "timed_out"),
    [
        (DUPLICATE, f"rank 2 is not reached by NCCL: {DUPLICATE.splitlines()[-1]}", False),
        ("[place.cc:3] Timed out waiting 20ms", "rank 2 did not answer: Timed out waiting 20ms", True),
        ("[place.cc:3] Closed by peer. This is typically", "rank 2 disappeared: Closed by peer", False),
        ("", "rank 2 disappeared: RuntimeError", False),
    ],
)
def test_of_what_a_network_says_the_last_line_is_kept(text: str, cause: str, timed_out: bool) -> None:
    found = unreachable(None, 2, RuntimeError(text))
    assert (found.cause, found.timed_out) == (cause, timed_out)


@pytest.mark.parametrize("config", [SimpleNamespace(max_ctas=None), SimpleNamespace(), None])
def test_messages_take_few_thread_blocks_where_torch_can_say_so(config: object) -> None:
    """Sums as many as they like; and NCCL's watchdog, which ends the process, is to give up on neither."""
    made = SimpleNamespace() if config is None else SimpleNamespace(config=config)
    nccl = SimpleNamespace(Options=lambda *, is_high_priority_stream: made)
    assert nccl_options(nccl, sums=True)._timeout > timedelta(days=365)
    assert getattr(config, "max_ctas", None) is None
    assert nccl_options(nccl, sums=False)._timeout > timedelta(days=365)
    assert getattr(config, "max_ctas", 4) == 4


def test_a_device_that_stands_still_is_told_from_one_that_is_slow_or_did_not_run() -> None:
    """Each look is half a second after the one before."""
    clock = SimpleNamespace(now_s=0.0, given=0, reached=0)

    def mark() -> Any:
        clock.given += 1
        return SimpleNamespace(query=lambda number=clock.given: clock.reached >= number)

    waits = DeviceWaits(lambda: clock.now_s)
    waits.begin(mark)

    def look(times: int) -> list[PeerError | None]:
        found = []
        for _ in range(times):
            clock.now_s += 0.5
            found.append(waits.overdue(10.0))
        return found

    with waits.waiting(Action.parse("1F2"), 1):
        pass
    waits.note()
    assert look(20) == [None] * 20
    clock.reached = 1  # the next mark has its own time
    clock.now_s += 1000.0  # in which this process did not run
    assert look(18) == [None] * 18
    late = next(filter(None, look(6)))
    assert (late.action, late.peer, late.timed_out) == (None, None, True)
    clock.reached = 2
    assert look(100) == [None] * 100, "nothing is awaited"

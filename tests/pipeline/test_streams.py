"""Stages on devices of their own: pretended devices, whose streams take notes (`fakes.streams`).

What can only go wrong on a GPU, and there only now and then, is looked for here in every step: a use of
memory without a wait, memory given back too early, a host that waits. The same notes tell how long a schedule
takes when nothing but its waits holds it up. Whether what looks can see at all is shown by faults that are
planted in what it looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.streams import TYPE, FakeAccelerator, FakeStream, Kind
from tiny_models import everything, everything_batch, mlp, mlp_batch, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import (
    NAMED,
    SLOTS,
    Action,
    InProcess,
    Pipeline,
    Schedule,
    clock,
    devices,
    named,
    replay,
)
from gpipe_bench.pipeline.arguments import devices_of
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.named import SCHEDULES

mse_loss = nn.functional.mse_loss


def slots(action: Action) -> float:
    return SLOTS[action.kind]


def pipeline_of(fake: FakeAccelerator, schedule: Schedule, layers: nn.Module, **options: Any) -> Pipeline:
    """On as many devices as the schedule has workers."""
    places = [fake.devices[schedule.worker(stage)] for stage in range(schedule.num_stages)]
    return Pipeline(
        layers,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule,
        num_workers=schedule.num_workers,
        devices=places,
        **options,
    )


def two_steps(fake: FakeAccelerator, pipeline: Pipeline, batch: Any = None, loss: Any = mse_loss) -> None:
    """One that may wait, for what it has to find out once, and one that must not."""
    batch, target = batch or mlp_batch(2 * pipeline.schedule.num_microbatches)
    pipeline.step(batch, target, loss)
    fake.history.restart_time()
    with fake.history.step():
        pipeline.step(batch, target, loss, observe=fake.observe)


# What holds


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_devices_wait_for_nothing_but_what_they_receive(name: str) -> None:
    """As far as the waits go, the schedule takes no longer than on paper."""
    schedule = SCHEDULES[name](4, 32, remat="always")
    fake, on_paper = FakeAccelerator(4, slots), replay(schedule, SLOTS).makespan_s
    with fake.opened():
        two_steps(fake, pipeline_of(fake, schedule, seeded(mlp)))
    assert on_paper <= fake.history.makespan <= on_paper + 4


@pytest.mark.parametrize("name", NAMED)
def test_every_use_of_memory_is_ordered_and_the_host_never_waits(name: str) -> None:
    for num_workers in (1, 2, 4):
        for num_microbatches in (1, 4, 8):
            schedule = named(name, num_workers, num_microbatches, remat="except_last")
            fake = FakeAccelerator(num_workers)
            with fake.opened():
                two_steps(fake, pipeline_of(fake, schedule, seeded(mlp)))
            found = "\n".join(map(str, fake.history.faults))
            assert not found, f"K={num_workers}, M={num_microbatches}:\n{found}"
            assert fake.history.num_checked > 20 * len(schedule.actions)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_the_numbers_are_those_of_one_device(schedule: str) -> None:
    """Tuples, integers, skips, a tensor twice, dropout and batch normalization, from device to device."""
    batch, target = everything_batch(6)
    options = {"num_stages": 3, "num_microbatches": 3, "schedule": schedule}
    alone, fake = Pipeline(seeded(everything), **options), FakeAccelerator(3)
    with fake.opened():
        apart = Pipeline(seeded(everything), devices=fake.devices, **options)
        two_steps(fake, apart, (batch, target), nn.functional.cross_entropy)
        output = apart(batch)
        assert output.device == fake.devices[2]
        assert not fake.history.faults
    for _ in range(2):
        alone.step(batch, target, nn.functional.cross_entropy)
    for (name, ours), wanted in zip(apart.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, wanted.grad), name
    assert torch.equal(alone(batch), output)


def test_a_stage_on_the_cpu_waits_for_what_it_receives() -> None:
    """It is the host that computes there, so that it has to; nothing is read before it has arrived."""
    fake = FakeAccelerator(1)
    schedule = SCHEDULES["1f1b"](2, 4, remat="always")
    with fake.opened():
        pipeline = Pipeline(
            seeded(mlp), num_stages=2, num_microbatches=4, schedule=schedule, devices=[fake.devices[0], "cpu"]
        )
        two_steps(fake, pipeline)
        assert len(pipeline.timeline.events) == len(list(schedule))
    assert {fault.kind for fault in fake.history.faults} == {Kind.HOST_WAIT}


class NamesNoDevice(nn.Module):
    """Asks for the accelerator without saying which."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(x.shape[-1], dtype=x.dtype, device=TYPE)


def test_a_layer_that_names_no_device_works_on_its_stages() -> None:
    fake = FakeAccelerator(2)
    layers = nn.Sequential(nn.Linear(6, 6), NamesNoDevice(), nn.Linear(6, 6), NamesNoDevice()).double()
    with fake.opened():
        two_steps(fake, pipeline_of(fake, SCHEDULES["gpipe"](2, 2, remat="always"), layers))
    assert not fake.history.faults


def test_a_device_that_is_behind_does_not_shift_the_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device begins 50 ms late, because it has other work to do: its actions must show it."""
    fake = FakeAccelerator(2, slots)
    history = fake.history
    monkeypatch.setattr(clock.time, "perf_counter_ns", lambda: int(history.host_time * 1e6))
    schedule = SCHEDULES["gpipe"](2, 2, remat="never")
    with fake.opened():
        pipeline = pipeline_of(fake, schedule, seeded(mlp))
        pipeline.step(*mlp_batch(4), mse_loss)
        fake.synchronize(fake.devices[0])
        begin_ms = history.host_time
        history.operation(fake.current_stream(fake.devices[1]).name, "other work", cost=50)
        pipeline.step(*mlp_batch(4), mse_loss, observe=fake.observe)
        events = {event.action: event for event in pipeline.timeline.events}
        assert pipeline.timeline.events == pipeline.timeline.events, "asking again gives the same"
    starts_ms = {str(action): event.start_s * 1e3 - begin_ms for action, event in events.items()}
    assert starts_ms["0F0"] == pytest.approx(0, abs=1e-6)
    assert starts_ms["0F1"] == pytest.approx(1, abs=1e-6)
    assert starts_ms["1F0"] == pytest.approx(50, abs=1e-6)
    assert starts_ms["0B1"] == pytest.approx(54, abs=1e-6)


# What the notes find: each of these faults is planted, and must be found


def _no_wait_at_receive(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
    patch.setattr(FakeStream, "wait_event", lambda stream, event: None)


def _device_wide_wait(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
    receive = InProcess.receive

    def waiting(transport: InProcess, edge: Edge, microbatch: int) -> Any:
        devices.synchronize(fake.devices[0])
        return receive(transport, edge, microbatch)

    patch.setattr(InProcess, "receive", waiting)


def _no_device_guard(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
    patch.setattr("gpipe_bench.pipeline.step.Steps._on_their_devices", lambda self, observe: observe)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch, FakeAccelerator], None], Kind]] = {
    "no wait at receive": (_no_wait_at_receive, Kind.READ),
    "a wait for a whole device": (_device_wide_wait, Kind.HOST_WAIT),
    "no device guard": (_no_device_guard, Kind.DEVICES),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, kind = PLANTED[name]
    fake = FakeAccelerator(2)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), NamesNoDevice()).double()
    with fake.opened():
        pipeline = pipeline_of(fake, SCHEDULES["1f1b"](2, 4, remat="always"), layers)
        plant(monkeypatch, fake)
        two_steps(fake, pipeline)
    assert kind in {fault.kind for fault in fake.history.faults}


def test_layers_without_parameters_go_where_the_rest_of_the_model_is() -> None:
    """A rank that has none of them opens the same connections as the others."""
    layers = [nn.Linear(2, 2, device="meta"), nn.ReLU()]
    assert devices_of(None, 2, layers[1:], layers) == (torch.device("meta"),) * 2
    assert devices_of(None, 2, layers[1:], layers[1:]) == (torch.device("cpu"),) * 2

"""Stages on devices of their own: pretended devices, whose streams take notes (`fakes.streams`).

What can only go wrong on a GPU, and there only now and then, is looked for here in every step: a use of
memory without a wait, memory given back too early, a host that waits. The same notes tell how long a schedule
takes when nothing but its waits holds it up. Whether what looks can see at all is shown by faults that are
planted in what it looks at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fakes.calls import TYPE
from fakes.happens_before import Kind
from fakes.queues import FakeEvent, FakeStream
from fakes.streams import FakeAccelerator
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


def gradients(pipeline: Pipeline) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in pipeline.named_parameters() if p.grad is not None}


# What holds


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_devices_wait_for_nothing_but_what_they_receive(name: str) -> None:
    """As far as the waits go, the schedule takes no longer than on paper."""
    schedule = SCHEDULES[name](4, 32, remat="always")
    fake = FakeAccelerator(4, slots)
    with fake.opened():
        two_steps(fake, pipeline_of(fake, schedule, seeded(mlp)))
    assert (
        replay(schedule, SLOTS).makespan_s <= fake.history.makespan <= replay(schedule, SLOTS).makespan_s + 4
    )


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
    alone = Pipeline(seeded(everything), **options)
    losses = [alone.step(batch, target, nn.functional.cross_entropy) for _ in range(2)]
    fake = FakeAccelerator(3)
    with fake.opened():
        apart = Pipeline(seeded(everything), devices=fake.devices, **options)
        two_steps(fake, apart, (batch, target), nn.functional.cross_entropy)
        again = apart.step(batch, target, nn.functional.cross_entropy)
        output = apart(batch)
        assert again.device == output.device == fake.devices[2]
    assert not fake.history.faults
    alone.step(batch, target, nn.functional.cross_entropy)
    assert len(losses) == 2
    for name, gradient in gradients(alone).items():
        assert torch.equal(gradients(apart)[name], gradient), name
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


def test_a_batch_that_is_on_a_device_is_taken_from_there() -> None:
    """On the device of the stage as it is, from another device like a message."""
    schedule = SCHEDULES["gpipe"](2, 4, remat="always")
    for home in (0, 1):
        fake = FakeAccelerator(2)
        with fake.opened():
            batch, target = (tensor.to(fake.devices[home]) for tensor in mlp_batch(8))
            two_steps(fake, pipeline_of(fake, schedule, seeded(mlp)), (batch, target))
        assert not fake.history.faults


def test_a_micro_batch_lives_no_longer_than_its_backward() -> None:
    """All inputs are sent at once, but 1F1B is done with the first ones early."""
    fake = FakeAccelerator(2)
    alive: list[int] = []
    taken: list[weakref.ref[Any]] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            taken.append(weakref.ref(x.untyped_storage()))
            alive.append(sum(reference() is not None for reference in taken))
            return x

    layers = nn.Sequential(Look(), nn.Linear(6, 6), nn.Linear(6, 6)).double()
    with fake.opened():
        pipeline = Pipeline(
            layers, num_stages=2, num_microbatches=8, schedule="1f1b", remat="never", devices=fake.devices
        )
        pipeline.step(*mlp_batch(8), mse_loss)
    assert len(alive) == 8
    assert max(alive) == 2


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


def _no_wait_for_the_producer(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
    patch.setattr(FakeStream, "wait_stream", lambda stream, other: None)


def _recorded_unless(compute: bool) -> Callable[[pytest.MonkeyPatch, FakeAccelerator], None]:
    def plant(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
        tell = fake.record_stream

        def record_stream(tensor: Tensor, stream: FakeStream) -> None:
            if stream.name.endswith("compute") != compute:
                tell(tensor, stream)

        patch.setattr(devices, "record_stream", record_stream)

    return plant


def _event_before_the_copy(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
    early: dict[devices.CopyStreams, devices.Mark] = {}
    wait, close = devices.CopyStreams.open, devices.CopyStreams.close

    def open_(way: devices.CopyStreams) -> None:
        early[way] = close(way)
        wait(way)

    patch.setattr(devices.CopyStreams, "open", open_)
    patch.setattr(devices.CopyStreams, "close", lambda way: early[way])


def _event_in_the_wrong_stream(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
    record = FakeEvent.record
    patch.setattr(
        FakeEvent, "record", lambda event, stream: record(event, fake.current_stream(stream.device))
    )


def _sent_tensor_overwritten(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
    send = devices.CopyStreams.send

    def send_and_write(way: devices.CopyStreams, tensor: Tensor) -> Tensor:
        sent = send(way, tensor)
        tensor.mul_(1.0)
        return sent

    patch.setattr(devices.CopyStreams, "send", send_and_write)


def _device_wide_wait(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
    receive = InProcess.receive

    def waiting(transport: InProcess, edge: Edge, microbatch: int) -> Any:
        devices.synchronize(fake.devices[0])
        return receive(transport, edge, microbatch)

    patch.setattr(InProcess, "receive", waiting)


def _number_read(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
    receive = InProcess.receive_back

    def reading(transport: InProcess, edge: Edge, microbatch: int) -> Any:
        found = receive(transport, edge, microbatch)
        assert found[0].sum().item() != 0
        return found

    patch.setattr(InProcess, "receive_back", reading)


def _pageable_inputs(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
    patch.setattr(devices, "pinned", lambda tensor: tensor)


def _no_device_guard(patch: pytest.MonkeyPatch, fake: FakeAccelerator) -> None:
    patch.setattr("gpipe_bench.pipeline.step.Steps._on_their_devices", lambda self, observe: observe)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch, FakeAccelerator], None], Kind]] = {
    "no wait at receive": (_no_wait_at_receive, Kind.READ),
    "the copy does not wait for the kernel": (_no_wait_for_the_producer, Kind.READ),
    "a message freed while it is copied": (_recorded_unless(compute=False), Kind.FREED),
    "a received tensor freed while it is used": (_recorded_unless(compute=True), Kind.FREED),
    "the event recorded before the copy": (_event_before_the_copy, Kind.READ),
    "the event recorded in the computing stream": (_event_in_the_wrong_stream, Kind.READ),
    "a sent tensor overwritten": (_sent_tensor_overwritten, Kind.WRITE),
    "a wait for a whole device": (_device_wide_wait, Kind.HOST_WAIT),
    "a number read from a device": (_number_read, Kind.HOST_WAIT),
    "inputs from pageable memory": (_pageable_inputs, Kind.PAGEABLE),
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


def test_a_cpu_stage_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeAccelerator(1)
    with fake.opened():
        pipeline = Pipeline(seeded(mlp), num_stages=2, num_microbatches=2, devices=[fake.devices[0], "cpu"])
        monkeypatch.setattr(FakeEvent, "synchronize", lambda event: None)
        two_steps(fake, pipeline)
    assert Kind.READ in {fault.kind for fault in fake.history.faults}


@pytest.mark.parametrize(("name", "slots_taken"), [("gpipe", 143), ("1f1b", 199)])
def test_copies_among_the_computations_cost_slots(
    name: str, slots_taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain `.to(device)` at sending: right, since both streams wait for each other, and slow for it."""

    def send(transfer: devices.Transfers, tensors: Sequence[Tensor | None], target: torch.device) -> Any:
        return tuple(None if t is None else t.to(target, non_blocking=True) for t in tensors), ()

    schedule = SCHEDULES[name](4, 32, remat="always")
    fake = FakeAccelerator(4, slots)
    with fake.opened():
        batch, target = mlp_batch(32)
        batch, target = batch.to(fake.devices[0]), target.to(fake.devices[3])
        monkeypatch.setattr(devices.Transfers, "send", send)
        two_steps(fake, pipeline_of(fake, schedule, seeded(mlp)), (batch, target))
    assert fake.history.makespan == slots_taken
    assert {fault.kind for fault in fake.history.faults} <= {Kind.FREED}


def test_layers_without_parameters_go_where_the_rest_of_the_model_is() -> None:
    """A rank that has none of them opens the same connections as the others."""
    layers = [nn.Linear(2, 2, device="meta"), nn.ReLU()]
    assert devices_of(None, 2, layers[1:], layers) == (torch.device("meta"),) * 2
    assert devices_of(None, 2, layers[1:], layers[1:]) == (torch.device("cpu"),) * 2

"""Devices: a CPU gives harmless answers, so that nothing else needs a second path; what the engine asks of
torch without its promise is there, and one file each asks.

Stages on devices of their own: pretended devices, whose streams take notes (`fakes.streams`). What goes wrong
on a GPU only now and then is looked for in every step: a use of memory without a wait, memory given back too
early, a host that waits.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.streams import TYPE, FakeAccelerator, Kind
from tiny_models import everything, everything_batch, mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from gpipe_bench.pipeline import NAMED, SLOTS, Action, Pipeline, Schedule, clock, devices, named, replay
from gpipe_bench.pipeline.arguments import devices_of
from gpipe_bench.pipeline.plan.named import SCHEDULES

CPU = torch.device("cpu")
PIPELINE = Path(devices.__file__).parent


def test_a_cpu_is_no_accelerator_and_there_is_one() -> None:
    assert not devices.is_accelerator(CPU)
    assert devices.is_accelerator(torch.device("cuda", 0))
    assert (devices.count("cpu"), devices.current("cpu")) == (1, CPU)


def test_what_is_asked_of_a_cpu_does_no_harm() -> None:
    tensor = torch.ones(3)
    with devices.on(CPU), devices.using(devices.new_stream(CPU)):
        doubled = tensor * 2
    devices.record_stream(doubled, devices.current_stream(CPU))
    devices.synchronize(CPU)
    devices.hold(CPU, 60.0)
    devices.reset_peak(CPU)
    devices.empty_cache(CPU)
    assert doubled.tolist() == [2, 2, 2]
    assert (devices.total_memory_bytes(CPU), devices.peak_bytes(CPU)) == (0, 0)
    assert devices.generator(CPU) is torch.default_generator
    assert devices.name(CPU)


def test_a_device_gets_its_index_and_its_allocator_is_there_before_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parameter is on "cuda:1", which "cuda" is not; torch 2.11 refuses to reset what is not there."""
    asked: list[object] = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: asked.append("up") or 1)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", asked.append)
    assert devices.exact("cuda") == torch.device("cuda", 1)
    assert [devices.exact(name) for name in ("cuda:3", "cpu")] == [torch.device("cuda", 3), CPU]
    asked.clear()
    devices.reset_peak(torch.device("cuda", 1))
    assert asked == ["up", torch.device("cuda", 1)]


def test_no_other_file_names_an_accelerators_interface() -> None:
    """One file to read for another kind of device."""
    found = []
    for path in sorted(PIPELINE.rglob("*.py")):
        if path.name == "devices.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if named and node.value.id == "torch" and node.attr in ("cuda", "accelerator", "xpu", "mps"):
                found.append(f"{path.relative_to(PIPELINE)}:{node.lineno}")
    assert not found, f"ask `devices` instead: {found}"


def test_a_device_without_a_generator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(ValueError, match="torch names no random generator of"):
        devices.generator(torch.device("hpu", 0))


ASKED = {
    "_get_backend": (dist.ProcessGroup, "ranks/failure.py"),
    "PrefixStore": (dist, "ranks/failure.py"),
    "get_group_store": (dist.ProcessGroup, "ranks/failure.py"),
    "_flatten": (DeviceMesh, "mesh/grid.py"),
    "_fsdp_collectives": (torch.distributed.fsdp._fully_shard, "mesh/sharding.py"),
    "_get_fsdp_state": (FSDPModule, "mesh/sharding.py"),
    "_root_post_backward_final_callback": (FSDPState, "mesh/sharding.py"),
    "_unscale_grads_": (torch.amp.GradScaler, "mesh/gradients.py"),
    "_set_grad_enabled": (torch._C, "stage/stage.py"),
    "_execution_engine": (torch.autograd.Variable, "stage/split_backward.py"),
    "_FunctionBase": (torch._C, "stage/tensors.py"),
}


@pytest.mark.parametrize("name", ASKED)
def test_it_is_there_and_one_file_asks(name: str) -> None:
    owner, file = ASKED[name]
    assert hasattr(owner, name)
    asking = [path for folder in ("stage", "ranks", "mesh") for path in (PIPELINE / folder).rglob("*.py")]
    asking = [path for path in asking if re.search(rf"\b{name}\b", path.read_text())]
    assert [str(path.relative_to(PIPELINE)) for path in asking] == [file]


# Stages on devices of their own


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


def test_layers_without_parameters_go_where_the_rest_of_the_model_is() -> None:
    """A rank that has none of them opens the same connections as the others."""
    layers = [nn.Linear(2, 2, device="meta"), nn.ReLU()]
    assert devices_of(None, 2, layers[1:], layers) == (torch.device("meta"),) * 2
    assert devices_of(None, 2, layers[1:], layers[1:]) == (torch.device("cpu"),) * 2

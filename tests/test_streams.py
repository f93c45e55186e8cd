"""Stages on devices of their own: pretended devices, whose streams take notes (`fakes.streams`).

What can only go wrong on a GPU, and there only now and then, is looked for here in every step: a use of
memory without a wait, memory given back too early, a host that waits. The same notes tell how long a schedule
takes when nothing but its waits holds it up. Whether what looks can see at all is shown by faults that are
planted in what it looks at.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fakes.happens_before import Kind
from fakes.streams import TYPE, FakeAccelerator, FakeEvent, FakeStream
from tiny_models import everything, everything_batch, mlp, mlp_batch, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline, clock, devices, transfers
from gpipe_bench.pipeline.plan.replay import SLOTS, replay
from gpipe_bench.pipeline.plan.schedule import SCHEDULES, Action, Schedule
from gpipe_bench.pipeline.plan.schedules.known import NAMED, named
from gpipe_bench.pipeline.transport import InProcess

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
    assert replay(schedule, SLOTS).makespan_s <= fake.history.makespan <= replay(schedule, SLOTS).makespan_s + 4


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

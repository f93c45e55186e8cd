"""Schedules of ours in torch's own runtime, and torch's in our engine."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import TIMEOUT_S, halves, raises
from tiny_models import EXACT, assert_own_gradients, mlp_batch, plain_step
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import schedules

from gpipe_bench.experiments.engines import known
from gpipe_bench.experiments.engines.known import CLASSES, TorchRuntime
from gpipe_bench.pipeline import NAMED, Action, Kind, Pipeline, Schedule, named, validate
from gpipe_bench.pipeline.plan.files import from_csv, to_csv

mse_loss = nn.functional.mse_loss


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


def torch_of_rows(
    schedule: Schedule, stages: list[list[nn.Module]], group: dist.ProcessGroup
) -> TorchRuntime:
    """torch's runtime, which reads rows from a file, with a schedule of ours."""

    def runtime(mine: Any, number: int, *, loss_fn: Any) -> Any:
        made = schedules._PipelineScheduleRuntime(mine, number, loss_fn=loss_fn)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "schedule.csv"
            path.write_text(to_csv(schedule))
            made._load_csv(str(path), format="compute_only")
        return made

    place = tuple(schedule.worker(stage) for stage in range(schedule.num_stages))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "get_schedule_class", lambda name: runtime)
        patch.setattr(known, "_placement", lambda *_: place)
        return TorchRuntime("interleaved", stages, 4, group, torch.device("cpu"))


def rows_of(runtime: TorchRuntime) -> Schedule:
    """The schedule that torch runs."""
    # A schedule with one stage per process makes its rows only when it is asked.
    order = getattr(runtime.running, "pipeline_order", None) or runtime.running._get_pipeline_order()
    rows = (order[rank] for rank in sorted(order))
    text = "\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in rows)
    return from_csv(text, "torch")


def our_rows_in_torchs_runtime() -> None:
    """torch trains what we write to the weights to which we train it: all but recomputations."""
    group = halves().group
    for name in NAMED:
        schedule = named(name, 2, 4)
        theirs, ours = layers_for_torch(schedule.num_stages), layers_for_torch(schedule.num_stages)
        runtime = torch_of_rows(schedule, theirs, group)
        pipeline = Pipeline(
            list(itertools.chain(*ours)),
            num_stages=schedule.num_stages,
            num_microbatches=4,
            schedule=schedule,
            cost=[1] * (2 * schedule.num_stages),
            group=group,
            timeout_s=TIMEOUT_S,
        )
        wanted = weights_after_three_steps(theirs, lambda x, y, r=runtime: r.step(x, y, mse_loss))
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
        runtime = TorchRuntime(name, stages, 4, pair.group, torch.device("cpu"))
        schedule = rows_of(runtime)
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


CASES = (
    our_rows_in_torchs_runtime,
    torchs_rows_in_our_engine,
)

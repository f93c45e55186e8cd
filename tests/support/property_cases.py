"""Random layers, schedules and sizes over processes: every gradient is the plain model's."""

from __future__ import annotations

import copy
import random
from unittest import mock

import torch
from random_models import plain_gradients, random_layers
from random_schedules import random_remat, random_schedule
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.pipeline import Pipeline, Schedule
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.remat import to_text
from gpipe_bench.pipeline.ranks import ends

TIMEOUT_S = 30.0
# Limits for small messages, and widths of layers on both sides of each for the micro-batches below.
SMALL_BYTES = (0, 700, 6000, 2**18)
WIDTHS = (4, 4, 12, 12, 1024)


class Example:
    """Everything about example number `number`, the same in every process."""

    def __init__(self, seed: int, number: int) -> None:
        generator = random.Random(f"{seed} {number}")
        self.num_stages = self.num_workers = generator.choice([2, 3])
        self.num_microbatches = generator.randint(1, 7)
        self.remat = random_remat(generator, self.num_stages)
        self.schedule = self._schedule(generator)
        self.share_memory = generator.random() < 0.5
        self.small_bytes = generator.choice(SMALL_BYTES)
        self.width = generator.choice(WIDTHS)
        self.zeroed = generator.random() < 0.5  # gradients between steps, or else they add up
        most = 2 if self.width < 1000 else 16
        self.batch_size = self.num_microbatches * generator.choice([1, 1, most]) + generator.randrange(2)
        self.layers = random_layers(generator, generator.randint(self.num_stages, 8), self.width)
        self.cost = [generator.choice([1, 3]) for _ in self.layers]
        self.seed = generator.randrange(2**32)

    def _schedule(self, generator: random.Random) -> Schedule:
        if generator.random() < 0.5:
            return random_schedule(generator, self.num_stages, self.num_microbatches, self.remat)
        name = generator.choice(sorted(SCHEDULES))
        return SCHEDULES[name](self.num_stages, self.num_microbatches, remat=self.remat)

    def __str__(self) -> str:
        layers = " ".join(
            "+".join(type(part).__name__ for part in layer)
            if isinstance(layer, nn.Sequential)
            else type(layer).__name__
            for layer in self.layers
        )
        return (
            f"K={self.num_stages} M={self.num_microbatches} {self.schedule.name} "
            f"remat={to_text(self.schedule.remat)} N={self.batch_size} width={self.width} "
            f"small_bytes={self.small_bytes} share_memory={self.share_memory} zeroed={self.zeroed}: {layers}"
        )

    def problems(self, group: dist.ProcessGroup | None) -> list[str]:
        """What is wrong, in this process, after each of three steps and in what it evaluates."""
        with mock.patch.object(ends, "SMALL_BYTES", self.small_bytes):
            return self._problems(group)

    def _problems(self, group: dist.ProcessGroup | None) -> list[str]:
        plain, layers = copy.deepcopy(self.layers), self.layers
        rank, last = (0, 0) if group is None else (dist.get_rank(group), self.num_stages - 1)
        pipeline = Pipeline(
            layers,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            cost=self.cost,
            group=group,
            timeout_s=TIMEOUT_S,
            share_memory=self.share_memory,
        )
        generator = torch.Generator().manual_seed(self.seed)
        found: list[str] = []
        sums: dict[str, Tensor | None] = {}
        for step in range(3):
            batch = torch.randn(self.batch_size, self.width, generator=generator, dtype=torch.float64)
            target = torch.randn(self.batch_size, 1, generator=generator, dtype=torch.float64)
            wanted = plain_gradients(plain, batch, target, self.schedule)
            if self.zeroed:
                pipeline.zero_grad()
            else:
                wanted = {name: _sum(sums.get(name), gradient) for name, gradient in wanted.items()}
                sums = wanted
            pipeline.step(
                batch if rank == 0 else None, target if rank == last else None, nn.functional.mse_loss
            )
            found += [
                f"step {step}: {text}" for text in _differences(pipeline, wanted, nn.Sequential(*plain))
            ]
        pipeline.eval()
        outputs = [pipeline(batch if rank == 0 else None) for _ in range(2)]
        if rank == last:
            # Layers that remember change here too; the first output must survive the second evaluation.
            model = nn.Sequential(*plain)
            with torch.no_grad():
                for output in outputs:
                    again = torch.cat([model(x) for x in _in_order(batch, self.schedule)])
                    order = _order(batch, self.schedule)
                    if not torch.allclose(output, again[order], rtol=1e-12, atol=1e-13):
                        found.append("an evaluation differs")
        return found


def _in_order(batch: Tensor, schedule: Schedule) -> list[Tensor]:
    parts = torch.tensor_split(batch, schedule.num_microbatches)
    return [parts[action.microbatch] for action in schedule.row(0) if action.kind == "F"]


def _order(batch: Tensor, schedule: Schedule) -> Tensor:
    """Where the examples of the mini-batch stand among those taken in the order of the forwards."""
    return torch.cat(_in_order(torch.arange(len(batch)), schedule)).argsort()


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _differences(pipeline: Pipeline, wanted: dict[str, Tensor | None], plain: nn.Module) -> list[str]:
    found = []
    # Parts of a gradient may cancel out, so what rounding leaves is judged by the largest.
    largest = max(float(gradient.abs().max()) for gradient in wanted.values() if gradient is not None)
    for name, parameter in pipeline.named_parameters():
        gradient, ours = wanted[name], parameter.grad
        if gradient is None or ours is None:
            if gradient is not None or ours is not None:
                found.append(f"{name} has {'no' if ours is None else 'a'} gradient")
        elif not torch.allclose(ours, gradient, rtol=1e-12, atol=1e-12 * largest):
            error = float((ours - gradient).abs().max()) / largest
            found.append(f"the gradient of {name} is off by {error:.1e}")
    for name, buffer in pipeline.named_buffers():
        if not torch.allclose(buffer, plain.get_buffer(name), rtol=1e-12, atol=1e-13):
            found.append(f"buffer {name} differs")
    return found
